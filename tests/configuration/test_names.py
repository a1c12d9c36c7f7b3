"""Names of registered parts, and what a configuration says about names it does not know."""

import json

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig

import frankenstein_hf as fhf
from frankenstein_hf.configuration.component import ComponentSpec, MixerSpec, Registry
from frankenstein_hf.configuration.registries import KINDS, MIXERS
from frankenstein_hf.modeling.mixers.base import Mixer
from frankenstein_hf.optim.spec import OPTIMIZERS, STABILIZERS, OptimizerSpec, StabilizerSpec

from ..tiny import tiny_config, tiny_model, tokens

REGISTRIES = [(MIXERS, MixerSpec), (OPTIMIZERS, OptimizerSpec), (STABILIZERS, StabilizerSpec)]
REGISTRIES += [(kind.registry, ComponentSpec) for kind in KINDS.values()]
every_registry = pytest.mark.parametrize(("registry", "spec"), REGISTRIES, ids=lambda x: getattr(x, "kind", ""))


class Nothing(Mixer):
    """Never built."""


@every_registry
@pytest.mark.parametrize(
    "name", ["", "GLA", "a b", "a-b", "a.b", "1a", "_a", "x'", "frankenstein_mine", None, 3, ["a"]]
)
def test_no_part_can_have_a_name_that_is_none(registry: Registry, spec, name):
    with pytest.raises(ValueError, match="cannot be called"):
        registry.register(spec(name=name, family="test", summary="", reference=""))
    assert name not in registry.names()


@every_registry
def test_no_part_can_take_the_name_of_another(registry: Registry, spec):
    with pytest.raises(ValueError, match="is registered already"):
        registry.register(spec(name=registry.names()[0], family="test", summary="", reference="another"))


@pytest.mark.parametrize(
    "name", ["sdpa", "eager", "triton", "flex_attention", "flash_attention_2", "somebody_s_kernel"]
)
def test_a_mixer_cannot_shadow_a_backend(name):
    AttentionInterface.register("somebody_s_kernel", lambda *arguments: None)
    spec = MixerSpec(name=name, family="test", summary="", reference="")
    with pytest.raises(ValueError, match="backend of attn_implementation"):
        fhf.register_mixer(spec, Nothing)
    model = AutoModelForCausalLM.from_config(tiny_config("gla"), attn_implementation="sdpa")
    assert model.config.mixer_names == ["gla"]


WRITTEN = [
    (dict(layer_pattern="GLA"), "did you mean 'gla'"),
    (dict(layer_pattern="Gated-DeltaNet"), "did you mean 'gated_deltanet'"),
    (dict(layer_pattern="attention"), "did you mean 'standard'"),
    (dict(layer_pattern="full_attention"), "did you mean 'standard'"),
    (dict(layer_pattern="sliding_window"), "did you mean 'swa'"),
    (dict(layer_pattern="sliding_attention"), "did you mean 'swa'"),
    (dict(mixer="gla"), "'mixer'; did you mean 'layer_pattern'.*Write layer_pattern='gla'"),
    (dict(n_layer=3), "did you mean 'num_hidden_layers'"),
    (dict(Hidden_Size=8), "did you mean 'hidden_size'"),
    (dict(sliding_window=8), r"did you mean 'mixer_params'.*mixer_params={'swa'"),
    (dict(hidden_size="64"), "a whole number from 1 to 131072. Write hidden_size=64"),
    (dict(layer_pattern="swa", mixer_params={"window_size": 4}), r"Write mixer_params=\{'swa': \{'window_size': 4\}\}"),
    (dict(num_hidden_layers=10**9), "num_hidden_layers=1000000000: .* from 1 to 10000"),
    (dict(hidden_size=2**17, num_hidden_layers=10_000), "No machine holds this model: .*hidden_size=131072"),
    (dict(rope_theta=0), "rope_theta"),
    (dict(rope_parameters={"rope_theta": float("nan")}), "finite number > 1"),
    (dict(rope_parameters={"rope_type": []}), "Unknown rope_type"),
    (dict(attn_implementation=["gla"]), "Unknown attn_implementation"),
    (dict(pad_token_id=32000), "pad_token_id=32000 must be below vocab_size=32000.*resize_token_embeddings"),
    (dict(model_type="llama"), "another model family"),
]


@pytest.mark.parametrize(("values", "message"), WRITTEN, ids=lambda value: str(value)[:40])
def test_what_is_almost_right_is_answered_with_what_is_right(values, message):
    with pytest.raises(ValueError, match="(?s)" + message):
        fhf.FrankensteinConfig(**values)


def test_a_pattern_is_read_as_on_the_command_line():
    for text in ("swa,gla", " swa , gla,", '["swa", "gla"]'):
        assert fhf.FrankensteinConfig(layer_pattern=text).layer_pattern == ["swa", "gla"]
    assert fhf.FrankensteinConfig(layer_pattern=("swa", "gla")).layer_pattern == ["swa", "gla"]


# ---------------------------------------------------------------------- keys that would be accepted and ignored


def test_layer_types_are_the_pattern_or_an_error():
    assert fhf.FrankensteinConfig(layer_types=["gla"] * 4).mixer_names == ["gla"] * 4
    derived = fhf.FrankensteinConfig(layer_pattern="gla").layer_types
    assert fhf.FrankensteinConfig(layer_pattern="gla", layer_types=derived).layer_pattern == ["gla"]
    for types, message in (
        (["full_attention"] * 4, "did you mean 'standard'"),
        (["linear_attention"] * 4, "would have no effect"),
        (derived[:2], "would have no effect"),
        ("gla", "would have no effect"),
    ):
        with pytest.raises(ValueError, match=message):
            fhf.FrankensteinConfig(layer_types=types)
    with pytest.raises(ValueError, match="contradicts layer_pattern"):
        fhf.FrankensteinConfig(layer_types=["gla"] * 4, layer_pattern="swa")
    config = tiny_config("gla")
    config.layer_types = ["swa"]
    assert config.layer_pattern == ["swa"]


