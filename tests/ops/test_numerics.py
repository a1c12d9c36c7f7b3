"""The arithmetic helpers."""

import torch

from frankenstein_hf.modeling.ops.numerics import at_least_fp32, decay_exp, flush_tiny, full_precision


def test_precision_is_raised_and_never_lowered():
    for given, wanted in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2):
        assert at_least_fp32(torch.ones(1, dtype=given)).dtype == wanted


def test_nothing_subnormal_comes_out():
    x = torch.tensor([-200.0, -100.0, -60.0, -59.0, -1.0, 0.0])
    assert decay_exp(x).tolist() == [0.0, 0.0, 0.0, *x[3:].exp().tolist()]
    tiny = torch.tensor([1e-40, -1e-30, 1e-20, 0.0])
    assert flush_tiny(tiny).tolist() == [0.0, 0.0, tiny[2].item(), 0.0]


def test_flushing_passes_the_gradient_of_a_zero():
    x = torch.tensor([0.0, 1e-40, 2.0], requires_grad=True)
    flush_tiny(x).mul(torch.tensor([3.0, 4.0, 1e-40])).sum().backward()
    assert x.grad.tolist() == [3.0, 4.0, 0.0]


def test_full_precision_keeps_products_exact_under_autocast():
    x = torch.full((2, 2), 1.001)
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        assert torch.equal(full_precision(torch.matmul)(x, x), torch.matmul(x.double(), x.double()).float())
