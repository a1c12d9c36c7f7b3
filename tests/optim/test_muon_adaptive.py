"""AdaMuon, NorMuon and Muon² against numpy."""

import numpy as np
import pytest
import torch
from torch import nn

from .orthogonal import MATRICES, norm, ns
from .toy import check_parity, optimizer_of


def size(w):
    return w.shape[-2] * w.shape[-1]


def derive_adamuon(w, gradients, *, lr, weight_decay, momentum, eps, rms, **_):
    m, v = np.zeros_like(w), np.zeros_like(w)
    for g in gradients:
        m = momentum * m + g
        o = ns(np.sign(m))
        v = momentum * v + (1 - momentum) * o**2
        o = o / (np.sqrt(v) + eps)
        w = w - lr * (rms * np.sqrt(size(w)) / norm(o) * o + weight_decay * w)
    return w


def derive_normuon(w, gradients, *, lr, weight_decay, momentum, beta2, eps, rms, **_):
    m, v = np.zeros_like(w), 0
    for g in gradients:
        m = momentum * m + (1 - momentum) * g
        o = ns(m)
        v = beta2 * v + (1 - beta2) * (o**2).mean(-1, keepdims=True)
        o = o / (np.sqrt(v) + eps)
        w = w - lr * weight_decay * w - rms * lr * np.sqrt(size(w)) / norm(o) * o
    return w


def derive_muon2(w, gradients, *, lr, weight_decay, momentum, beta2, eps, factored, **_):
    m, v, r, c = np.zeros_like(w), 0, 0, 0
    for g in gradients:
        m = momentum * m + (1 - momentum) * g
        v = beta2 * v + (1 - beta2) * g**2
        r = beta2 * r + (1 - beta2) * (g**2).sum(-1)
        c = beta2 * c + (1 - beta2) * (g**2).sum(-2)
        estimate = r[..., :, None] * c[..., None, :] / r.sum(-1)[..., None, None] if factored else v
        o = ns(m / (np.sqrt(estimate) + eps))
        w = w * (1 - lr * weight_decay) - lr * np.sqrt(w.shape[-2] / w.shape[-1]) * o
    return w


def test_adamuon():
    check_parity("adamuon", derive_adamuon, shapes=MATRICES)


def test_normuon():
    check_parity("normuon", derive_normuon, shapes=MATRICES)


@pytest.mark.parametrize("factored", [False, True])
def test_muon2(factored):
    check_parity("muon2", derive_muon2, shapes=MATRICES, factored=factored)


def test_factored_muon2_keeps_rows_and_columns():
    w = nn.Parameter(torch.randn(2, 5, 3))
    optimizer = optimizer_of("muon2", [w], factored=True)
    w.grad = torch.randn_like(w)
    optimizer.step()
    assert optimizer.state_bytes() == 4 * (30 + 2 * (5 + 3))


@pytest.mark.parametrize("name", ["adamuon", "normuon"])
def test_steps_have_adamws_size(name):
    torch.manual_seed(0)
    w = nn.Parameter(torch.zeros(8, 12))
    optimizer = optimizer_of(name, [w], lr=1.0)
    for _ in range(3):
        before = w.detach().clone()
        w.grad = torch.randn_like(w)
        optimizer.step()
        step = w.detach() - before
        assert step.square().mean().sqrt().item() == pytest.approx(0.2, rel=1e-5)
    if name == "normuon":  # rows have nearly the same size
        rows = step.norm(dim=-1)
        assert rows.max() / rows.min() < 1.5
