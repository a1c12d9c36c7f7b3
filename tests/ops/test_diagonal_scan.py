"""The diagonal scan against a loop in fp64, its gradients, and what every core promises."""

import numpy as np
import pytest
import torch

from frankenstein_hf.modeling.ops.diagonal_scan import diagonal_scan

from ..tiny import relative_rms


def loop(g, w, h):
    out = []
    for t in range(len(g)):
        h = np.exp(g[t]) * h + w[t]
        out.append(h)
    return np.stack(out)


def gates(kind, *shape):
    g = -torch.rand(*shape)
    if kind == "mixed":
        which = torch.rand(*shape)
        return torch.where(which < 0.2, -50.0, torch.where(which < 0.4, 0.0, 3.0 * g))
    return {"mild": 0.1 * g, "none": 0.0 * g, "strong": g - 50.0, "reset": torch.where(g < -0.9, -torch.inf, g)}[kind]


@pytest.mark.parametrize("kind", ["mild", "none", "strong", "mixed", "reset"])
@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 64, 100, 333])
def test_equals_a_loop_with_all_gradients(T, kind):
    torch.manual_seed(T)
    g, w, h, d = gates(kind, 2, T, 5), torch.randn(2, T, 5), torch.randn(2, 5), torch.randn(2, T, 5)
    expected = np.stack([loop(*(x[b].double().numpy() for x in (g, w, h))) for b in range(2)])
    leaves = [x.clone().requires_grad_() for x in (g, w, h)]
    states, last = diagonal_scan(leaves[0], leaves[1], initial_state=leaves[2])
    assert relative_rms(states, torch.from_numpy(expected)) < 1e-6
    assert torch.equal(last, states[:, -1])
    exact = [x.double().requires_grad_() for x in (g, w, h)]
    (diagonal_scan(exact[0], exact[1], initial_state=exact[2], sequential=True)[0] * d.double()).sum().backward()
    (states * d).sum().backward()
    for fast, slow in zip(leaves, exact):
        error = (fast.grad.double() - slow.grad).square().mean().sqrt()
        assert error <= 1e-6 * slow.grad.square().mean().sqrt() + 1e-9  # gradients through a decay of -50 are nothing


def test_gradcheck_in_fp64_and_second_derivatives_of_the_loop():
    g, w, h = (x.double().requires_grad_() for x in (-torch.rand(1, 37, 3), torch.randn(1, 37, 3), torch.randn(1, 3)))
    assert torch.autograd.gradcheck(lambda g, w, h: diagonal_scan(g, w, initial_state=h), (g, w, h))
    short = [x[:, :3].detach().requires_grad_() for x in (g, w)]
    assert torch.autograd.gradgradcheck(
        lambda g, w, h: diagonal_scan(g, w, initial_state=h, sequential=True), (*short, h)
    )


def test_no_state_depends_on_a_later_token_bit_for_bit_and_halves_are_computed_in_fp32():
    g, w = -torch.rand(1, 200, 4), torch.randn(1, 200, 4)
    expected, _ = diagonal_scan(g, w)
    for t in (1, 16, 100, 199):
        changed = w.clone()
        changed[:, t] += 1.0
        assert torch.equal(diagonal_scan(g, changed)[0][:, :t], expected[:, :t])
    assert diagonal_scan(g.bfloat16(), w.bfloat16())[0].dtype == torch.float32
    with pytest.raises(ValueError, match="initial_state must be"):
        diagonal_scan(g, w, initial_state=torch.zeros(1, 5))
