"""Norms of queries and keys: their formulas, and every mixer that says it takes them."""

import math

import pytest
import torch
from transformers import Olmo2Config, Qwen3Config
from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention, Olmo2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

import frankenstein_hf as fhf
from frankenstein_hf.configuration.registries import MIXERS, QK_NORMS
from frankenstein_hf.modeling.qk_norms import L2QKNorm, LayerQKNorm, RMSQKNorm

from ..tiny import assert_near, tiny_config, tiny_model, tokens

TAKING = [spec.name for spec in MIXERS if spec.qk_norm]
NAMES = [name for name in QK_NORMS.names() if name != "none"]
KINDS = [
    *((name, {}) for name in NAMES),
    ("rms_norm", {"over": "all_heads"}),
    ("layer_norm", {"over": "all_heads"}),
    ("l2_norm", {"scale": "learned"}),
    ("l2_norm", {"scale": "inverse_sqrt_dim"}),
]


def scattered(model):
    """The model with gains and biases of its norms of queries and keys away from where they begin."""
    for key, parameter in model.named_parameters():
        if ".q_norm." in key or ".k_norm." in key:
            torch.nn.init.normal_(parameter, mean=1.0 if key.endswith("weight") else 0.0, std=0.3)
    return model


def query_projections(model):
    return [module for name, module in model.named_modules() if name.endswith("mixer.q_proj")]


@pytest.mark.parametrize("name", TAKING)
def test_the_size_of_queries_is_nothing_to_a_mixer_that_takes_the_norm(name):
    model = scattered(
        tiny_model(name, is_causal=MIXERS.get(name).causal, qk_norm="rms_norm", qk_norm_params={"eps": 0.0})
    )
    ids = tokens(2, 13)
    with torch.no_grad():
        before = model(ids).logits
        for projection in query_projections(model):
            projection.weight.mul_(7)
        assert_near(model(ids).logits, before, rtol=1e-3, atol=1e-4)
    assert query_projections(model)


@pytest.mark.parametrize("name", [name for name in TAKING if MIXERS.get(name).causal])
def test_decoding_and_training_are_exact_with_normed_queries_and_keys(name):
    model = scattered(tiny_model(name, qk_norm="layer_norm"))
    ids = tokens(1, 12)
    with torch.no_grad():
        whole, cache, parts = model(ids).logits, None, []
        for piece in ids.split([7, 1, 1, 3], dim=1):
            out = model(piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.logits)
    assert_near(torch.cat(parts, dim=1), whole, rtol=1e-3, atol=1e-4)
    model.train()(ids, labels=ids).loss.backward()
    for key, parameter in model.named_parameters():
        if ".q_norm." in key:
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, key


@pytest.mark.parametrize("name, params", KINDS)
def test_a_norm_changes_its_own_keys_only_and_they_begin_as_they_should(name, params):
    plain = tiny_model("standard").state_dict()
    state = tiny_model("standard", qk_norm=name, qk_norm_params=params).state_dict()
    assert {*plain} <= {*state}
    own = {key.removeprefix("model.layers.0.mixer."): value for key, value in state.items() if key not in plain}
    H, G, W = (2, 1, 10) if params.get("over") == "all_heads" else (1, 1, 10)
    ones, zeros = torch.ones, torch.zeros
    expected = {
        "rms_norm": {"q_norm.weight": ones(H * W), "k_norm.weight": ones(G * W)},
        "layer_norm": {
            "q_norm.weight": ones(H * W), "k_norm.weight": ones(G * W),
            "q_norm.bias": zeros(H * W), "k_norm.bias": zeros(G * W),
        },
        "l2_norm": {"qk_scale": torch.full((2,), math.log2(512**2 - 512))} if params.get("scale") == "learned" else {},
    }[name]  # fmt: skip
    assert {*own} == {*expected}
    assert all(torch.equal(own[key], value) for key, value in expected.items())


def test_a_saved_model_gives_the_same_bits(tmp_path):
    for number, (name, params) in enumerate(KINDS):
        model = scattered(tiny_model(["standard", "swa"], qk_norm=name, qk_norm_params=params))
        model.save_pretrained(tmp_path / str(number))
        again = fhf.FrankensteinForCausalLM.from_pretrained(tmp_path / str(number)).eval()
        assert again.config.qk_norm == name
        assert torch.equal(again(tokens(1, 9)).logits, model(tokens(1, 9)).logits)


