"""Our sparse patterns inside transformers' own models: outputs, pads, caches, gradients, windows, refusals."""

from functools import partial

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    ViTConfig,
    ViTModel,
)
from transformers.masking_utils import sdpa_mask

import frankenstein_hf as fhf
from frankenstein_hf.configuration.registries import MIXERS

from ..tiny import assert_near, tokens

SMALL = dict(vocab_size=61, hidden_size=24, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4)
LLAMA = dict(num_key_value_heads=2, head_dim=6, max_position_embeddings=64, eos_token_id=None)
TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
QWEN = dict(use_sliding_window=True, sliding_window=3, layer_types=["sliding_attention", "full_attention"])
HOSTS = {
    "llama": lambda **k: LlamaForCausalLM(LlamaConfig(**SMALL, **LLAMA, **k)),
    "qwen3": lambda **k: Qwen3ForCausalLM(Qwen3Config(**SMALL, **LLAMA, **k)),
    "qwen3 with windows": lambda **k: Qwen3ForCausalLM(Qwen3Config(**SMALL, **LLAMA, **QWEN, **k)),
    "bert": lambda **k: BertModel(BertConfig(**SMALL, hidden_dropout_prob=0.0, max_position_embeddings=64, **k)),
    "modernbert": lambda **k: ModernBertModel(ModernBertConfig(**SMALL, **TOKENS, local_attention=4, **k)),
    "vit": lambda **k: ViTModel(ViTConfig(**SMALL | {"hidden_size": 24}, image_size=20, patch_size=4, **k)),
}
SMALL_PARAMS = {spec.name: dict(spec.small_params) for spec in MIXERS} | {"sigmoid": {"bias": -0.5}}
PATTERNS = ["swa", "longformer", "bigbird", "sparse_transformer"]
# parameters at which a pattern covers everything
COVERING = {
    "swa": {"window_size": 200}, "longformer": {"window_size": 200}, "bigbird": {"window_size": 200},
    "sparse_transformer": {"stride": 64, "mode": "strided"}, "sparge": {"threshold": 0.0}, "fasa": {"num_fac": 64},
    "lsa": {"num_long_range": 64},
}  # fmt: skip
WITH_ROPE = {"llama", "qwen3", "qwen3 with windows", "modernbert"}
WITH_WINDOWS = {"qwen3 with windows", "modernbert"}


def fits(host: str, name: str) -> bool:
    if name not in PATTERNS and host in WITH_WINDOWS:
        return False
    return not (name == "fasa" and host not in WITH_ROPE) and not (name == "lsa" and host in WITH_ROPE)


PAIRS = [(host, name) for host in HOSTS for name in COVERING if fits(host, name)]
PAIRS_AND_SIGMOID = PAIRS + [(host, "sigmoid") for host in HOSTS if host not in WITH_WINDOWS]
CAUSAL_PAIRS = [(host, name) for host, name in PAIRS_AND_SIGMOID if host in ("llama", "qwen3", "qwen3 with windows")]


def build(host: str, implementation: str):
    torch.manual_seed(0)
    model = HOSTS[host](attn_implementation=implementation).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return model


def call(host: str, model, mask: torch.Tensor | None = None):
    if host == "vit":
        return model(torch.randn(2, 3, 20, 20, generator=torch.Generator().manual_seed(1))).last_hidden_state
    output = model(tokens(2, 17), attention_mask=mask)
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


LEFT = torch.ones(2, 17, dtype=torch.long)
LEFT[0, :4] = 0


@pytest.mark.parametrize(("host", "name"), PAIRS)
def test_a_pattern_that_covers_everything_equals_sdpa(host, name):
    ours = build(host, fhf.attention_implementation(name, **COVERING[name]))
    theirs = build(host, "sdpa")
    for mask in (None, LEFT) if host != "vit" else (None,):
        keep = slice(None) if mask is None else mask.bool()
        assert_near(call(host, ours, mask)[keep], call(host, theirs, mask)[keep], rtol=1e-3, atol=1e-4)


