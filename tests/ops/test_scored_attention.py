"""Scored attention against softmax written out in numpy."""

import numpy as np
import pytest
import torch

from frankenstein_hf.ops import eager_attention, scored_attention

B, H, G, T, S, K, V = 2, 4, 2, 5, 7, 6, 3


def tensors():
    shapes = ((B, H, T, K), (B, G, S, K), (B, G, S, V))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def softmax_attention(q, k, v, visible, bias=0.0, scale=K**-0.5):
    """One query at a time, over the keys it sees; zeros when it sees none."""
    bias = np.broadcast_to(bias, (B, H, T, S))
    visible = np.broadcast_to(visible, (B, H, T, S))
    out = np.zeros((B, H, T, V))
    for b, h, t in np.ndindex(B, H, T):
        seen = np.flatnonzero(visible[b, h, t])
        if len(seen):
            g = h * G // H
            scores = scale * k[b, g, seen] @ q[b, h, t] + bias[b, h, t, seen]
            weights = np.exp(scores - scores.max())
            out[b, h, t] = weights / weights.sum() @ v[b, g, seen]
    return torch.from_numpy(out)


triangle = np.arange(S)[None, :] <= np.arange(T)[:, None] + S - T
some = np.random.default_rng(0).random((B, 1, T, S)) < 0.6
some[0, 0, 2] = False  # a query that sees nothing


@pytest.mark.parametrize(
    ("visible", "arguments"),
    [
        (np.ones((T, S), bool), {}),
        (triangle, {"mask": torch.from_numpy(triangle)}),
        (some, {"mask": torch.from_numpy(some)}),
        (triangle, {"mask": torch.zeros(T, S).masked_fill(~torch.from_numpy(triangle), -torch.inf).double()}),
        (np.ones((T, S), bool), {"scale": 0.3}),
        (some, {"mask": torch.from_numpy(some), "bias": torch.linspace(-3, 3, S).double().expand(1, H, T, S)}),
    ],
)
def test_both_forms_are_softmax_over_the_visible_keys(visible, arguments):
    q, k, v = tensors()
    bias = arguments["bias"].numpy() if "bias" in arguments else 0.0
    numpy = [x.detach().numpy() for x in (q, k, v)]
    expected = softmax_attention(*numpy, visible, bias, arguments.get("scale", K**-0.5))
    output, weights = eager_attention(q, k, v, **arguments)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    assert (weights.detach().numpy()[~np.broadcast_to(visible, weights.shape)] == 0).all()
    torch.testing.assert_close(scored_attention(q, k, v, **arguments), expected, rtol=1e-10, atol=1e-10)


def test_the_triangle_belongs_to_the_last_queries():
    q, k, v = tensors()
    expected = softmax_attention(*(x.detach().numpy() for x in (q, k, v)), triangle)
    torch.testing.assert_close(eager_attention(q, k, v, is_causal=True)[0], expected, rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="put the triangle into the mask"):
        scored_attention(q, k, v, torch.from_numpy(triangle), is_causal=True)


def test_a_low_rank_bias_equals_the_explicit_one():
    q, k, v = tensors()
    left, right = torch.randn(B, H, T, 2).double(), torch.randn(B, G, S, 2).double()
    bias = left @ right.repeat_interleave(H // G, dim=1).mT
    torch.testing.assert_close(
        scored_attention(q, k, v, low_rank_bias=(left, right)), eager_attention(q, k, v, bias=bias)[0]
    )


def test_gradients():
    q, k, v = tensors()
    mask = torch.from_numpy(some)
    assert torch.autograd.gradcheck(lambda *x: eager_attention(*x, mask)[0], (q, k, v), fast_mode=True)
    assert torch.autograd.gradcheck(lambda *x: scored_attention(*x, mask), (q, k, v), fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *x: eager_attention(*x, mask)[0], (q, k, v), fast_mode=True)


def test_dropout_drops_weights():
    q, k, v = tensors()
    weights = eager_attention(q, k, v, dropout=0.5)[1]
    assert 0.2 < (weights == 0).double().mean() < 0.8
