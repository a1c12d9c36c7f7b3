"""The latent family against numpy derivations, transformers' own classes, and one another."""

import numpy as np
import pytest
import torch
from transformers import DynamicCache
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.zaya import ZayaConfig
from transformers.models.zaya.modeling_zaya import ZayaAttention

from frankenstein_hf.configuration.registries import MIXERS
from frankenstein_hf.modeling.cache import cache_num_bytes

from ..tiny import assert_near, relative_rms, tiny_model, tokens
from .run import make_mixer, numpy_weights, plain_context, run
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


# tucker, mfa, gta, iha ------------------------------------------------------------------------------------------------


def heads_of(x: np.ndarray, count: int) -> list[np.ndarray]:
    return np.split(x, count, axis=1)


@pytest.mark.parametrize("is_causal", [True, False])
def test_tucker_is_attention_on_products_of_cores_and_factors(is_causal):
    def expected(x, w, p, is_causal):
        q, k, v = (
            heads_of(x @ (w[f"{name}_core_proj.weight"] @ w[f"{name}_factor_proj.weight"]).T, H) for name in "qkv"
        )
        out = [softmax_attention(rotate(q[h]) @ rotate(k[h]).T / np.sqrt(W), v[h], is_causal) for h in range(H)]
        return np.concatenate(out, axis=1) @ w["o_proj.weight"].T

    check(make_mixer("tucker", {"query_rank": 7, "key_rank": 5, "value_rank": 6}), expected, is_causal)


