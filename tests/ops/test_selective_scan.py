import pytest
import torch
from torch.nn import functional as F

from frankenstein_hf.modeling.ops.selective_scan import selective_scan

NAMES = ["x", "delta", "A", "B", "C", "D", "initial_state"]


def loop(x, delta, A, B, C, D, h, discretization, exclude_own):
    """The recurrence of Mamba, section 2 and algorithm 2, token by token."""
    ys = []
    for x_t, d_t, B_t, C_t in zip(x.unbind(1), delta.unbind(1), B.unbind(1), C.unbind(1)):
        A_bar = torch.exp(d_t[..., None] * A)  # [B, E, N]
        B_bar = d_t[..., None] * B_t[:, None] if discretization == "euler" else (A_bar - 1) / A * B_t[:, None]
        before = A_bar * h
        h = before + B_bar * x_t[..., None]
        ys.append(torch.einsum("ben,bn->be", before if exclude_own else h, C_t) + D * x_t)
    return torch.stack(ys, dim=1), h


def inputs(batch, T, E, N, step=0.1, dtype=torch.float64):
    torch.manual_seed(batch + 10 * T + 1000 * E + N)
    x, B, C = torch.randn(batch, T, E), torch.randn(batch, T, N), torch.randn(batch, T, N)
    delta = step * F.softplus(torch.randn(batch, T, E))
    A = -torch.exp(torch.randn(E, N)) - 0.05
    made = [x, delta, A, B, C, torch.randn(E), torch.randn(batch, E, N)]
    return [a.to(dtype).requires_grad_() for a in made]


def scan(x, delta, A, B, C, D, h, **options):
    return selective_scan(x, delta, A, B, C, D, initial_state=h, output_final_state=True, **options)


def rms(a, b):
    return ((a.double() - b.double()).square().mean() / b.double().square().mean().clamp_min(1e-30)).sqrt().item()


