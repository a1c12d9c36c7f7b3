"""Attention by tiles, beside the same scores written down at once."""

import pytest
import torch

from frankenstein_hf.modeling.ops.biased_attention import Bias, biased_attention
from frankenstein_hf.modeling.ops.forgetting_attention import forgetting_attention

from ..tiny import relative_rms

B, G, H, T, S, W = 2, 2, 4, 19, 23, 5


def heads(dtype=torch.float64):
    torch.manual_seed(0)
    q = torch.randn(B, H, T, W, dtype=dtype, requires_grad=True)
    return q, *(torch.randn(B, G, S, W, dtype=dtype, requires_grad=True) for _ in "kv")


def plain(q, k, v, bias, last):
    """softmax(q kᵀ / √W + bias) v and its log-sum-exps."""
    scores = q @ k.repeat_interleave(H // G, 1).mT / k.shape[-1] ** 0.5 + bias
    scores = scores.masked_fill(torch.arange(k.shape[2]) > last[:, None, :, None], torch.finfo(q.dtype).min)
    return scores.softmax(-1) @ v.repeat_interleave(H // G, 1), scores.logsumexp(-1)


def same(a, b, tolerance):
    """Where everything is forgotten a gradient is rounding, hence the 1."""
    rms = b.double().square().mean().sqrt()
    assert (a - b).double().square().mean().sqrt() < tolerance * max(1.0, rms)


def same_with_gradients(actual, expected, inputs, tolerance):
    weights = [torch.randn_like(x) for x in expected]
    for a, b in zip(actual, expected):
        same(a, b, tolerance)
    gradients = [
        torch.autograd.grad(sum((x * w).sum() for x, w in zip(outputs, weights)), inputs, allow_unused=True)
        for outputs in (actual, expected)
    ]
    for a, b in zip(*gradients):
        same(a, b, tolerance)


@pytest.mark.parametrize("tile", [(4, 6), (1, 1), (100, 7), (5, 100)])
def test_every_query_sees_the_keys_up_to_a_place_of_its_own(tile):
    q, k, v = heads()
    last = torch.randint(0, S, (B, T))
    actual = biased_attention(q, k, v, last, Bias(), tile=tile)
    same_with_gradients(actual, plain(q, k, v, 0, last), (q, k, v), 1e-12)


def test_a_query_that_sees_nothing_gives_zero_and_passes_no_gradient():
    q, k, v = heads()
    last = torch.randint(0, S, (B, T))
    last[0, 3] = last[1, 0] = -1
    output, lse = biased_attention(q, k, v, last, Bias(), tile=(4, 6))
    assert (output[0, :, 3] == 0).all() and (lse[1, :, 0] == -torch.inf).all()
    output.square().sum().backward()
    assert (q.grad[0, :, 3] == 0).all() and all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize("gate", [0.0, -0.05, -2.0, -50.0, "mixed"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_forgetting_is_exact_for_any_gate_and_leaves_out_only_what_is_forgotten(gate, dtype):
    q, k, v = heads(dtype)
    steps = torch.rand(B, H, S, dtype=torch.float64) + 0.5
    rare = torch.where(torch.rand(B, H, S) < 0.2, -50.0, -0.01)
    log_f = (steps * (rare if gate == "mixed" else gate)).requires_grad_()
    own = torch.arange(S - T, S)[None]

    def bias():
        c = log_f.cumsum(-1)
        return (c[:, :, own[0], None] - c[:, :, None]).to(dtype)

    actual = forgetting_attention(q, k, v, log_f.cumsum(-1), own, own, tile=(4, 3))
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    same_with_gradients(actual, plain(q, k, v, bias(), own), (q, k, v, log_f), tolerance)


def test_keys_forgotten_by_all_of_a_tile_are_passed_over(monkeypatch):
    q, k, v = heads()
    log_f = torch.full((B, H, S), -30.0, dtype=torch.float64)
    own, calls = torch.arange(S - T, S)[None], []
    from frankenstein_hf.modeling.ops import forgetting_attention as module

    add = module._Forgetting.add
    monkeypatch.setattr(module._Forgetting, "add", lambda self, *a: (calls.append(a[2:4]), add(self, *a)))
    forgetting_attention(q, k, v, log_f.cumsum(-1), own, own, tile=(4, 3))
    assert calls and all(i.start + S - T - (j.stop - 1) < 6 for i, j in calls)


def test_half_precision_is_computed_in_fp32_inside_autocast_too():
    q, k, v = (x.detach().to(torch.bfloat16).requires_grad_() for x in heads(torch.float32))
    last = torch.randint(0, S, (B, T))
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = biased_attention(q, k, v, last, Bias(), tile=(4, 6))
        output.float().square().sum().backward()
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected, _ = plain(*exact, 0, last)
    assert output.dtype == torch.bfloat16 and relative_rms(output, expected) < 3e-3
    expected.square().sum().backward()
    assert all(relative_rms(x.grad, y.grad) < 1e-2 for x, y in zip((q, k, v), exact))
