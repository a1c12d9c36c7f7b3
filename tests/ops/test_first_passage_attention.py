"""First passage attention by tiles beside its bias written down pair by pair."""

import pytest
import torch

from frankenstein_hf.modeling.ops.first_passage_attention import (
    first_passage_attention,
    first_passage_bias,
    soft_minimum,
)
from frankenstein_hf.modeling.ops.scored_attention import eager_attention

from ..tiny import relative_rms

B, G, H, T, W = 2, 2, 4, 23, 5


def inputs(scale: float, drift: float):
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, h, T, W).double() for h in (H, G, G))
    walk = (scale * torch.randn(B, H, T).double() + drift).cumsum(-1)
    field, level = (walk + scale * torch.randn(B, H, T).double() for _ in range(2))
    return [x.requires_grad_() for x in (q, k, v, field, level, torch.rand(H).double() + 0.5)]


def test_the_bias_is_the_deepest_dip_below_the_level():
    field, level, β = (x.detach() for x in inputs(1.0, 0.0)[3:])
    bias = first_passage_bias(field, level, β, torch.arange(T)[None], 1.0, None)
    for t in range(T):
        for s in range(t + 1):
            dip = field[0, 1, s + 1 : t + 1].min() - level[0, 1, s] if s < t else torch.tensor(0.0)
            assert abs(float(bias[0, 1, t, s] - β[1] * dip.clamp(max=0))) < 1e-12


def test_the_gradient_of_the_inner_minimum_is_the_soft_ones():
    _, _, _, field, level, β = inputs(1.0, 0.0)
    own, w = torch.arange(T)[None], torch.randn(B, H, T, T).double().tril(-1)
    bias = first_passage_bias(field, level, β, own, 0.7, None)
    (gradient,) = torch.autograd.grad((bias * w).sum(), field)
    upstream = w * β.detach()[:, None, None] * (bias < 0)  # what passes the outer minimum
    expected = torch.zeros_like(field)
    for t in range(T):
        for s in range(t):
            expected[..., s + 1 : t + 1] += upstream[..., t, s, None] * (-field[..., s + 1 : t + 1] / 0.7).softmax(-1)
    assert relative_rms(gradient, expected) < 1e-12
    assert soft_minimum(field, own, 0.7).shape == (B, H, T, T)


@pytest.mark.parametrize("tile", [(4, 6), (1, 1), (100, 7), (5, 100), (8, 4), (8, 8)])
@pytest.mark.parametrize(("scale", "drift"), [(1.0, 0.0), (0.1, -0.5), (30.0, 0.0), (1.0, 40.0), (1.0, -40.0)])
def test_tiles_agree_with_the_readable_form_gradients_too(tile, scale, drift):
    leaves = inputs(scale, drift)
    q, k, v, field, level, β = leaves
    for exclude_own in (False, True):
        mask = torch.ones(T, T, dtype=torch.bool).tril(-int(exclude_own))[None, None]
        bias = first_passage_bias(field, level, β, torch.arange(T)[None], 0.9, None)
        expected, _ = eager_attention(q, k, v, mask, bias=bias)
        actual, _ = first_passage_attention(
            q, k, v, field, level, β, temperature=0.9, exclude_own=exclude_own, tile=tile
        )
        assert relative_rms(actual, expected) < 1e-12
        w = torch.randn_like(expected)
        for a, b in zip(*(torch.autograd.grad((x * w).sum(), leaves) for x in (actual, expected))):
            error = (a - b).square().mean().sqrt()
            assert error < 1e-10 * max(1.0, float(b.square().mean().sqrt()))


def test_a_threshold_leaves_dead_keys_out():
    q, k, v, field, level, β = inputs(2.0, 0.0)
    own = torch.arange(T)[None]
    bias = first_passage_bias(field, level, β, own, 1.0, None)
    mask = torch.ones(T, T, dtype=torch.bool).tril() & (bias >= -1.5)
    assert 0.2 < mask.double().mean() < 0.5
    expected, _ = eager_attention(q, k, v, mask, bias=bias)
    for tile in ((4, 6), (64, 64)):
        actual, _ = first_passage_attention(q, k, v, field, level, β, threshold=1.5, tile=tile)
        assert relative_rms(actual, expected) < 1e-12
    assert torch.equal(first_passage_bias(field, level, β, own, 1.0, 1.5) >= -1.5, bias >= -1.5)
