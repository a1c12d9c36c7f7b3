"""`sparsek` against a projection found by quadratic programming conditions, and a loop over queries."""

import numpy as np
import pytest
import torch

from frankenstein_hf.modeling.ops.sparsek import sparsek_threshold

from ..tiny import assert_near
from .run import make_mixer, numpy_weights, run
from .test_dense import H, T, W, rotate


def project(u, k):
    """argmin ‖m − u‖² over 0 ≤ m ≤ 1, Σ m = k, by bisection on the multiplier; all ones where there is room."""
    if len(u) <= k:
        return np.ones(len(u))
    low, high = u.min() - 1, u.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.clip(u - middle, 0, 1).sum() > k else (low, middle)
    return np.clip(u - low, 0, 1)


@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("k", [1, 5, 19, 20, 40])
def test_threshold_is_the_projection_and_its_gradient_is_exact(k, spread):
    u = (spread * torch.randn(6, 20, dtype=torch.float64)).requires_grad_()
    seen = torch.ones(6, 20, dtype=torch.bool)
    seen[1, 7:] = False
    seen[2] = False  # nothing to see
    m = (u - sparsek_threshold(u, seen, k)).clamp(0, 1) * seen
    for row, visible, weights in zip(u, seen, m):
        expected = project(row[visible].detach().numpy(), k) if visible.any() else np.zeros(0)
        np.testing.assert_allclose(weights[visible].detach().numpy(), expected, atol=1e-9)
    assert torch.autograd.gradcheck(lambda u: (u - sparsek_threshold(u, seen, k)).clamp(0, 1) * seen, (u,))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("scorer", ["key", "key_query"])
def test_equals_the_definition_query_by_query(scorer, is_causal, backend, groups):
    k_budget = 4
    mixer = make_mixer("sparsek", {"k": k_budget, "scorer": scorer}, num_key_value_heads=groups)
    x, w = torch.randn(1, T, 20, dtype=torch.float64), numpy_weights(mixer)
    y, out = x[0].numpy(), np.zeros((T, H * W))
    for g in range(groups):
        bare = (y @ w["k_proj.weight"].T)[:, g * W : (g + 1) * W]
        k, v = rotate(bare), (y @ w["v_proj.weight"].T)[:, g * W : (g + 1) * W]
        score = bare / np.sqrt((bare**2).mean(1, keepdims=True) + 1e-6) @ w["scorer"][g]
        heads = range(g * H // groups, (g + 1) * H // groups)
        q = {h: rotate((y @ w["q_proj.weight"].T)[:, h * W : (h + 1) * W]) for h in heads}
        for i in range(T):
            end = i + 1 if is_causal else T
            u = score[:end]
            if scorer == "key_query":
                u = u + w["query_weight"][g] * k[:end] @ np.mean([q[h][i] for h in heads], 0) / np.sqrt(W)
            m = project(u, k_budget)
            kept = m > 1e-9  # the bisection ends beside zero
            for h in heads:
                s = k[:end][kept] @ q[h][i] / np.sqrt(W)
                p = np.exp(s - s.max())
                out[i, h * W : (h + 1) * W] = (p / p.sum() * m[kept]) @ v[:end][kept]
    expected = torch.from_numpy(out @ w["o_proj.weight"].T)
    assert_near(run(mixer, x, is_causal, backend)[0], expected, rtol=1e-5, atol=1e-6)


def test_a_dropped_key_never_returns():
    mixer = make_mixer("sparsek", {"k": 6})
    score = 2 * torch.randn(300, dtype=torch.float64)
    seen = torch.ones(300, 300, dtype=torch.bool).tril()
    kept = mixer.weights_of(score.expand(300, -1), seen) > 0
    for t in range(1, 300):
        assert not (kept[t, :t] & ~kept[t - 1, :t]).any()
    assert kept[-1].sum() < 60  # and most are dropped


@pytest.mark.parametrize("is_causal", [True, False])
def test_chunks_of_queries_equal_the_whole(is_causal):
    mixer = make_mixer("sparsek", {"k": 9}, num_key_value_heads=2)
    x = torch.randn(2, 300, 20, dtype=torch.float64, requires_grad=True)
    grads = []
    for backend in ("eager", "sdpa"):
        out = run(mixer, x, is_causal, backend)
        grads.append((out, *torch.autograd.grad(out.square().sum(), [x, *mixer.parameters()])))
    for slow, fast in zip(*grads):
        assert_near(fast, slow, rtol=1e-8, atol=1e-9)


def test_enough_budget_is_standard_attention():
    standard, mixer = make_mixer("standard"), make_mixer("sparsek", {"k": T})
    mixer.load_state_dict(standard.state_dict(), strict=False)
    x = torch.randn(2, T, 20, dtype=torch.float64)
    for is_causal in (True, False):
        assert_near(run(mixer, x, is_causal), run(standard, x, is_causal), rtol=1e-9, atol=1e-9)
