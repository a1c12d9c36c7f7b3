"""Other mixers in layers of a host: which layers change, what they take over, what they begin as."""

import pytest
import torch

import frankenstein_hf as fhf
from frankenstein_hf.configuration.registries import MIXERS

from ..tiny import relative_rms, tokens
from .hosts import GROUPED, make_host

TAKING = sorted(spec.name for spec in MIXERS if spec.transfer and spec.causal)
# parameters at which a mixer that has taken over the projections is the attention it replaces
COVERING = {
    "gqa": {}, "gated_softmax": {}, "swa": {"window_size": 200}, "longformer": {"window_size": 200},
    "bigbird": {"window_size": 200}, "sparse_transformer": {"stride": 64, "mode": "strided"},
    "sparge": {"threshold": 0.0}, "fasa": {"num_fac": 64}, "iha": {"init_noise": 0.0},
}  # fmt: skip
FORGETTING = {"gla": "log_decay", "gated_deltanet": "log_decay", "kda": "log_decay", "gated_deltanet2": "log_decay",
              "fox": "log_forget"}  # fmt: skip


def llama(**changes):
    return make_host("llama", **GROUPED | {"head_dim": 6, "attention_bias": False} | changes)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ({1: "gla"}, ["standard", "gla", "standard"]),
        ({"1": "gla", "2": "swa"}, ["standard", "gla", "swa"]),
        ({"1-2": "gla", 0: "kda"}, ["kda", "gla", "gla"]),
        (["gla", "standard", "swa"], ["gla", "standard", "swa"]),
        ("gla", ["gla"] * 3),
        ({0: "standard"}, ["standard"] * 3),
        (None, ["standard"] * 3),
    ],
)
def test_patterns_name_layers(pattern, expected):
    model = fhf.from_transformers(llama(), layer_pattern=pattern)
    assert model.config.mixer_names == expected
    changed = [i for i, name in enumerate(expected) if name != "standard"]
    for layer in fhf.transfer_report(model).layers:
        assert bool(layer.new or layer.derived or layer.dropped) == (layer.layer in changed and layer.mixer != "swa")


@pytest.mark.parametrize("name", TAKING)
def test_what_is_copied_is_the_hosts_with_heads_repeated(name):
    host = llama(attention_bias=True)
    params = {name: dict(MIXERS.get(name).small_params)}
    model = fhf.from_transformers(host, layer_pattern={1: name}, mixer_params=params)
    report = fhf.transfer_report(model).layers[1]
    state, old = model.model.layers[1].mixer.state_dict(), host.model.layers[1].self_attn.state_dict()
    parts = [set(report.copied), set(report.derived), set(report.new)]
    assert set().union(*parts) == set(state) and sum(map(len, parts)) == len(state)
    taken = {key for key in old if key.split(".")[0] in MIXERS.get(name).transfer}
    assert set(report.copied) | set(report.derived) >= taken and set(report.dropped) == set(old) - taken
    for key in report.copied:
        expected = old[key]
        if state[key].shape != expected.shape:
            expected = expected.unflatten(0, (2, -1)).repeat_interleave(2, dim=0).flatten(0, 1)
        assert torch.equal(state[key], expected)
    logits = model(tokens(2, 17)).logits
    logits.square().mean().backward()
    assert logits.isfinite().all() and all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", sorted(COVERING))
def test_a_mixer_that_can_be_the_old_attention_begins_as_it(name):
    host, x = llama(attention_bias=True), tokens(2, 17)
    params = {name: COVERING[name]} if COVERING[name] else None
    model = fhf.from_transformers(host, layer_pattern=name, mixer_params=params)
    with torch.no_grad():
        assert relative_rms(model(x).logits, host(x).logits) < 1e-5
        fresh = fhf.from_transformers(host, layer_pattern=name, mixer_params=params, init="fresh")
        assert relative_rms(fresh(x).logits, host(x).logits) > 0.1
    assert not fhf.transfer_report(fresh).layers[0].copied


