"""The latent family against numpy derivations, transformers' own classes, and one another."""

import numpy as np
import pytest
import torch
from transformers import DynamicCache
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from frankenstein_hf.configuration.registries import MIXERS
from frankenstein_hf.modeling.cache import cache_num_bytes

from ..tiny import assert_near, relative_rms, tiny_model, tokens
from .run import make_mixer, numpy_weights, run
from .test_dense import rotate

H, W, D, T = 2, 10, 20, 13
SIZES = dict(num_attention_heads=4, num_key_value_heads=4, head_dim=6)


def normed(x: np.ndarray, weight: np.ndarray | float = 1.0) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight


def softmax_attention(scores: np.ndarray, v: np.ndarray, is_causal: bool) -> np.ndarray:
    T = len(scores)
    scores = np.where(np.tril(np.ones((T, T), bool)) if is_causal else True, scores, -np.inf)
    p = np.exp(scores - scores.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True) @ v


def check(mixer, expected, is_causal=True):
    x = torch.randn(1, T, D, dtype=torch.float64)
    want = torch.from_numpy(expected(x[0].numpy(), numpy_weights(mixer), mixer.params, is_causal))
    for backend in ("eager", "sdpa"):
        # fp32 rotary angles are the only rounding
        assert_near(run(mixer, x, is_causal, backend)[0], want, rtol=1e-5, atol=1e-6)


# mla, gqla, mlra -----------------------------------------------------------------------------------------------------


def latent_attention(x, w, p, is_causal, groups=H, parts=1):
    """The equations of arXiv 2405.04434, section 2.1, head by head."""
    r, R = p.latent_rank, p.rope_head_dim
    if p.query_rank is None:
        q = x @ w["q_proj.weight"].T
    else:
        q = normed(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"]) @ w["q_b_proj.weight"].T
    down = x @ w["kv_a_proj_with_mqa.weight"].T
    c, k_R = down[:, :r], down[:, r:]
    c = normed(c, w["kv_a_layernorm.weight"]) if p.latent_norm != "none" else c
    if parts == 1:
        kv = c @ w["kv_b_proj.weight"].T
    else:
        kv = np.concatenate(
            [part @ w[f"kv_b_projs.{i}.weight"].T for i, part in enumerate(np.split(c, parts, axis=1))], axis=1
        )
    qk_norm = p.qk_norm != "none"
    out = []
    for h in range(H):
        q_h = q[:, h * (W + R) : (h + 1) * (W + R)]
        g = h * groups // H
        k, v = np.split(kv[:, g * 2 * W : (g + 1) * 2 * W], 2, axis=1)
        q_C, q_R, rotated = q_h[:, :W], q_h[:, W:], k_R
        if qk_norm:
            q_C, k = normed(q_C, w["q_norm.weight"]), normed(k, w["k_norm.weight"])
            if R:
                q_R, rotated = normed(q_R, w["q_rope_norm.weight"]), normed(k_R, w["k_rope_norm.weight"])
        scores = q_C @ k.T + rotate(q_R) @ rotate(rotated).T if R else rotate(q_C) @ rotate(k).T
        out.append(softmax_attention(scores / np.sqrt(W + R), v, is_causal))
    return np.concatenate(out, axis=1) @ w["o_proj.weight"].T


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    "params",
    [{}, {"qk_norm": "rms_norm", "query_rank": 7}, {"rope_head_dim": 0, "latent_norm": "none"},
     {"rope_head_dim": 0, "qk_norm": "rms_norm"}],
    ids=str,
)  # fmt: skip
def test_mla_is_the_papers_equations(params, is_causal):
    check(make_mixer("mla", params), latent_attention, is_causal)


def test_gqla_shares_expanded_heads_in_groups():
    for groups in (1, 2):
        mixer = make_mixer("gqla", {"num_groups": groups, "qk_norm": "rms_norm"})
        check(mixer, lambda *args, groups=groups: latent_attention(*args, groups=groups))


def test_mlra_expands_every_part_of_the_latent_on_its_own():
    check(make_mixer("mlra", {"num_latent_heads": 2}), lambda *args: latent_attention(*args, parts=2))


