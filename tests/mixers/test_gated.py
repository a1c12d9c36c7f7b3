"""Gated attention: `gated_softmax` beside transformers' Qwen3-Next attention, `fox` and `fpa` pair by pair."""

import numpy as np
import pytest
import torch
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

from frankenstein_hf.modeling.positions import RotaryEmbedding

from ..tiny import assert_near
from .run import make_mixer, numpy_weights, run

H, W, D, T = 2, 10, 20, 13


def test_gated_softmax_is_the_attention_of_qwen3_next_without_its_norms():
    config = Qwen3NextConfig(
        hidden_size=D, num_attention_heads=H, num_key_value_heads=1, head_dim=W, attn_implementation="eager"
    )
    theirs = Qwen3NextAttention(config, 0).double().eval()
    theirs.q_norm = theirs.k_norm = torch.nn.Identity()
    ours = make_mixer("gated_softmax")
    query, gate = (x.reshape(H * W, D) for x in theirs.q_proj.weight.detach().view(H, 2 * W, D).chunk(2, dim=1))
    weights = {f"{name}_proj.weight": getattr(theirs, f"{name}_proj").weight for name in "kvo"}
    ours.load_state_dict(weights | {"q_proj.weight": query, "g_proj.weight": gate})
    x = torch.randn(2, T, D, dtype=torch.float64)
    rotary = RotaryEmbedding(ours.config)(torch.arange(T)[None], W)
    mask = torch.full((T, T), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    assert_near(run(ours, x), theirs(x, rotary, mask)[0], rtol=1e-5, atol=1e-6)  # their softmax is one of fp32


@pytest.mark.parametrize("is_causal", [True, False])
def test_gated_softmax_with_one_gate_a_head_scales_heads_of_standard(is_causal):
    gated, standard = make_mixer("gated_softmax", {"gate": "headwise"}), make_mixer("standard")
    weights = gated.state_dict()
    gate = weights.pop("g_proj.weight")
    x = torch.randn(2, T, D, dtype=torch.float64)
    heads = []
    for h in range(H):  # through o_proj one head at a time
        alone = torch.zeros(D, H, W, dtype=torch.float64)
        alone[:, h] = weights["o_proj.weight"].view(D, H, W)[:, h]
        standard.load_state_dict(weights | {"o_proj.weight": alone.flatten(1)})
        heads.append(torch.sigmoid(x @ gate[h])[..., None] * run(standard, x, is_causal))
    assert_near(run(gated, x, is_causal), sum(heads), rtol=1e-9, atol=1e-9)


def softmax_over(logits: np.ndarray) -> np.ndarray:
    p = np.exp(logits - logits.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


@pytest.mark.parametrize("is_causal", [True, False])
def test_fox_forgets_by_every_gate_between_a_key_and_its_query(is_causal):
    mixer, x = make_mixer("fox"), torch.randn(1, T, D, dtype=torch.float64)
    w, rows = numpy_weights(mixer), x[0].numpy()
    q, k, v, f = (rows @ w[f"{name}_proj.weight"].T for name in "qkvf")
    f = 1 / (1 + np.exp(-f - w["f_proj.bias"]))
    heads = []
    for h in range(H):
        logits = np.full((T, T), -np.inf)
        for i in range(T):
            for j in range(i + 1 if is_causal else T):
                between = f[min(i, j) + 1 : max(i, j) + 1, h]  # of the later tokens, down to but without the earlier
                logits[i, j] = q[i, h * W : (h + 1) * W] @ k[j] / np.sqrt(W) + np.log(between).sum()
        heads.append(softmax_over(logits) @ v)
    expected = torch.from_numpy(np.concatenate(heads, axis=1) @ w["o_proj.weight"].T)
    for backend in ("eager", "sdpa"):
        assert_near(run(mixer, x, is_causal, backend)[0], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("is_causal", [True, False])
def test_fox_with_gates_of_one_is_standard_without_positions(is_causal):
    fox, standard = make_mixer("fox", num_key_value_heads=2), make_mixer("standard", num_key_value_heads=2)
    standard.load_state_dict({key: x for key, x in fox.state_dict().items() if "f_proj" not in key})
    torch.nn.init.zeros_(fox.f_proj.weight)
    torch.nn.init.constant_(fox.f_proj.bias, 100.0)
    x = torch.randn(1, T, D, dtype=torch.float64)
    value = standard.v_proj(x).unflatten(-1, (H, W)).transpose(1, 2)
    query, key = (getattr(standard, f"{name}_proj")(x).unflatten(-1, (H, W)).transpose(1, 2) for name in "qk")
    heads = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    assert_near(run(fox, x, is_causal), standard.o_proj(heads.transpose(1, 2).flatten(2)), rtol=1e-9, atol=1e-9)


def test_fox_options_norm_queries_and_keys_and_gate_the_output():
    plain, full = make_mixer("fox"), make_mixer("fox", {"qk_norm": True, "output_gate": True})
    assert set(full.state_dict()) - set(plain.state_dict()) == {
        "q_norm.weight", "k_norm.weight", "g_proj.weight",
    }  # fmt: skip
    x = torch.randn(1, T, D, dtype=torch.float64)
    expected = run(full, x)
    with torch.no_grad():
        for projection in (full.q_proj, full.k_proj):
            projection.weight *= 7
    assert_near(run(full, x), expected, rtol=1e-4, atol=1e-5)  # up to the eps of the norms
    with torch.no_grad():
        full.g_proj.weight.zero_()
        full.o_proj.weight *= 2  # σ(0) = ½
    plain.load_state_dict({key: value for key, value in full.state_dict().items() if key in plain.state_dict()})
    plain.o_proj.weight.data /= 2
    gateless, gated = run(plain, x), run(full, x)
    assert gateless.shape == gated.shape and not torch.allclose(gateless, gated)  # the norms differ
    for norm in (full.q_norm, full.k_norm):
        norm.forward = lambda x: x
    assert_near(run(full, x), gateless, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("is_causal", [True, False])
def test_fpa_forgets_by_the_deepest_dip_between_a_key_and_its_query(is_causal):
    mixer, x = make_mixer("fpa"), torch.randn(1, T, D, dtype=torch.float64)
    torch.nn.init.normal_(mixer.log_strength)
    w, rows = numpy_weights(mixer), x[0].numpy()
    q, k, v = (rows @ w[f"{name}_proj.weight"].T for name in "qkv")
    δ, g, h = (rows @ w["f_proj.weight"].T + w["f_proj.bias"]).reshape(T, 3, H).transpose(1, 0, 2)
    heads = []
    for head in range(H):
        walk = np.cumsum(δ[:, head])
        back = np.array([δ[u + 1 :, head].sum() for u in range(T)])  # W'_u, of the tokens behind u
        logits = np.full((T, T), -np.inf)
        for t in range(T):
            for s in range(t + 1 if is_causal else T):
                dip = 0.0
                if s < t:
                    dip = (walk + g[:, head])[s + 1 : t + 1].min() - (walk + h[:, head])[s]
                elif s > t:
                    dip = (back + g[:, head])[t:s].min() - (back + h[:, head])[s]
                bias = np.exp(w["log_strength"][head]) * min(0.0, dip)
                logits[t, s] = q[t, head * W : (head + 1) * W] @ k[s] / np.sqrt(W) + bias
        heads.append(softmax_over(logits) @ v)
    expected = torch.from_numpy(np.concatenate(heads, axis=1) @ w["o_proj.weight"].T)
    for backend in ("eager", "sdpa"):
        assert_near(run(mixer, x, is_causal, backend)[0], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("is_causal", [True, False])
def test_fpa_with_a_falling_walk_and_nothing_else_is_fox(is_causal):
    fpa, fox = make_mixer("fpa"), make_mixer("fox")
    fox.load_state_dict({key: x for key, x in fpa.state_dict().items() if "f_proj" not in key and "log" not in key} | {
        "f_proj.weight": fox.f_proj.weight, "f_proj.bias": fox.f_proj.bias,
    })  # fmt: skip
    x = torch.randn(2, T, D, dtype=torch.float64)
    fall = torch.nn.functional.logsigmoid(fox.f_proj(x))
    fpa.f_proj.forward = lambda x: torch.cat([fall / fpa.log_strength.exp(), torch.zeros(2, T, 2 * H)], dim=-1)
    torch.nn.init.normal_(fpa.log_strength)
    assert_near(run(fpa, x, is_causal), run(fox, x, is_causal), rtol=1e-9, atol=1e-9)


def test_fpa_leaves_dead_keys_out_in_evaluation_only_and_by_an_error_a_threshold_bounds():
    exact, evicting = make_mixer("fpa"), make_mixer("fpa", {"eviction_threshold": 12.0})
    evicting.load_state_dict(exact.state_dict())
    x = torch.randn(1, 60, D, dtype=torch.float64)
    assert_near(run(evicting, x), run(exact, x), rtol=1e-3, atol=1e-3)
    assert not torch.equal(run(evicting, x), run(exact, x))
    assert_near(run(evicting, x, backend="eager"), run(evicting, x), rtol=1e-9, atol=1e-9)
    assert torch.equal(run(evicting.train(), x), run(exact.train(), x))