FORMS: list[dict] = [
    {"discretization": "euler", "exclude_own": False},
    {"discretization": "euler", "exclude_own": True},
    {"discretization": "zoh", "exclude_own": False},
    {"discretization": "zoh", "exclude_own": True},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("T", [1, 2, 3, 4, 5, 6, 7, 8, 9, 150])
def test_equals_the_token_loop_with_all_gradients(T, form):
    args = inputs(2, T, 7, 5)
    expected = loop(*args, **form)
    go = [torch.randn_like(e) for e in expected]
    expected_grads = torch.autograd.grad(expected, args, go)
    for sequential in (False, True):
        args32 = [a.detach().float().requires_grad_() for a in args]
        got = scan(*args32, **form, sequential=sequential)
        assert rms(got[0], expected[0]) < 1e-6 and rms(got[1], expected[1]) < 1e-6
        grads = torch.autograd.grad(got, args32, [g.float() for g in go])
        for name, grad, reference in zip(NAMES, grads, expected_grads):
            assert rms(grad, reference) < 2e-6, (name, sequential)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_first_derivatives(form):
    args = inputs(2, 3, 3, 2, step=1.0)
    assert torch.autograd.gradcheck(lambda *a: scan(*a, **form), args)


@pytest.mark.parametrize("form", FORMS[1:3], ids=str)
def test_the_sequential_form_has_second_derivatives(form):
    args = inputs(1, 3, 2, 2, step=1.0)
    assert torch.autograd.gradgradcheck(lambda *a: scan(*a, **form, sequential=True), args)


@pytest.mark.parametrize("form", FORMS[:2], ids=str)
def test_many_segments_of_a_wide_batch(form):
    args = inputs(3, 70, 96, 16)
    expected = loop(*args, **form)
    go = [torch.randn_like(e) for e in expected]
    expected_grads = torch.autograd.grad(expected, args, go)
    args32 = [a.detach().float().requires_grad_() for a in args]
    got = scan(*args32, **form)
    assert rms(got[0], expected[0]) < 1e-6
    for name, grad, reference in zip(NAMES, torch.autograd.grad(got, args32, [g.float() for g in go]), expected_grads):
        assert rms(grad, reference) < 2e-6, name


@pytest.mark.parametrize("step", [1e-4, 30.0, 1000.0])
@pytest.mark.parametrize("form", [FORMS[0], FORMS[3]], ids=str)
def test_extreme_step_sizes(step, form):
    args = inputs(1, 80, 6, 4, step=step)
    expected = loop(*args, **form)
    go = [torch.randn_like(e) for e in expected]
    args32 = [a.detach().float().requires_grad_() for a in args]
    got = scan(*args32, **form)
    assert rms(got[0], expected[0]) < 2e-6 and rms(got[1], expected[1]) < 2e-6
    grads = torch.autograd.grad(got, args32, [g.float() for g in go])
    for name, grad, reference in zip(NAMES, grads, torch.autograd.grad(expected, args, go)):
        assert grad.isfinite().all() and (grad - reference).norm() < 1e-5 * reference.norm() + 1e-9, name


def test_a_split_row_continues_from_the_state():
    x, delta, A, B, C, D, h = (a.detach() for a in inputs(2, 50, 9, 4, dtype=torch.float32))
    whole, last = scan(x, delta, A, B, C, D, h)
    for start, stop in [(0, 1), (1, 30), (30, 31), (31, 50)]:
        span = slice(start, stop)
        y, h = scan(x[:, span], delta[:, span], A, B[:, span], C[:, span], D, h)
        torch.testing.assert_close(y, whole[:, span], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(h, last, rtol=1e-5, atol=1e-6)
    y, none = selective_scan(x, delta, A, B, C)
    assert none is None
    torch.testing.assert_close(y, scan(x, delta, A, B, C, D * 0, last * 0)[0])


@pytest.mark.parametrize("form", FORMS[:2], ids=str)
def test_is_causal_bit_for_bit(form):
    args = [a.detach() for a in inputs(2, 90, 33, 4, dtype=torch.float32)]
    args[5].zero_()
    before, _ = scan(*args, **form)
    changed = [a.clone() for a in args]
    for index in (0, 1, 3):
        changed[index][:, 40] *= 300  # a step size that may underflow, too
    after, _ = scan(*changed, **form)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 41], after[:, 41])
    own = [a.clone() for a in args]
    own[0][:, 40] += 1.0
    assert torch.equal(before[:, 40], scan(*own, **form)[0][:, 40]) == form["exclude_own"]


def test_non_contiguous_and_half_precision_inputs():
    args = inputs(2, 40, 6, 4)
    expected = loop(*args, **FORMS[0])
    turned = [a.detach().mT.contiguous().mT if a.dim() > 1 else a.detach() for a in args]
    torch.testing.assert_close(scan(*turned), expected)
    half = [a.detach().bfloat16().requires_grad_() for a in args]
    with torch.autocast("cpu", torch.bfloat16):
        y, h = scan(*half)
    assert y.dtype == torch.bfloat16 and h.dtype == torch.float32 and rms(y, expected[0]) < 2e-2
    y.sum().backward()
    assert all(a.grad is not None and a.grad.dtype == torch.bfloat16 for a in half)


def test_wrong_arguments_are_refused():
    x, delta, A, B, C, D, h = (a.detach() for a in inputs(2, 5, 6, 4))
    for wrong in [
        (x, delta[1:], A, B, C),
        (x, delta, A.T, B, C),
        (x, delta, A, B, C[:, 1:]),
        (x, delta, A, B, C, D[1:]),
    ]:
        with pytest.raises(ValueError, match="selective_scan"):
            selective_scan(*wrong)
    with pytest.raises(ValueError, match="initial_state"):
        selective_scan(x, delta, A, B, C, initial_state=h[:1])
    with pytest.raises(ValueError, match="'euler' or 'zoh', got 'foh'"):
        selective_scan(x, delta, A, B, C, discretization="foh")