@pytest.mark.parametrize("query_rank", [None, 7])
def test_mla_is_transformers_deepseek_v3_attention_with_its_names(query_rank):
    ours = make_mixer("mla", {"latent_rank": 8, "query_rank": query_rank, "rope_head_dim": 6}, **SIZES)
    config = DeepseekV3Config(
        hidden_size=D, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=query_rank, kv_lora_rank=8,
        qk_rope_head_dim=6, qk_nope_head_dim=6, v_head_dim=6, rope_interleave=False, attention_bias=False,
    )  # fmt: skip
    config._attn_implementation = "eager"
    theirs = DeepseekV3Attention(config, 0).double().eval()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, T, D, dtype=torch.float64)
    angle = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(3) / 3)
    angle = torch.cat([angle, angle], dim=-1)[None]
    mask = torch.full((T, T), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    expected = theirs(x, (angle.cos().double(), angle.sin().double()), mask)[0]
    assert_near(run(ours, x), expected, rtol=1e-5, atol=1e-6)


def test_mla_of_full_rank_is_multi_head_attention():
    standard = make_mixer("standard", num_key_value_heads=H)
    mla = make_mixer("mla", {"latent_rank": D, "rope_head_dim": 0, "latent_norm": "none"})
    w = standard.state_dict()
    keys_and_values = [w[f"{name}_proj.weight"].view(H, W, D) for name in "kv"]
    mla.load_state_dict(
        {
            "q_proj.weight": w["q_proj.weight"],
            "kv_a_proj_with_mqa.weight": torch.eye(D),
            "kv_b_proj.weight": torch.cat(keys_and_values, dim=1).flatten(0, 1),
            "o_proj.weight": w["o_proj.weight"],
        }
    )
    x = torch.randn(2, T, D, dtype=torch.float64)
    assert_near(run(mla, x), run(standard, x), rtol=1e-10, atol=1e-12)


def test_gqla_with_a_group_a_head_is_mla_and_mlra_is_mla_with_a_block_diagonal_expansion():
    mla, gqla = make_mixer("mla", {}), make_mixer("gqla", {"num_groups": H})
    gqla.load_state_dict(mla.state_dict())
    x = torch.randn(2, T, D, dtype=torch.float64)
    assert torch.equal(run(gqla, x), run(mla, x))
    mlra, state = make_mixer("mlra", {"num_latent_heads": 2}), mla.state_dict()
    blocks = torch.stack([torch.randn(2 * W, 5, dtype=torch.float64) for _ in range(2)])
    state["kv_b_proj.weight"] = torch.block_diag(*blocks)
    mla.load_state_dict(state)
    del state["kv_b_proj.weight"]
    mlra.load_state_dict(state | {f"kv_b_projs.{i}.weight": block for i, block in enumerate(blocks)})
    assert_near(run(mlra, x), run(mla, x), rtol=1e-10, atol=1e-12)


def decoded(model, x: torch.Tensor, prefill: int) -> torch.Tensor:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        parts = [model(x[:, :prefill], cache=cache).logits]
        parts += [model(x[:, t : t + 1], cache=cache).logits for t in range(prefill, x.shape[1])]
    return torch.cat(parts, dim=1)


def test_the_two_decoding_paths_of_gqla_agree():
    x, outputs = tokens(2, 24), []
    for path in ("gqa", "mqa_absorb"):
        for qk_norm in ("none", "rms_norm"):
            params = {"gqla": {"num_groups": 2, "decode_path": path, "qk_norm": qk_norm}}
            outputs.append(decoded(tiny_model("gqla", mixer_params=params, **SIZES).double(), x, 9))
    for one, other in zip(outputs[:2], outputs[2:]):
        assert_near(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 2e-6), (torch.float64, 1e-14)])
