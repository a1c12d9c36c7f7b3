"""NAMO and NAMO-D against numpy and Muon."""

import numpy as np
import pytest
import torch
from torch import nn

from frankenstein_hf.optim.namo import Namo

from .orthogonal import MATRICES, norm, ns
from .toy import check_parity, optimizer_of


def derive(w, gradients, *, lr, weight_decay, betas, eps, clamp=None, **_):
    (mu1, mu2), m, v = betas, np.zeros_like(w), 0
    size = norm if clamp is None else lambda x: np.sqrt((x**2).sum(-2, keepdims=True))
    for t, g in enumerate(gradients, 1):
        m = mu1 * m + (1 - mu1) * g
        v = mu2 * v + (1 - mu2) * size(g) ** 2
        d = np.sqrt(1 - mu2**t) / (1 - mu1**t) * size(m) / (np.sqrt(v) + eps)
        if clamp is not None:
            mean = d.mean(-1, keepdims=True)
            d = np.clip(d, clamp * mean, mean / clamp)
        w = w - lr * (ns(m) + weight_decay * w) * d
    return w


def test_namo():
    check_parity("namo", derive, shapes=MATRICES)


@pytest.mark.parametrize("clamp", [0.1, 0.9, 1.0])
def test_namo_d(clamp):
    check_parity("namo_d", derive, shapes=MATRICES, clamp=clamp)


def test_with_a_constant_step_size_namo_is_muon(monkeypatch):
    monkeypatch.setattr(Namo, "step_sizes", lambda self, x, stack, group: torch.ones(()).to(x))
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(2, 4, 3))
    q = nn.Parameter(p.detach().clone())
    values = dict(lr=0.1, weight_decay=0.1)
    ours = optimizer_of("namo", [p], **values)
    muon = optimizer_of("muon", [q], nesterov=False, adjust_lr="none", **values)
    for _ in range(4):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
        ours.step()
        muon.step()
    torch.testing.assert_close(p, q)


def test_noise_shrinks_the_step():
    def distance(name, noise):
        torch.manual_seed(0)
        w = nn.Parameter(torch.zeros(6, 6))
        optimizer = optimizer_of(name, [w], lr=1.0)
        for _ in range(20):
            before = w.detach().clone()
            w.grad = torch.eye(6) + noise * torch.randn(6, 6)
            optimizer.step()
        return float((w.detach() - before).norm())

    for name in ("namo", "namo_d"):
        assert distance(name, 3.0) < 0.7 * distance(name, 0.0)