def sigmoid_formula(module, query, key, value, attention_mask, scaling=None, l1=False, **others):
    """σ(q k · scaling − ½ − ln n) v in fp64 over the mask of transformers, n keys being visible."""
    q, k, v = (x.double() for x in (query, key, value))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    T = q.shape[2]
    mask = attention_mask
    if mask is None:
        mask = torch.ones(T, T, dtype=torch.bool)
        mask = mask.tril() if getattr(module, "is_causal", True) else mask
    count = mask.sum(-1, keepdim=True).clamp_min(1).double()
    weights = torch.sigmoid(q @ k.mT * (scaling or q.shape[-1] ** -0.5) - 0.5 - (0 if l1 else count.log())) * mask
    if l1:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-30)
    return (weights @ v).transpose(1, 2).to(query.dtype), None


@pytest.mark.parametrize("normalize", ["none", "l1"])
@pytest.mark.parametrize("host", [host for host in HOSTS if host not in WITH_WINDOWS])
def test_sigmoid_equals_its_formula(host, normalize):
    AttentionInterface.register("sigmoid_formula", partial(sigmoid_formula, l1=normalize == "l1"))
    AttentionMaskInterface.register("sigmoid_formula", sdpa_mask)
    ours = build(host, fhf.attention_implementation("sigmoid", bias=-0.5, normalize=normalize))
    theirs = build(host, "sigmoid_formula")
    for mask in (None, LEFT) if host != "vit" else (None,):
        keep = slice(None) if mask is None else mask.bool()
        assert_near(call(host, ours, mask)[keep], call(host, theirs, mask)[keep], rtol=1e-3, atol=1e-4)


def test_sigmoid_refuses_windows_and_a_learned_bias():
    name = fhf.attention_implementation("sigmoid", bias=-0.5)
    for host in sorted(WITH_WINDOWS):
        with pytest.raises(ValueError, match="frankenstein_sigmoid cannot honour the sliding window"):
            call(host, build(host, name))
    for params in ({}, {"bias": "learned"}, {"bias": 0.0, "normalize": "hybrid"}):
        with pytest.raises(ValueError, match="parameters or inputs of its own"):
            fhf.attention_implementation("sigmoid", **params)


@pytest.mark.parametrize(("host", "name"), PAIRS_AND_SIGMOID)
def test_a_small_pattern_changes_the_output_and_has_finite_gradients(host, name):
    ours = build(host, fhf.attention_implementation(name, **SMALL_PARAMS[name]))
    out = call(host, ours)
    assert not torch.allclose(out, call(host, build(host, "sdpa")), atol=1e-3)
    out.square().sum().backward()
    gradients = [p.grad for key, p in ours.named_parameters() if any(part in key.lower() for part in ("q", "k", "v"))]
    assert all(g is None or g.isfinite().all() for g in gradients)
    assert any(g is not None and g.abs().sum() > 0 for g in gradients)