def test_normed_keys_are_exact_under_the_absorbed_cache(dtype, allowed):
    """The difference of absorbed decoding to explicitly normed keys is rounding, whatever the gain."""
    for name, params in (("mla", {}), ("gqla", {"num_groups": 2, "decode_path": "mqa_absorb"}), ("mlra", {})):
        model = tiny_model(name, mixer_params={name: {"qk_norm": "rms_norm"} | params}, **SIZES).to(dtype)
        for key, parameter in model.named_parameters():
            if "_norm" in key:
                torch.nn.init.normal_(parameter, 1.0, 0.5)
        x = tokens(2, 30)
        with torch.no_grad():
            explicit = model(x, use_cache=False).logits
        assert relative_rms(decoded(model, x, 10), explicit) < allowed, name


@pytest.mark.parametrize("name", ["mla", "mlra"])
def test_decoding_never_expands_what_is_cached(name):
    model, rows = tiny_model(name), []
    for up in model.model.layers[0].mixer.expansions:
        up.register_forward_hook(lambda m, args, out: rows.append(out.shape[:-1].numel()))
    decoded(model, tokens(1, 90), 80)
    rank = model.config.params_for(0).latent_rank
    # the prefill; then new tokens only, whose norm is cached, and the matrix itself, a row a channel of the latent
    assert max(rows) == 80 and all(n <= rank for n in rows if n != 80)


# what the cache holds -------------------------------------------------------------------------------------------------

# floats a token at H = 4, W = 6, D = 20, by the catalogue's formulas
CACHED = {
    ("mla", ()): 10 + 2,
    ("mla", (("latent_rank", 7), ("rope_head_dim", 4))): 7 + 4,
    ("mla", (("rope_head_dim", 0),)): 10,
    ("mla", (("qk_norm", "rms_norm"),)): 10 + 2 + 4,
    ("gqla", ()): 2 * 1 * 6 + 2,
    ("gqla", (("decode_path", "mqa_absorb"),)): 10 + 2,
    ("gqla", (("decode_path", "mqa_absorb"), ("num_groups", 2), ("qk_norm", "rms_norm"))): 10 + 2 + 2,
    ("mlra", (("latent_rank", 8),)): 8 + 2,
}


def test_every_latent_mixer_with_a_growing_cache_is_in_the_table():
    names = {spec.name for spec in MIXERS if spec.family == "latent" and spec.grows}
    assert {name for name, _ in CACHED} == names


@pytest.mark.parametrize(("name", "params"), CACHED, ids=str)
def test_a_token_costs_the_cache_what_the_method_promises(name, params):
    model = tiny_model(name, mixer_params={name: dict(params)}, **SIZES)
    sizes = []
    with torch.no_grad():
        for length in (12, 24):
            cache = DynamicCache(config=model.config)
            model(tokens(1, length), cache=cache)
            sizes.append(cache_num_bytes(cache))
    assert (sizes[1] - sizes[0]) / 12 / 4 == CACHED[name, params]


WRONG = [
    ("mla", {"rope_head_dim": 3}, "rope_head_dim=3 must be even"),
    ("gqla", {"num_groups": 3}, "num_groups=3 must divide num_attention_heads=4"),
    ("gqla", {"decode_path": "mqa_absorb", "rope_head_dim": 0}, "needs rope_head_dim > 0"),
    ("mlra", {"num_latent_heads": 3}, "num_latent_heads=3 must divide num_attention_heads=4"),
    ("mlra", {"latent_rank": 6}, "latent_rank=6 must be divisible by num_latent_heads=4"),
]


@pytest.mark.parametrize(("name", "params", "message"), WRONG, ids=str)
def test_impossible_sizes_raise(name, params, message):
    with pytest.raises(ValueError, match=message):
        tiny_model(name, mixer_params={name: params}, **SIZES)


def test_positions_of_the_callers_own_are_refused_where_cached_keys_are_rotated_when_read():
    model, x = tiny_model("mla", mixer_params={"mla": {"rope_head_dim": 0}}), tokens(1, 4)
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    positions = torch.tensor([[0, 1, 1, 1]])
    with torch.no_grad():
        free = model(x, attention_mask=mask, position_ids=positions, use_cache=False).logits
        plain = model(x, use_cache=False).logits
        assert not torch.equal(free, plain)
        assert_near(model(x, attention_mask=mask, use_cache=True).logits, plain)
        with pytest.raises(ValueError, match="position_ids must be that place"):
            model(x, attention_mask=mask, position_ids=positions, use_cache=True)
