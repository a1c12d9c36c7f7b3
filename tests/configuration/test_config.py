"""Every wrong configuration is refused when it is built, with a message that names the remedy."""

import dataclasses
import json

import pytest
import torch
from transformers import AutoConfig, DynamicCache

import frankenstein_hf as fhf
from frankenstein_hf.configuration.component import MixerSpec
from frankenstein_hf.configuration.registries import MIXERS

from ..tiny import ALL_MIXERS, tiny_config, tiny_model, tokens

WRONG = [
    (dict(hiden_size=32), "'hiden_size'.*did you mean 'hidden_size'"),
    (dict(layer_pattern="gatd_deltanet"), "'gatd_deltanet'.*did you mean 'gated_deltanet'"),
    (dict(hidden_size="32"), "hidden_size.*a whole number.*Write hidden_size=32"),
    (dict(use_cache=1), "use_cache"),
    (dict(hidden_size=30), "hidden_size=30.*num_attention_heads=4"),
    (dict(num_key_value_heads=3), "num_key_value_heads=3 must divide num_attention_heads=4"),
    (dict(layer_pattern=["swa"] * 8), "8 entries, more than num_hidden_layers=4"),
    (dict(layer_pattern=["swa"] * 3), "3 entries, which does not divide num_hidden_layers=4"),
    (dict(layer_pattern=[]), "layer_pattern is empty"),
    (dict(mixer_params={"swaa": {}}), "'swaa'.*did you mean 'swa'"),
    (dict(layer_pattern="swa", mixer_params={"swa": {"windw_size": 3}}), "'windw_size'.*did you mean 'window_size'"),
    (dict(layer_pattern="swa", mixer_params={"swa": {"window_size": 0}}), "window_size.*≥ 1, got 0"),
    (dict(layer_pattern="swa", mixer_params={"swa": {"window_size": 2.5}}), "window_size.*a whole number"),
    (dict(layer_pattern="swa", mixer_params={"swa": {"window_size": True}}), "window_size.*a whole number"),
    (dict(layer_pattern="swa", mixer_params={"swa": {"window_size": 4, "num_sinks": 4}}), "num_sinks=4 must be below"),
    (dict(layer_pattern="gqa", mixer_params={"gqa": {"num_key_value_heads": 3}}), "num_key_value_heads=3 must divide"),
    (dict(layer_pattern="gla", mixer_params={"gla": {"gate_normalizer": float("nan")}}), "gate_normalizer"),
    (dict(layer_pattern="mamba", mixer_params={"mamba": {"discretization": "eulr"}}), "did you mean 'euler'"),
    (dict(layer_pattern="mamba", mixer_params={"mamba": {"time_step_min": 1.0}}), "time_step_min=1.0 must not exceed"),
    (dict(norm="rmsnorm"), "'rmsnorm'.*did you mean 'rms_norm'"),
    (dict(feed_forward="gate"), "'gate'.*did you mean 'gated'"),
    (dict(hidden_act="siluu"), "'siluu'.*did you mean 'silu'"),
    (dict(attention_dropout=1.0), "attention_dropout=1.0.*≥ 0 and < 1"),
    (dict(vocab_size=0), "vocab_size=0.*from 1 to"),
    (dict(classifier_pooling="men"), "did you mean 'mean'"),
    (dict(rope_parameters={"rope_type": "yarm", "rope_theta": 1e4}), "'yarm'.*did you mean 'yarn'"),
    (dict(per_layer_config={0: {"mixer_params": {"gla": {"gate_lowrank": 3}}}}), None),
]