@pytest.mark.parametrize(("host", "name"), [pair for pair in PAIRS_AND_SIGMOID if pair[0] != "vit"])
def test_left_padding_changes_no_real_token(host, name):
    model = build(host, fhf.attention_implementation(name, **SMALL_PARAMS[name]))
    if host == "bert":  # whose learned positions count pads
        model.embeddings.position_embeddings.weight.data.zero_()
    kwargs = {} if host == "bert" else {"position_ids": (LEFT.cumsum(1) - 1).clamp_min(0)}
    with torch.no_grad():
        padded = model(tokens(2, 17), attention_mask=LEFT, **kwargs)[0]
        alone = model(tokens(2, 17)[:1, 4:])[0]
    assert_near(padded[0, 4:], alone[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("host", "name"), CAUSAL_PAIRS)
def test_generating_with_a_cache_equals_generating_without(host, name):
    model = build(host, fhf.attention_implementation(name, **SMALL_PARAMS[name]))
    common = dict(attention_mask=LEFT, max_new_tokens=9, min_new_tokens=9, do_sample=False, pad_token_id=0)
    expected = model.generate(tokens(2, 17), use_cache=False, **common)
    assert torch.equal(model.generate(tokens(2, 17), **common), expected)
    if host not in WITH_WINDOWS:
        assert torch.equal(model.generate(tokens(2, 17), cache_implementation="static", **common), expected)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("host", sorted(WITH_WINDOWS))
def test_a_window_of_the_host_holds(host, name):
    """A pattern that covers everything leaves the host's own window, which `eager` masks with."""
    ours, theirs = build(host, fhf.attention_implementation(name, **COVERING[name])), build(host, "eager")
    assert_near(call(host, ours), call(host, theirs), rtol=1e-3, atol=1e-4)


def test_what_cannot_be_honoured_is_refused():
    swa, sparge = fhf.attention_implementation("swa"), fhf.attention_implementation("sparge")
    model, x = build("llama", swa), tokens(2, 17)
    for mask in (torch.zeros(2, 1, 17, 17), torch.ones(2, 1, 17, 17, dtype=torch.bool)):
        with pytest.raises(ValueError, match="2-D attention_mask"):
            model(x, attention_mask=mask)
    with pytest.raises(ValueError, match="cannot honour the sliding window"):
        call("qwen3 with windows", build("qwen3 with windows", sparge))
    with pytest.raises(ValueError, match="rotary frequencies"):
        call("bert", build("bert", fhf.attention_implementation("fasa")))
    with pytest.raises(ValueError, match="without positions"):
        call("llama", build("llama", fhf.attention_implementation("lsa")))
    function = AttentionInterface._global_mapping[swa]
    q = torch.randn(1, 4, 5, 6)
    for argument in ("position_bias", "softcap", "s_aux"):
        with pytest.raises(ValueError, match=f"cannot honour .*{argument}"):
            function(model.model.layers[0].self_attn, q, q, q, None, **{argument: torch.ones(1)})


def test_a_mixer_that_cannot_work_there_says_so():
    for name, why in (("ssog", "parameters or inputs of its own"), ("memory", "token ids"), ("gla", "of its own")):
        with pytest.raises(ValueError, match=f"'{name}' cannot be an attention implementation.*{why}"):
            fhf.attention_implementation(name)
    with pytest.raises(ValueError, match="separate_global"):
        fhf.attention_implementation("longformer", separate_global=True)
    with pytest.raises(ValueError, match="did you mean 'window_size'"):
        fhf.attention_implementation("swa", window=3)


def test_names_tell_parameters_apart():
    names = [
        fhf.attention_implementation("swa"),
        fhf.attention_implementation("swa", window_size=512),
        fhf.attention_implementation("sparge", threshold=0.1),
        fhf.attention_implementation("longformer", global_tokens=[0, 12]),
        fhf.attention_implementation("longformer", global_tokens=[0, 1, 2]),
    ]
    assert names[:2] == ["frankenstein_swa", "frankenstein_swa_window_size_512"] and len(set(names)) == 5


@pytest.mark.parametrize("name", PATTERNS)
def test_the_mask_is_as_long_as_the_keys_and_never_square(name):
    model, masks = build("llama", fhf.attention_implementation(name)), []
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda m, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    model(tokens(2, 17), attention_mask=LEFT)
    assert masks[0].shape == (2, 17 + 5)


@pytest.mark.parametrize("name", ["longformer", "bigbird", "sparse_transformer", "swa", "sparge", "fasa", "xsa"])
def test_a_standard_checkpoint_reads_as_every_parameter_free_pattern(name, tmp_path):
    from ..tiny import tiny_model

    model = tiny_model(["standard", "standard"])
    model.save_pretrained(tmp_path, save_code=False)
    other = fhf.FrankensteinForCausalLM.from_pretrained(tmp_path, layer_pattern=[name])
    assert other.config.layer_pattern == [name]
    expected, actual = model.state_dict(), other.state_dict()
    assert expected.keys() == actual.keys() and all(torch.equal(expected[key], actual[key]) for key in expected)
    with pytest.raises(ValueError, match="index_q_proj"):
        fhf.FrankensteinForCausalLM.from_pretrained(tmp_path, layer_pattern=["msa"])
