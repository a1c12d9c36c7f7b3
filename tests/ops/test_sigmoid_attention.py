"""Sigmoid attention by tiles, beside the sigmoids written down at once."""

import pytest
import torch

from frankenstein_hf.modeling.ops.sigmoid_attention import sigmoid_attention

from ..tiny import relative_rms

B, G, H, T, S, W = 2, 2, 4, 19, 23, 5


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("tile", [(4, 6), (100, 7), (1, 100)])
def test_weights_are_sigmoids_of_logits_and_level(normalize, tile):
    torch.manual_seed(0)
    q, level = torch.randn(B, H, T, W).double(), torch.randn(B, H, T).double()
    k, v = torch.randn(2, B, G, S, W).double()
    inputs = [x.requires_grad_() for x in (q, k, v, level)]
    last = torch.randint(-1, S, (B, T))

    def at_once(q, k, v, level):
        logits = q @ k.repeat_interleave(H // G, 1).mT / W**0.5 + level[..., None]
        p = torch.sigmoid(logits) * (torch.arange(S) <= last[:, None, :, None])
        p = p / p.sum(-1, keepdim=True).clamp_min(1e-300) if normalize else p
        return p @ v.repeat_interleave(H // G, 1)

    actual, expected = sigmoid_attention(*inputs, last, normalize, tile=tile), at_once(*inputs)
    assert relative_rms(actual, expected) < 1e-13
    weights = torch.randn_like(expected)
    gradients = [torch.autograd.grad((x * weights).sum(), inputs) for x in (actual, expected)]
    assert all(relative_rms(a, b) < 1e-12 for a, b in zip(*gradients))


def test_logits_far_below_zero_stay_finite_and_weigh_nothing():
    q = torch.full((1, 1, 3, W), 30.0, requires_grad=True)
    k, v = torch.full((1, 1, 3, W), -30.0, requires_grad=True), torch.ones(1, 1, 3, W, requires_grad=True)
    for normalize in (True, False):
        out = sigmoid_attention(q, k, v, torch.zeros(1, 1, 3), torch.arange(3)[None], normalize)
        out.sum().backward()
        assert torch.allclose(out, torch.full_like(out, float(normalize)), atol=1e-20)
        assert all(x.grad.isfinite().all() for x in (q, k, v))