def test_tucker_of_full_ranks_is_multi_head_attention():
    standard, tucker = make_mixer("standard", num_key_value_heads=H), make_mixer("tucker", dict.fromkeys(
        ("query_rank", "key_rank", "value_rank"), D
    ))  # fmt: skip
    w = standard.state_dict()
    factors = {f"{name}_factor_proj.weight": torch.eye(D) for name in "qkv"}
    cores = {f"{name}_core_proj.weight": w[f"{name}_proj.weight"] for name in "qkv"}
    tucker.load_state_dict({**factors, **cores, "o_proj.weight": w["o_proj.weight"]})
    x = torch.randn(2, T, D, dtype=torch.float64)
    assert_near(run(tucker, x), run(standard, x), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("key_reuse", [True, False])
def test_mfa_is_wide_query_heads_over_one_key_and_value_head(key_reuse):
    C = 6

    def expected(x, w, p, is_causal):
        q = heads_of(x @ w["q_shared_proj.weight"].T @ w["q_proj.weight"].T, H)
        k = x @ w["k_proj.weight"].T
        v = k + w["value_gate"] * (k @ w["value_mix_proj.weight"].T) if key_reuse else x @ w["v_proj.weight"].T
        out = [softmax_attention(rotate(q[h]) @ rotate(k).T / np.sqrt(C), v, is_causal) for h in range(H)]
        return np.concatenate(out, axis=1) @ w["o_proj.weight"].T

    mixer = make_mixer("mfa", {"factor_rank": C, "key_reuse": key_reuse})
    if key_reuse:
        assert not mixer.value_gate.any()  # V = K at first
        torch.nn.init.normal_(mixer.value_gate)
    check(mixer, expected)


def test_gta_shares_maps_in_groups_and_decodes_values_through_silu():
    for groups in (1, 2):

        def expected(x, w, p, is_causal, groups=groups):
            q, k = (heads_of(x @ w[f"{name}_proj.weight"].T, H) for name in "qk")
            u = x @ w["v_down_proj.weight"].T @ w["v_up_proj.weight"].T
            v = heads_of(u / (1 + np.exp(-u)), H)
            out = []
            for h in range(H):
                members = [m for m in range(H) if m * groups // H == h * groups // H]
                q_g, k_g = (np.mean([y[m] for m in members], axis=0) for y in (q, k))
                out.append(softmax_attention(rotate(q_g) @ rotate(k_g).T / np.sqrt(W), v[h], is_causal))
            return np.concatenate(out, axis=1) @ w["o_proj.weight"].T

        check(make_mixer("gta", {"num_shared_groups": groups, "value_latent_rank": 6}), expected)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_iha_averages_the_pseudo_heads_of_each_head(kv_heads):
    P = 3

    def expected(x, w, p, is_causal):
        q = heads_of(x @ w["q_proj.weight"].T, H)
        k, v = (heads_of(x @ w[f"{name}_proj.weight"].T, kv_heads) for name in "kv")
        out = []
        for h in range(H):
            reads = []
            for i in range(P):
                q_i = sum(w["query_mix"][h, i, m] * q[m] for m in range(H))
                k_i, v_i = (
                    sum(w[f"{name}_mix"][h, i, m] * y[m] for m in range(kv_heads))
                    for name, y in (("key", k), ("value", v))
                )
                reads.append(softmax_attention(rotate(q_i) @ rotate(k_i).T / np.sqrt(W), v_i, is_causal))
            out.append(np.mean(reads, axis=0))
        return np.concatenate(out, axis=1) @ w["o_proj.weight"].T

    params = {"num_pseudo_heads": P, "init_noise": 0.5}
    check(make_mixer("iha", params, num_key_value_heads=kv_heads), expected)


def test_iha_begins_near_standard_attention_and_without_noise_as_it():
    standard, x = make_mixer("standard"), torch.randn(2, T, D, dtype=torch.float64)
    for noise, near in ((0.0, 1e-9), (0.02, 0.2)):
        iha = make_mixer("iha", {"init_noise": noise})
        iha.load_state_dict(standard.state_dict(), strict=False)
        assert relative_rms(run(iha, x), run(standard, x)) < near
    assert not torch.equal(iha.query_mix[:, 0], iha.query_mix[:, 1])  # else the pseudo-heads would never part


# kpa, tpa -------------------------------------------------------------------------------------------------------------


def kronecker_attention(x, w, p, is_causal, h1, h2, d1, d2):
    """Token by token with numpy's own Kronecker product."""
    T = len(x)

    def matrices(name):
        a, b = x @ w[f"{name}_a_proj.weight"].T, x @ w[f"{name}_b_proj.weight"].T
        R = b.shape[1] // (h2 * d2)
        A, B = a.reshape(T, R, h1, d1), b.reshape(T, R, h2, d2)
        if name != "v":
            B = np.stack([[rotate(B[:, r, i]) for i in range(h2)] for r in range(R)]).transpose(2, 0, 1, 3)
        return np.stack([np.mean([np.kron(A[t, r], B[t, r]) for r in range(R)], axis=0) for t in range(T)])

    q, k, v = (matrices(name) for name in "qkv")  # [T, H, W]
    out = [softmax_attention(q[:, h] @ k[:, h].T / np.sqrt(W), v[:, h], is_causal) for h in range(h1 * h2)]
    return np.concatenate(out, axis=1) @ w["o_proj.weight"].T


@pytest.mark.parametrize("sizes", [(1, 2, 5, 2), (2, 1, 5, 2), (2, 1, 1, 10)], ids=str)
def test_kpa_is_attention_on_means_of_kronecker_products(sizes):
    mixer = make_mixer("kpa", dict(zip(("h1", "h2", "d1", "d2"), sizes)))
    check(mixer, lambda *args: kronecker_attention(*args, *sizes))


def test_tpa_is_kpa_with_vectors_for_factors():
    tpa = make_mixer("tpa", {"query_rank": 3})
    check(tpa, lambda *args: kronecker_attention(*args, H, 1, 1, W))
    kpa = make_mixer("kpa", {"h1": H, "d1": 1, "query_rank": 3})
    kpa.load_state_dict(tpa.state_dict())
    x = torch.randn(2, T, D, dtype=torch.float64)
    assert torch.equal(run(kpa, x), run(tpa, x))


def test_rotating_the_second_factor_is_rotating_relative_positions():
    """Scores of the same two tokens depend on their distance alone (R_KPA(t)ᵀ R_KPA(s) = R_KPA(s − t))."""
    mixer = make_mixer("kpa", {"h1": 1, "d1": 5}).double()
    pair = torch.randn(1, 2, D, dtype=torch.float64)
    for gap in (1, 4):
        outputs = []
        for start in (0, 5):
            x = torch.zeros(1, start + gap + 1, D, dtype=torch.float64)
            x[:, [start, start + gap]] = pair
            q, k = mixer.queries(x, plain_context(mixer, x)), mixer.compress(x, plain_context(mixer, x), False)
            query, key = mixer.product(*q), mixer.product(k["key_a"], k["key_b"])
            outputs.append((query[:, :, start + gap] * key[:, :, start]).sum(-1))
        assert_near(*outputs, rtol=1e-5, atol=1e-6)


FACTORED = [("tpa", {"query_rank": 2}), ("kpa", {"query_rank": 1, "key_rank": 1}), ("mfa", {"key_reuse": True}),
            ("tucker", {}), ("gta", {}), ("iha", {})]  # fmt: skip


@pytest.mark.parametrize(("name", "params"), FACTORED, ids=str)
def test_reading_what_is_cached_equals_attending_to_whole_heads(name, params):
    model, x = tiny_model(name, mixer_params={name: params}, **SIZES).double(), tokens(2, 20)
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        expected = model(x, use_cache=False).logits
    assert_near(decoded(model, x, 9), expected, rtol=1e-9, atol=1e-11)


# mtla -----------------------------------------------------------------------------------------------------------------


def temporal_attention(x, w, p, is_causal):
    """Token by token: what a slot holds of its own tokens up to then, or in an encoder of all of them."""
    c = x @ w["kv_down_proj.weight"].T
    u = c / (1 + np.exp(-(c @ w["merge_proj.weight"].T + w["merge_proj.bias"])))
    q, T = heads_of(x @ w["q_proj.weight"].T, H), len(x)
    out = np.zeros((T, H * W))
    for t in range(T):
        last = t if is_causal else T - 1
        starts = np.arange(0, last + 1, p.stride)
        slots = np.stack([u[j : min(j + p.merge_factor, last + 1)].sum(0) for j in starts])
        k, v = (heads_of(slots @ w[f"{name}_up_proj.weight"].T, H) for name in "kv")
        for h in range(H):
            scores = rotate_at(q[h][t : t + 1], [t]) @ rotate_at(k[h], starts).T / np.sqrt(W)
            p_t = np.exp(scores - scores.max())
            out[t, h * W : (h + 1) * W] = (p_t / p_t.sum() @ v[h])[0]
    return out @ w["o_proj.weight"].T


def rotate_at(x: np.ndarray, positions) -> np.ndarray:
    padded = np.zeros((max(positions) + 1, x.shape[1]))
    padded[list(positions)] = x
    return rotate(padded)[list(positions)]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("m", "s"), [(1, 1), (2, 2), (3, 3), (4, 2), (5, 2), (3, 1)])
def test_mtla_reads_every_slot_as_far_as_it_has_come(m, s, is_causal):
    check(make_mixer("mtla", {"latent_rank": 6, "merge_factor": m, "stride": s}), temporal_attention, is_causal)


def test_mtla_with_slots_of_one_token_is_latent_attention_with_gated_latents():
    mtla = make_mixer("mtla", {"merge_factor": 1})
    mla = make_mixer("mla", {"rope_head_dim": 0, "latent_norm": "none"})
    torch.nn.init.constant_(mtla.merge_proj.bias, 40.0)  # an open gate
    w = mtla.state_dict()
    up = torch.cat([w[f"{name}_up_proj.weight"].view(H, W, -1) for name in "kv"], dim=1).flatten(0, 1)
    mla.load_state_dict(
        {
            "q_proj.weight": w["q_proj.weight"],
            "kv_a_proj_with_mqa.weight": w["kv_down_proj.weight"],
            "kv_b_proj.weight": up,
            "o_proj.weight": w["o_proj.weight"],
        }
    )
    x = torch.randn(2, T, D, dtype=torch.float64)
    assert_near(run(mtla, x), run(mla, x), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("m", "s"), [(2, 2), (3, 3), (4, 2)])
def test_mtla_decodes_what_it_trains_on_slot_borders_included(m, s):
    params = {"mtla": {"latent_rank": 6, "merge_factor": m, "stride": s}}
    model, x = tiny_model(["mtla", "mtla"], mixer_params=params).double(), tokens(2, 23)
    with torch.no_grad():
        expected = model(x, use_cache=False).logits
        for prefill in (1, 7, 8):
            assert_near(decoded(model, x, prefill), expected, rtol=1e-9, atol=1e-11)
        cache = DynamicCache(config=model.config)  # calls of many tokens on top of a past
        parts = [model(x[:, i : i + 6], cache=cache).logits for i in range(0, 23, 6)]
        assert_near(torch.cat(parts, dim=1), expected, rtol=1e-9, atol=1e-11)
        assert cache.layers[0].tail.states["slots"].shape[1] == -(-23 // s)


# cca, ccgqa -----------------------------------------------------------------------------------------------------------


def compressed_convolutional_attention(x, w, p, is_causal, heads=H):
    """The steps of arXiv 2510.04476, tap by tap."""
    G, width = w["log_temperature"].shape[0], w["q_proj.weight"].shape[0] // heads
    q, k = x @ w["q_proj.weight"].T, x @ w["k_proj.weight"].T
    convolved = np.concatenate([q, k], axis=1)
    looked_back = np.concatenate([np.zeros((p.reach, convolved.shape[1])), convolved])
    if p.num_conv_layers > 0:
        taps = w["conv_seq_weight"]
        n = taps.shape[1]
        looked_back = sum(looked_back[i : len(looked_back) - n + 1 + i] * taps[:, i] for i in range(n))
        looked_back = looked_back + w["conv_seq_bias"]
    if p.num_conv_layers > 1:
        n, columns = p.conv_kernel_ch, []
        for h in range(heads + G):
            part, matrix = looked_back[:, h * width : (h + 1) * width], w["conv_ch_weight"][h]
            columns.append(sum(part[i : len(part) - n + 1 + i] @ matrix[i * width : (i + 1) * width] for i in range(n)))
        looked_back = np.concatenate(columns, axis=1) + w["conv_ch_bias"]
    new_q, new_k = heads_of(looked_back[:, : heads * width], heads), heads_of(looked_back[:, heads * width :], G)
    q, k = heads_of(q, heads), heads_of(k, G)
    members = [[h for h in range(heads) if h * G // heads == g] for g in range(G)]
    if p.qk_mean:
        mean_q = [(q[h] + k[h * G // heads]) / 2 for h in range(heads)]
        new_q = [a + b for a, b in zip(new_q, mean_q)]
        new_k = [new_k[g] + np.mean([mean_q[h] for h in members[g]], axis=0) for g in range(G)]
    v = heads_of(x @ w["v_proj.weight"].T, G)
    if p.value_shift:
        delayed = np.concatenate([np.zeros((1, len(w["v_shift_proj.weight"]))), (x @ w["v_shift_proj.weight"].T)[:-1]])
        v = [np.concatenate(pair, axis=1) for pair in zip(v, heads_of(delayed, G))]
    out = []
    for h in range(heads):
        g = h * G // heads
        unit_q, unit_k = (y * np.sqrt(width) / np.linalg.norm(y, axis=1, keepdims=True) for y in (new_q[h], new_k[g]))
        scores = rotate(unit_q) @ rotate(unit_k * np.exp(w["log_temperature"][g])).T / np.sqrt(width)
        out.append(softmax_attention(scores, v[g], is_causal))
    return np.concatenate(out, axis=1) @ w["o_proj.weight"].T


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    "params",
    [{}, {"num_conv_layers": 1, "value_shift": False}, {"num_conv_layers": 0, "qk_mean": False},
     {"latent_rank": 12, "conv_kernel_seq": 2, "conv_kernel_ch": 1}],
    ids=str,
)  # fmt: skip
def test_cca_attends_inside_the_latent_with_convolved_queries_and_keys(params, is_causal):
    mixer = make_mixer("cca", {"latent_rank": 8} | params)
    torch.nn.init.normal_(mixer.log_temperature, std=0.3)
    check(mixer, compressed_convolutional_attention, is_causal)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_ccgqa_shares_keys_and_values_in_groups(kv_heads):
    params = {"query_latent_rank": 16, "kv_latent_rank": 4 * kv_heads}
    mixer = make_mixer("ccgqa", params, num_attention_heads=4, num_key_value_heads=4, head_dim=5)
    assert mixer.groups == kv_heads  # heads · kv_latent_rank / query_latent_rank
    check(mixer, lambda *args: compressed_convolutional_attention(*args, heads=4))


def test_ccgqa_with_as_many_key_heads_as_query_heads_is_cca():
    cca = make_mixer("cca", {"latent_rank": 8})
    ccgqa = make_mixer("ccgqa", {"query_latent_rank": 8, "kv_latent_rank": 8})
    ccgqa.load_state_dict(cca.state_dict())
    x = torch.randn(2, T, D, dtype=torch.float64)
    assert torch.equal(run(ccgqa, x), run(cca, x))


def test_ccgqa_is_transformers_zaya_attention():
    ours = make_mixer("ccgqa", {"query_latent_rank": 8, "kv_latent_rank": 4})
    torch.nn.init.normal_(ours.log_temperature, std=0.3)
    config = ZayaConfig(
        hidden_size=D, num_attention_heads=2, num_key_value_heads=1, head_dim=4, attention_bias=False,
        cca_time0=4, cca_time1=3, num_hidden_layers=1, sliding_window=None,
    )  # fmt: skip
    config._attn_implementation = "eager"
    theirs, w = ZayaAttention(config, 0).double().eval(), ours.state_dict()
    matrices = w["conv_ch_weight"].unflatten(1, (3, 4))  # [head, tap, in, out]
    theirs.load_state_dict(
        {
            "o_proj.weight": w["o_proj.weight"],
            "qkv_proj.q_proj.weight": w["q_proj.weight"],
            "qkv_proj.k_proj.weight": w["k_proj.weight"],
            "qkv_proj.v_proj_current.weight": w["v_proj.weight"],
            "qkv_proj.v_proj_delayed.weight": w["v_shift_proj.weight"],
            "qkv_proj.conv_qk_depthwise.weight": w["conv_seq_weight"][:, None],
            "qkv_proj.conv_qk_depthwise.bias": w["conv_seq_bias"],
            "qkv_proj.conv_qk_grouped.weight": matrices.permute(0, 3, 2, 1).flatten(0, 1),
            "qkv_proj.conv_qk_grouped.bias": w["conv_ch_bias"],
            "qk_norm.temp": w["log_temperature"].exp(),
        }
    )
    x = torch.randn(2, T, D, dtype=torch.float64)
    angle = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(2) / 2)
    angle = torch.cat([angle, angle], dim=-1)[None]
    mask = torch.full((T, T), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    expected = theirs(x, {"causal": mask}, None, (angle.cos().double(), angle.sin().double()))[0]
    assert_near(run(ours, x), expected, rtol=1e-5, atol=1e-6)


def test_nothing_wider_than_the_latent_is_cached_or_computed_on_the_way_to_the_output():
    mixer = make_mixer("cca", {"latent_rank": 4})
    assert [mixer.q_proj.out_features, mixer.k_proj.out_features, mixer.o_proj.in_features] == [4, 4, 4]
    assert mixer.v_proj.out_features + mixer.v_shift_proj.out_features == 4


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
    ("tucker", ()): 10 + 10,
    ("tucker", (("key_rank", 3), ("value_rank", 5))): 3 + 5,
    ("mfa", (("factor_rank", 8),)): 2 * 8,
    ("mfa", (("factor_rank", 8), ("key_reuse", True))): 8,
    ("gta", ()): 1 * 6 + 10,
    ("gta", (("num_shared_groups", 2), ("value_latent_rank", 5))): 2 * 6 + 5,
    ("iha", ()): 2 * 4 * 6,
    ("kpa", ()): (2 + 2) * (2 * 3 + 2 * 2),  # h1, h2, d1, d2 = 2, 2, 3, 2
    ("kpa", (("h1", 1), ("d1", 1), ("key_rank", 1))): (1 + 2) * (1 * 1 + 4 * 6),
    ("tpa", ()): (2 + 2) * (4 + 6),
    ("cca", ()): 2 * 4,  # D/4 = 5 becomes a multiple of the heads
    ("cca", (("latent_rank", 12),)): 2 * 12,
    ("ccgqa", ()): 2 * 1 * 2,  # heads of D/2 = 10, rounded to 8, over 4
    ("ccgqa", (("query_latent_rank", 16), ("kv_latent_rank", 8))): 2 * 8,
    ("mtla", ()): 10 / 2,
    ("mtla", (("latent_rank", 8), ("merge_factor", 4))): 8 / 4,
    ("mtla", (("latent_rank", 8), ("merge_factor", 4), ("stride", 3))): 8 / 3,
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
    ("cca", {"latent_rank": 6}, "latent_rank=6 must be divisible by num_attention_heads=4"),
    (
        "ccgqa",
        {"query_latent_rank": 16, "kv_latent_rank": 6},
        "kv_latent_rank=6 must be num_kv_heads=1 heads of width 4",
    ),
    ("ccgqa", {"num_kv_heads": 3}, "num_kv_heads=3 must divide num_attention_heads=4"),
    ("mtla", {"stride": 3}, "stride=3 must not exceed merge_factor=2"),
    ("gta", {"num_shared_groups": 3}, "num_shared_groups=3 must divide num_attention_heads=4"),
    ("kpa", {"h1": 3}, "h1=3 times h2=1 must be num_attention_heads=4"),
    ("kpa", {"d1": 4}, "d1=4 times d2=1 must be head_dim=6"),
    ("kpa", {"d1": 2}, "d2=3 must be even"),
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
