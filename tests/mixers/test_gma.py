"""`gma` against numpy written from the paper, and what its normalisation promises."""

import numpy as np
import pytest
import torch

from frankenstein_hf.modeling.mixers.latent.gma import responsibilities

from ..tiny import assert_near, relative_rms
from .run import make_mixer, numpy_weights, run

H, W, D, M, P = 2, 10, 20, 3, 5
EPSILON = 0.1  # large, so that it shows


def posterior(x, means, variances, priors):
    """[T, P] -> [T, M], density by density."""
    density = np.empty((len(x), len(means)))
    for m, (mean, variance) in enumerate(zip(means, variances)):
        exponent = -0.5 * ((x - mean) ** 2 / variance).sum(1)
        density[:, m] = priors[m] * np.exp(exponent) / np.sqrt((2 * np.pi * variance).prod())
    return density / density.sum(1, keepdims=True)


def affinities(x, w, is_causal):
    """γ^Q_i · γᴷ_j [H, T, T] and the values [H, T, W]."""
    T = len(x)
    q, k, v = (x @ w[f"{name}_proj.weight"].T for name in "qkv")
    variances = np.logaddexp(0, w["raw_variances"]) + 1e-4
    A = np.empty((H, T, T))
    for h in range(H):
        priors = np.exp(w["prior_logits"][h]) / np.exp(w["prior_logits"][h]).sum()
        mixture = w["means"][h], variances[h], priors
        span = slice(h * P, (h + 1) * P)
        A[h] = posterior(q[:, span], *mixture) @ posterior(k[:, span], *mixture).T
    return np.tril(A) if is_causal else A, v.reshape(T, H, W).transpose(1, 0, 2)


def mixer_with_a_random_mixture(**params):
    mixer = make_mixer("gma", {"num_components": M, "routing_dim": P, "eps": EPSILON} | params)
    for parameter in (mixer.raw_variances, mixer.prior_logits):
        torch.nn.init.normal_(parameter)
    return mixer


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("T", [3, 70])
def test_gma_follows_the_paper(is_causal, T):
    mixer, x = mixer_with_a_random_mixture(), torch.randn(1, T, D, dtype=torch.float64)
    w = numpy_weights(mixer)
    A, v = affinities(x[0].numpy(), w, is_causal)
    out = A @ v / (A.sum(-1, keepdims=True) + EPSILON)
    expected = torch.from_numpy(out.transpose(1, 0, 2).reshape(T, -1) @ w["o_proj.weight"].T)
    for backend in ("eager", "sdpa"):
        assert_near(run(mixer, x, is_causal, backend)[0], expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("is_causal", [True, False])
def test_affinity_rows_sum_to_z_over_z_plus_epsilon(is_causal):
    """Values of one read the row sums."""
    mixer, T = mixer_with_a_random_mixture(), 40
    x = torch.cat([torch.randn(1, T, D - 1), torch.ones(1, T, 1)], dim=-1).double()
    with torch.no_grad():
        mixer.v_proj.weight.zero_()[:, -1] = 1.0
        mixer.o_proj.weight.copy_(torch.eye(D))
    Z = affinities(x[0].numpy(), numpy_weights(mixer), is_causal)[0].sum(-1)
    expected = torch.from_numpy(Z / (Z + EPSILON)).T.repeat_interleave(W, dim=1)
    assert_near(run(mixer, x, is_causal)[0], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("offset", [0.0, 50.0])
def test_responsibilities_in_fp32_are_those_of_fp64(offset):
    """Also where means and queries share a large offset, which the expanded squares must not feel."""
    x, means = torch.randn(1, H, 60, 64) + offset, torch.randn(H, 8, 64) + offset
    variances, log_priors = torch.rand(H, 8, 64) + 0.05, torch.randn(H, 8).log_softmax(-1)
    arguments = (x, means, variances, log_priors)
    expected = responsibilities(*(y.double() for y in arguments))
    torch.testing.assert_close(responsibilities(*arguments).double(), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_far_and_near_queries_stay_finite_and_close_to_fp64(is_causal, scale):
    """From equal responsibilities to components that own a token alone, so that some affinities are exactly zero."""
    mixer = mixer_with_a_random_mixture(eps=1e-6)
    with torch.no_grad():
        mixer.means.mul_(scale)
        mixer.q_proj.weight.mul_(scale)
        mixer.k_proj.weight.mul_(scale)
    x = torch.randn(1, 150, D, dtype=torch.float64)
    expected = run(mixer, x, is_causal, "eager")
    single = mixer.float()
    x = x.float().requires_grad_()
    y = run(single, x, is_causal)
    y.square().sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in single.parameters())
    assert relative_rms(y.detach(), expected) < 1e-4


def test_long_sequences_in_half_precision_follow_fp64():
    mixer = mixer_with_a_random_mixture(eps=1e-6)
    half = mixer.to(torch.bfloat16)
    x = torch.randn(1, 4096, D, dtype=torch.bfloat16)
    y = run(half, x)
    expected = run(half.double(), x.double())
    assert relative_rms(y, expected) < 2e-2
