"""Grams against a derivation from its paper, and its relation to Adam."""

import numpy as np
import torch
from torch import nn

from .toy import check_parity, optimizer_of


def derive(w, gradients, *, lr, weight_decay, betas, eps):
    m = v = 0.0
    for t, g in enumerate(gradients, 1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        u = (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
        w = w * (1 - lr * weight_decay) - lr * np.sign(g) * np.abs(u)
    return w


def test_grams():
    check_parity("grams", derive)
    check_parity("grams", derive, betas=(0.5, 0.7), eps=0.1)


def test_where_momentum_and_gradient_agree_it_is_adam_and_a_zero_gradient_moves_nothing():
    ends = {}
    for name in ("grams", "adamw"):
        w = nn.Parameter(torch.ones(3, dtype=torch.float64))
        optimizer = optimizer_of(name, [w], lr=0.1, weight_decay=0.0)
        for scale in (1.0, 2.0, 0.5):
            w.grad = torch.tensor([1.0, -2.0, 0.0], dtype=w.dtype) * scale
            optimizer.step()
        ends[name] = w.detach()
    torch.testing.assert_close(ends["grams"], ends["adamw"])
    before = w.detach().clone()
    grams = optimizer_of("grams", [w])
    for g in (1.0, 0.0):
        before, w.grad = w.detach().clone(), torch.full_like(w, g)
        grams.step()
    assert torch.equal(w, before)