def test_the_formulas():
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64) * 3
    W = x.shape[-1]
    cosine = torch.nn.functional.cosine_similarity(x[:, :, :, None], x[:, :, None], dim=-1)

    def logits(norm):
        y = norm(x)
        return y @ y.mT / W**0.5

    assert_near(logits(L2QKNorm(3, W, eps=0.0)), W**0.5 * cosine)
    assert_near(logits(L2QKNorm(3, W, eps=0.0, scale="learned")), cosine)
    assert_near(logits(L2QKNorm(3, W, eps=0.0, scale="inverse_sqrt_dim")), cosine / W**0.5)
    assert_near(L2QKNorm(3, W, eps=0.0)(x), RMSQKNorm(3, W, eps=0.0).double()(x))
    flat = x.transpose(1, 2).flatten(2)
    centred = flat - flat.mean(-1, keepdim=True)
    y = LayerQKNorm(3, W, over="all_heads").double()(x).transpose(1, 2).flatten(2)
    assert_near(y, centred / centred.square().mean(-1, keepdim=True).sqrt())


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_any_size_stay_finite_in_bf16(name):
    model = tiny_model("standard", qk_norm=name).bfloat16()
    q = torch.stack([torch.zeros(3, 10), torch.full((3, 10), 1e4)])[None].bfloat16().requires_grad_()
    y = model.model.layers[0].mixer.q_norm(q)
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16 and y.isfinite().all() and q.grad.isfinite().all()


@pytest.mark.parametrize(
    "over, config_class, attention, rotary",
    [
        ("head", Qwen3Config, Qwen3Attention, Qwen3RotaryEmbedding),
        ("all_heads", Olmo2Config, Olmo2Attention, Olmo2RotaryEmbedding),
    ],
)
def test_attention_of_other_families_by_weight_copy(over, config_class, attention, rotary):
    """Qwen3 norms a head, Olmo2 all heads at once, both before rotation."""
    model = scattered(tiny_model("standard", qk_norm="rms_norm", qk_norm_params={"over": over}))
    config = model.config
    sizes = dict(
        hidden_size=20, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1, rms_norm_eps=1e-6,
        max_position_embeddings=512, attn_implementation="eager", attention_bias=False,
        rope_parameters=dict(config.rope_parameters),
    )  # fmt: skip
    other_config = config_class(**sizes, head_dim=10)
    other = attention(other_config, 0).eval()
    mixer = model.model.layers[0].mixer
    other.load_state_dict(mixer.state_dict())
    T, seen = 9, {}
    mask = torch.full((T, T), -torch.inf).triu(1)[None, None]
    mixer.register_forward_hook(lambda module, args, output: seen.update(x=args[0], y=output[0]))
    model(tokens(2, T))
    expected = other(seen["x"], rotary(other_config)(seen["x"], torch.arange(T)[None]), mask)[0]
    assert_near(seen["y"], expected, rtol=1e-4, atol=1e-5)


def test_hybrids_have_it_where_it_means_something_and_other_models_refuse_it():
    model = tiny_model(["gla", "standard"], qk_norm="rms_norm")
    assert not any("q_norm" in key for key in model.model.layers[0].state_dict())
    assert any("q_norm" in key for key in model.model.layers[1].state_dict())
    with pytest.raises(ValueError, match=r"qk_norm='rms_norm' can do nothing.*gla.*standard"):
        tiny_config("gla", qk_norm="rms_norm")
    with pytest.raises(ValueError, match="qk_norm='none' with qk_norm_params"):
        tiny_config("standard", qk_norm_params={"eps": 1e-5})
    with pytest.raises(ValueError, match="are one thing"):
        tiny_config("fox", qk_norm="rms_norm", mixer_params={"fox": {"qk_norm": True}})


def test_one_layer_may_have_another():
    config = tiny_config(["standard", "standard"], per_layer_config={1: {"qk_norm": "l2_norm"}})
    assert [config.component("qk_norm", i).spec.name for i in range(2)] == ["none", "l2_norm"]


@pytest.mark.parametrize("stabilizer", ["qk_clip", "quack"])
def test_stabilizers_of_logits_are_refused_beside_it(stabilizer):
    model = tiny_model("standard", qk_norm="rms_norm")
    with pytest.raises(ValueError, match=f"'{stabilizer}'.*qk_norm='rms_norm'.*leave one"):
        fhf.create_optimizer(model, "adamw", stabilizers=[stabilizer])