@pytest.mark.parametrize(
    "values",
    [
        dict(is_decoder=True), dict(use_bidirectional_attention=True), dict(chunk_size_feed_forward=2),
        dict(is_encoder_decoder=True), dict(temperature=0.7), dict(max_length=9), dict(experts_implementation="x"),
        dict(num_labels=3, id2label={0: "a", 1: "b"}), dict(label2id={"a": 0, "b": 1}, id2label={0: "b", 1: "a"}),
        dict(rope_theta=5e5, rope_parameters={"rope_theta": 1e4}), dict(rope_parameters={"factor": 2.0}),
        dict(rope_scaling={"rope_type": "linear", "factor": 2.0}, rope_parameters={"rope_type": "default"}),
        dict(dtype="float16", torch_dtype="bfloat16"), dict(per_layer_config={0: {"skip": ["mlp"]}}),
    ],
    ids=str,
)  # fmt: skip
def test_no_key_is_accepted_and_then_ignored(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        fhf.FrankensteinConfig(**values)


def test_labels_are_kept_whichever_way_they_are_given(tmp_path):
    for values in (
        dict(id2label={0: "no", 1: "yes", 2: "so"}),
        dict(id2label={"1": "yes", "0": "no", "2": "so"}),
        dict(label2id={"no": 0, "yes": 1, "so": 2}),
    ):
        config = tiny_config("gla", **values)
        assert config.id2label == {0: "no", 1: "yes", 2: "so"} and config.label2id == {"no": 0, "yes": 1, "so": 2}
    config.save_pretrained(tmp_path)
    loaded = fhf.FrankensteinConfig.from_pretrained(tmp_path, label2id={"a": 0, "b": 1})
    assert loaded.id2label == {0: "a", 1: "b"} and loaded.num_labels == 2
    assert fhf.FrankensteinConfig.from_pretrained(tmp_path, num_labels=5).num_labels == 5
    loaded.label2id = {"x": 0}
    assert loaded.id2label == {0: "x"}


def test_the_callers_dicts_are_not_written_into():
    rope, params = {"rope_theta": 1e5}, {"swa": {}}
    fhf.FrankensteinConfig(rope_parameters=rope, mixer_params=params, layer_pattern="swa")
    assert rope == {"rope_theta": 1e5} and params == {"swa": {}}


# ---------------------------------------------------------------------- what can be saved can be loaded


def test_an_attribute_that_could_not_be_loaded_cannot_be_set(tmp_path):
    config = tiny_config("gla")
    with pytest.raises(ValueError, match=r"'my_note'.*task_specific_params"):
        config.my_note = "trained on Tuesday"
    with pytest.raises(ValueError, match="did you mean 'hidden_size'"):
        config.hiden_size = 8
    config.task_specific_params = {"my_note": "trained on Tuesday"}
    config._private = object()  # of this process
    config.save_pretrained(tmp_path)
    loaded = fhf.FrankensteinConfig.from_pretrained(tmp_path)
    assert loaded.task_specific_params == {"my_note": "trained on Tuesday"} and not hasattr(loaded, "_private")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hidden_size", 0, "hidden_size=0"), ("hidden_size", "8", "hidden_size='8'"), ("model_type", "x", "model_type"),
        ("rope_parameters", {"rope_type": "linear"}, "factor"), ("layer_pattern", "swaa", "did you mean 'swa'"),
        ("pad_token_id", 61, "below vocab_size=61"), ("temperature", 0.5, "generation_config.temperature"),
        ("per_layer_config", {0: {"x": 1}}, "cannot change x"), ("dtype", "int8", "dtype"),
        ("id2label", {1: "a"}, "id2"),
    ],
)  # fmt: skip
def test_assignments_are_checked_like_arguments(name, value, message):
    config = tiny_config("gla")
    before = config.to_dict()
    with pytest.raises(ValueError, match=message):
        setattr(config, name, value)
    assert config.to_dict() == before


def test_what_was_changed_inside_is_found_before_it_is_written(tmp_path):
    for change in (
        lambda config: config.rope_parameters.update(rope_theta=0),
        lambda config: config.mixer_params["gla"].update(gate_lowrank=3),
        lambda config: setattr(config, "num_attention_heads", 3),
        lambda config: setattr(config, "layer_pattern", ["gla", "gla"]),
    ):
        config = tiny_config("gla", num_key_value_heads=2)
        change(config)
        with pytest.raises(ValueError):
            config.save_pretrained(tmp_path / "nothing")
        assert not (tmp_path / "nothing").exists()


def test_the_vocabulary_cannot_shrink_below_a_special_token(tmp_path):
    model = tiny_model("gla", eos_token_id=[3, 60])
    with pytest.raises(ValueError, match="eos_token_id"):
        model.resize_token_embeddings(40)
    assert model.get_input_embeddings().num_embeddings == 61
    model.config.eos_token_id = 3
    model.resize_token_embeddings(40)
    model.save_pretrained(tmp_path, save_code=False)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens(1, 4) % 40).logits,
                       model(tokens(1, 4) % 40).logits)  # fmt: skip


def test_another_familys_checkpoint_says_whose_it_is(tmp_path):
    LlamaConfig(hidden_size=32, num_hidden_layers=1).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"
    with pytest.raises(ValueError, match=r"model_type='llama'.*another model family"):
        fhf.FrankensteinForCausalLM.from_pretrained(tmp_path)