@pytest.mark.parametrize(("values", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_values_raise_at_construction(values, message):
    if message is None:  # a key for a mixer that layer does not have is still checked
        values = {"layer_pattern": "gla", **values}
        message = "'gate_lowrank'.*did you mean 'gate_low_rank'"
    with pytest.raises(ValueError, match="(?s)" + message):
        fhf.FrankensteinConfig(**values)


def test_assigning_a_wrong_type_raises_too():
    with pytest.raises(ValueError, match="hidden_size"):
        tiny_config("gla").hidden_size = "8"


def test_keys_of_a_newer_version_warn_and_older_unknown_keys_raise(caplog):
    newer = {**tiny_config("standard").to_dict(), "frankenstein_version": "99.0", "warp_drive": 3}
    with caplog.at_level("WARNING"):
        assert fhf.FrankensteinConfig(**newer).warp_drive == 3
    with pytest.raises(ValueError, match="warp_drive"):
        fhf.FrankensteinConfig(**{**newer, "frankenstein_version": fhf.__version__})


def test_default_pattern_is_cut_to_the_depth_and_patterns_repeat():
    assert fhf.FrankensteinConfig(num_hidden_layers=6).mixer_names == [
        "gated_deltanet", "swa", "gated_deltanet", "standard", "gated_deltanet", "swa",
    ]  # fmt: skip
    assert fhf.FrankensteinConfig(layer_pattern=["gla", "mamba"]).mixer_names == ["gla", "mamba"] * 2


def test_defaults_shrink_to_what_the_window_allows():
    assert tiny_config("swa", mixer_params={"swa": {"window_size": 3}}).params_for(0).num_sinks == 2


@pytest.mark.parametrize("name", ALL_MIXERS)
def test_config_survives_json_and_auto_config(name, tmp_path):
    config = tiny_config([name, name], per_layer_config={1: {"mixer_params": {name: {}}}})
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is fhf.FrankensteinConfig
    assert loaded.to_diff_dict() == config.to_diff_dict()
    assert [loaded.params_for(i) for i in range(2)] == [config.params_for(i) for i in range(2)]
    assert "layer_types" not in json.loads((tmp_path / "config.json").read_text())


def test_per_layer_config_replaces_the_parameters_of_one_layer():
    params = {"swa": {"window_size": 6, "num_sinks": 2}}
    other = {"swa": {"window_size": 9, "num_sinks": 2}}
    config = tiny_config(["swa", "swa"], mixer_params=params, per_layer_config={1: {"mixer_params": other}})
    assert [config.params_for(i).window_size for i in range(2)] == [6, 9]
    model = fhf.FrankensteinForCausalLM(config).eval()
    assert [layer.mixer.params.window_size for layer in model.model.layers] == [6, 9]
    cache = DynamicCache(config=config)
    model(tokens(1, 9), cache=cache)
    assert [layer.states["key"].shape[1] for layer in cache.layers] == [4, 7]


@pytest.mark.parametrize("spec", list(MIXERS), ids=lambda spec: spec.name)
def test_every_spec_is_complete(spec: MixerSpec):
    assert spec.summary.endswith(".") and spec.reference and spec.implementation and spec.family
    assert spec.causal or spec.bidirectional
    spec.params()  # every parameter has a default
    for field in dataclasses.fields(spec.params):
        assert field.metadata.get("doc"), f"{spec.name}.{field.name} is undocumented"
        assert field.type
    config = tiny_config(spec.name)
    assert (spec.token_size(config.params_for(0), config) > 0) == spec.grows


def test_listing_and_lookup():
    assert fhf.list_mixers() == sorted(spec.name for spec in MIXERS)
    dense = fhf.list_mixers("dense")
    assert dense == sorted(spec.name for spec in MIXERS if spec.family == "dense") and "standard" in dense
    assert fhf.mixer_spec("gla").family == "gated"
    with pytest.raises(ValueError, match="Unknown mixer 'gl'"):
        fhf.mixer_spec("gl")
    with pytest.raises(ValueError, match=r"Unknown mixer family 'dens'.*did you mean 'dense'"):
        fhf.list_mixers("dens")


def test_a_third_party_mixer_is_used_by_name(monkeypatch):
    from frankenstein_hf.modeling.mixers.base import RowMixer

    class Doubler(RowMixer):
        """Twice the input."""

        def mix(self, x, rows, layer):
            if layer is not None:
                layer.read(self.advance)
                layer.write({}, {}, rows.context.keep)
            return 2 * x, None

        def advance(self, inputs, states, lengths):
            return {}

    MIXERS.names()
    monkeypatch.setattr(MIXERS, "_specs", dict(MIXERS._specs))
    spec = MixerSpec(name="doubler", family="test", summary="Twice the input.", reference="none")
    fhf.register_mixer(spec, Doubler)
    fhf.register_mixer(spec, Doubler)  # repeating is harmless
    model = tiny_model(["doubler", "standard"])
    x = tokens(1, 5)
    assert torch.equal(
        model.generate(x, max_new_tokens=3, do_sample=False),
        model.generate(x, max_new_tokens=3, do_sample=False, use_cache=False),
    )
    with pytest.raises(ValueError, match="'gla' is registered already"):
        fhf.register_mixer(MixerSpec(name="gla", family="test", summary="", reference=""), Doubler)
    with pytest.raises(TypeError, match="subclass of"):
        fhf.register_mixer(spec, torch.nn.Linear)
