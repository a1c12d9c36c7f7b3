"""The shared iteration: its singular values, its two forms, its start."""

import pytest
import torch

from frankenstein_hf.optim import matrix_method
from frankenstein_hf.optim.muon import Muon
from frankenstein_hf.optim.newton_schulz import COEFFICIENTS, newton_schulz, schedule

from .orthogonal import polynomial


def with_singular_values(s, m, n, seed=0):
    torch.manual_seed(seed)
    u = torch.linalg.qr(torch.randn(m, len(s), dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(n, len(s), dtype=torch.float64))[0]
    return (u * s) @ v.mT


@pytest.mark.parametrize("gram", [False, True])
def test_singular_values_lie_near_one(gram):
    schedule_ = schedule("muon", 5)
    for top in torch.linspace(0.05, 1, 20, dtype=torch.float64):
        s = torch.linspace(0.01, 1, 12, dtype=torch.float64) * top
        s = torch.cat([s[s >= 0.0101], torch.tensor([1e-3, 1e-5], dtype=torch.float64)])
        rest = 1 - s.square().sum()
        s = s / s.norm() if rest < 0 else torch.cat([s, rest.sqrt()[None]])
        x = with_singular_values(s, 16, 40)[None]
        found = torch.linalg.svdvals(newton_schulz(x.float(), schedule_, gram=gram)[0].double())[: len(s)]
        assert found.max() < 1.14 and found[: int((s >= 0.0101).sum())].min() > 0.68
    grid = torch.linspace(0, 1, 100001, dtype=torch.float64)
    for a, b, c in schedule_:
        grid = a * grid + b * grid**3 + c * grid**5
    assert grid.max() < 1.21 and grid.min() >= 0


@pytest.mark.parametrize("name", list(COEFFICIENTS))
@pytest.mark.parametrize("shape", [(3, 4, 9), (2, 9, 4), (2, 5, 5), (1, 1, 6)])
def test_both_forms_are_the_polynomial_of_the_singular_values(name, shape):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    triples = schedule(name, 6)
    scaled = x / torch.linalg.matrix_norm(x, keepdim=True)
    expected = torch.from_numpy(polynomial(scaled.numpy(), triples))
    for gram in (False, True, None):
        torch.testing.assert_close(newton_schulz(x, triples, gram=gram), expected)
        torch.testing.assert_close(newton_schulz(x.float(), triples, gram=gram), expected.float(), atol=2e-4, rtol=1e-3)


def test_the_almost_orthogonal_start_keeps_signs_and_bounds():
    torch.manual_seed(0)
    for shape in ((8, 6, 20), (8, 12, 12), (4, 1, 9), (4, 9, 1)):
        x = torch.randn(shape, dtype=torch.float64)
        start = newton_schulz(x, (), almost_orthogonal=True)
        assert torch.linalg.svdvals(start).max() <= 1 + 1e-12
        done = newton_schulz(x, schedule("turbo", 4), almost_orthogonal=True)
        values = torch.linalg.svdvals(done)
        assert values.max() < 1.3 and values.median() > 0.6
        assert ((done * x).sum((-2, -1)) > 0).all()


def test_turbos_polynomial_is_near_one():
    sigma = torch.linspace(0.01, 1, 10001, dtype=torch.float64)
    for a, b, c in schedule("turbo", 4):
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    assert sigma.min() > 0.97 and sigma.max() < 1.15


@pytest.mark.parametrize("gram", [False, True])
def test_half_precision(gram):
    torch.manual_seed(0)
    x = torch.randn(2, 32, 96)
    dtype = torch.float16 if gram else torch.bfloat16  # what accelerators take
    for name, steps, start in (("muon", 5, False), ("polar_express", 5, False), ("turbo", 4, True)):
        exact = newton_schulz(x, schedule(name, steps), almost_orthogonal=start)
        found = newton_schulz(x.to(dtype), schedule(name, steps), almost_orthogonal=start, gram=gram)
        assert (found - exact).norm() < 0.05 * exact.norm()
    zero = torch.zeros(1, 3, 5, dtype=dtype)
    assert newton_schulz(zero, schedule("turbo", 4), almost_orthogonal=True, gram=gram).eq(0).all()


@pytest.mark.parametrize("shape", [(2, 32, 32), (2, 32, 96), (2, 96, 32)])
@pytest.mark.parametrize(("name", "steps", "start"), [("muon", 5, False), ("turbo", 4, True)])
def test_bf16_products_on_a_cpu_are_near_the_exact_ones_and_only_where_asked(name, steps, start, shape):
    torch.manual_seed(0)
    x, triples = torch.randn(shape), schedule(name, steps)
    exact = newton_schulz(x.double(), triples, almost_orthogonal=start).float()
    near = newton_schulz(x, triples, almost_orthogonal=start)
    rounded = newton_schulz(x, triples, almost_orthogonal=start, bf16=True)
    assert rounded.dtype == torch.bfloat16
    assert (near - exact).norm() < 1e-4 * exact.norm()
    assert 1e-3 * exact.norm() < (rounded - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("shape", [(32, 32), (24, 64)])
def test_bf16_products_are_those_of_torchs_muon(shape):
    torch.manual_seed(0)
    w, x = torch.nn.Parameter(torch.zeros(shape)), torch.randn(shape)
    w.grad = x
    torch.optim.Muon([w], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    ours = newton_schulz(x[None], schedule("muon", 5), bf16=True)[0]
    assert (ours + w).norm() < 5e-3 * ours.norm()  # rounding of bf16 alone is ten times that


@pytest.mark.parametrize("fast", [True, False])
def test_the_precision_is_measured_once_chosen_by_size_and_kept_in_the_state(fast, monkeypatch):
    calls, (small, large) = [], (torch.nn.Parameter(torch.zeros(size, size)) for size in (32, 96))
    monkeypatch.setattr(matrix_method, "prefers_bf16", lambda: calls.append(1) or fast)
    optimizer = Muon([{"params": [small, large], "kind": "matrix", "layout": "stack"}], lr=1.0)
    torch.manual_seed(0)
    for _ in range(2):
        for p in (small, large):
            p.data.zero_()
            p.grad = torch.randn_like(p)
        optimizer.step()
    assert len(calls) == 1 and optimizer.state_dict()["param_groups"][0]["cpu_prefers_bf16"] is fast
    assert torch.equal(large, large.bfloat16().float()) is fast and not torch.equal(small, small.bfloat16().float())
    resumed = Muon([{"params": [small, large], "kind": "matrix", "layout": "stack"}], lr=1.0)
    resumed.load_state_dict(optimizer.state_dict())
    resumed.step()
    assert len(calls) == 1


def test_bf16_products_do_not_blow_up_ill_conditioned_matrices():
    for least in (-2, -4):
        x = with_singular_values(torch.logspace(0, least, 64, dtype=torch.float64), 64, 256).float()[None]
        found = newton_schulz(x, schedule("muon", 5), bf16=True)[0].double()
        assert torch.linalg.svdvals(found).max() < 1.25


def test_complex_zero_and_tiny_matrices():
    triples = schedule("muon", 5)
    for gram in (False, True):
        assert newton_schulz(torch.zeros(2, 3, 5), triples, gram=gram).eq(0).all()
        z = torch.randn(2, 3, 5, dtype=torch.complex128)
        torch.testing.assert_close(newton_schulz(1j * z, triples, gram=gram), 1j * newton_schulz(z, triples, gram=gram))
    x = torch.randn(1, 3, 5)
    torch.testing.assert_close(newton_schulz(x * 1e-6, triples), newton_schulz(x, triples), rtol=1e-3, atol=1e-4)
    assert newton_schulz(torch.zeros(1, 3, 5), schedule("turbo", 4), almost_orthogonal=True).eq(0).all()