@pytest.mark.parametrize("name", sorted(FORGETTING))
def test_decays_begin_slow(name):
    model, kept = fhf.from_transformers(llama(initializer_range=0.02), layer_pattern={0: name}), {}
    mixer = model.model.layers[0].mixer
    project = mixer.project

    def recording(x, rows):
        output = project(x, rows)
        kept.update(output[1] if isinstance(output, tuple) else output)
        return output

    mixer.project = recording
    model(tokens(2, 17))
    decay = kept[FORGETTING[name]]
    assert decay.exp().min() > 0.98 and decay.exp().max() < 1.0


def test_norms_of_queries_and_keys_are_taken_over_where_there_is_a_place():
    host, x = make_host("qwen3", 1), tokens(2, 17)
    model = fhf.from_transformers(host, layer_pattern={1: "swa"}, mixer_params={"swa": {"window_size": 99}})
    with torch.no_grad():
        assert relative_rms(model(x).logits, host(x).logits) < 1e-5
    model = fhf.from_transformers(host, layer_pattern="gla")
    assert model.config.qk_norm == "none"
    assert "q_norm.weight" in fhf.transfer_report(model).layers[0].dropped
    assert "dropped k_norm.weight, q_norm.weight" in str(fhf.transfer_report(model))


def test_the_hosts_own_windows_stay_beside_new_ones():
    host, x = make_host("qwen2", 0), tokens(2, 17)
    assert host.config.layer_types == ["full_attention", "sliding_attention", "sliding_attention"]
    params = {"swa": {"window_size": 99, "num_sinks": 1}}
    model = fhf.from_transformers(host, layer_pattern={0: "swa"}, mixer_params=params)
    sizes = [(model.config.params_for(i).window_size, model.config.params_for(i).num_sinks) for i in range(3)]
    assert sizes == [(99, 1), (5, 0), (5, 0)]
    with torch.no_grad():
        assert relative_rms(model(x).logits, host(x).logits) < 1e-5
    wider = fhf.from_transformers(host, layer_pattern={"1-2": "swa"}, mixer_params=params)
    assert [wider.config.mixer_names[i] for i in range(3)] == ["standard", "swa", "swa"]
    assert wider.config.params_for(2).window_size == 99


def test_fused_projections_are_parted_into_new_mixers_too():
    host = make_host("phi3", 0)
    mixer = fhf.from_transformers(host, layer_pattern={0: "gated_deltanet"}).model.layers[0].mixer
    qkv = host.model.layers[0].self_attn.qkv_proj.weight
    assert torch.equal(mixer.q_proj.weight, qkv[:24])
    assert torch.equal(mixer.v_proj.weight.view(4, 6, 24)[::2], qkv[36:].view(2, 6, 24))


def test_a_hybrid_is_saved_loaded_and_not_exported(tmp_path):
    model, x = fhf.from_transformers(llama(), layer_pattern={1: "gated_deltanet"}), tokens(2, 17)
    model.save_pretrained(tmp_path)
    loaded = fhf.FrankensteinForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(x).logits, model(x).logits)
    with pytest.raises(ValueError, match="'gated_deltanet' in layer 1"):
        fhf.to_transformers(model)
    with pytest.raises(ValueError, match="has no report"):
        fhf.transfer_report(loaded)


@pytest.mark.parametrize(
    ("pattern", "params", "message"),
    [
        (["gla", "swa"], None, "has 2 entries, and the host 3 layers"),
        ({3: "gla"}, None, r"3 is no layer\. Layers are whole numbers from 0 to 2"),
        ({"2-1": "gla"}, None, "'2-1' is no layer"),
        ({True: "gla"}, None, "True is no layer"),
        ({"0-1": "gla", 1: "swa"}, None, "names layer 1 twice"),
        ({0: "gal"}, None, "Unknown mixer 'gal'; did you mean"),
        ({0: 7}, None, "Unknown mixer 7"),
        ({0: "gla"}, {"swa": {"window_size": 4}}, r"mixer_params for swa have no effect: the changed layers are \{0"),
        (None, {"swa": {"window_size": 4}}, "layer_pattern changes no layer"),
        ({0: "swa"}, {"swa": {"window": 4}}, "window_size"),
        ({0: "ssog"}, None, "'ssog' has no causal form"),
    ],
)
def test_patterns_that_cannot_be_are_refused(pattern, params, message):
    with pytest.raises(ValueError, match=message):
        fhf.from_transformers(llama(), layer_pattern=pattern, mixer_params=params)
