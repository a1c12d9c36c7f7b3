"""`probsparse` against the algorithm of the paper in numpy."""

import math

import numpy as np
import pytest
import torch

from ..tiny import assert_near
from .run import make_mixer, numpy_weights, run
from .test_dense import H, T, W, attention, check, i, j


def encoding(width):
    half = -(-width // 2)
    angle = np.arange(T)[:, None] * 10000.0 ** (-np.arange(half) / half)
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=1)[:, :width]


def scores_of(x, w, h, groups):
    """(q + U₁) k + (q + U₂) p, unscaled, and q + U₁, k, v of one head."""
    g = h * groups // H
    cut, own = slice(g * W, (g + 1) * W), slice(h * W, (h + 1) * W)
    q, k, v = (x @ w["q_proj.weight"].T)[:, own], (x @ w["k_proj.weight"].T)[:, cut], (x @ w["v_proj.weight"].T)[:, cut]
    p = (encoding(x.shape[1]) @ w["p_proj.weight"].T)[:, cut]
    u_1, u_2 = w["content_bias"][h], w["position_bias"][h]
    return (q + u_1) @ k.T + (q + u_2) @ p.T, q + u_1, k, v


def softmax(s):
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


@pytest.mark.parametrize("groups", [1, 2])
def test_every_query_of_a_decoder_attends_with_relative_positions(groups):
    def expected(x, w):
        heads = []
        for h in range(H):
            s, _, _, v = scores_of(x, w, h, groups)
            heads.append(softmax(np.where(j <= i, s / np.sqrt(W), -np.inf)) @ v)
        return np.concatenate(heads, axis=1) @ w["o_proj.weight"].T

    check(make_mixer("probsparse", num_key_value_heads=groups), expected, True)


@pytest.mark.parametrize("c", [(1.0, 1.0), (2.0, 3.0), (50.0, 50.0)])
def test_dominant_queries_of_an_encoder_attend_and_the_others_read_the_mean(c):
    mixer = make_mixer("probsparse", {"factor_keys": c[0], "factor_queries": c[1]})
    seen, select = [], mixer.select
    mixer.select = lambda *args: seen.append(select(*args)) or seen[-1]
    x, w = torch.randn(1, T, 20, dtype=torch.float64), numpy_weights(mixer)
    keys, queries = (min(T, max(1, int(factor * math.ceil(math.log(T))))) for factor in c)
    sample = torch.randperm(T, generator=torch.Generator().manual_seed(T))[:keys].numpy()
    heads = []
    actual = [run(mixer, x, False, backend)[0] for backend in ("eager", "sdpa")]
    for h in range(H):
        s, q, k, v = scores_of(x[0].numpy(), w, h, 1)
        probe = q @ k[sample].T
        measure = probe.max(1) - probe.sum(1) / T
        chosen = np.argsort(-measure, kind="stable")[:queries]
        assert sorted(chosen) == seen[0][0, h, :, 0].nonzero().flatten().tolist()
        out = np.repeat(v.mean(0, keepdims=True), T, axis=0)
        out[chosen] = softmax(s[chosen] / np.sqrt(W)) @ v
        heads.append(out)
    expected = torch.from_numpy(np.concatenate(heads, axis=1) @ w["o_proj.weight"].T)
    for out in actual:
        assert_near(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_causal", [True, False])
def test_without_relative_positions_and_with_all_queries_it_is_standard(is_causal):
    visible = j <= i if is_causal else j < T
    mixer = make_mixer("probsparse", {"relative": False, "factor_queries": 50.0})
    check(mixer, lambda x, w: attention(x, w, visible), is_causal)


def test_the_sample_depends_on_layer_and_length_only():
    mixer = make_mixer("probsparse", {"factor_keys": 1.0})
    x = torch.randn(3, T, 20, dtype=torch.float64)
    together = run(mixer.train(), x, False)
    for row in range(3):
        torch.manual_seed(row)
        assert_near(run(mixer.eval(), x[row : row + 1], False)[0], together[row], rtol=1e-9, atol=1e-9)
