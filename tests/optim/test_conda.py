"""Conda against numpy."""

import numpy as np
import pytest
import torch
from torch import nn

import frankenstein_hf as fhf
from frankenstein_hf.optim.conda import left_basis

from .orthogonal import MATRICES
from .toy import batches, check_parity, language_model, train


def derive(w, gradients, *, lr, weight_decay, betas, eps, update_proj_gap, scale, correct_bias, **_):
    (beta1, beta2), m, n = betas, np.zeros_like(w), 0
    tall = w.shape[-2] > w.shape[-1]
    for t, g in enumerate(gradients):
        m = beta1 * m + (1 - beta1) * g
        if t % update_proj_gap == 0:
            u, _, vt = np.linalg.svd(m, full_matrices=False)
        basis = np.swapaxes(vt, -2, -1) if tall else u

        def project(x, basis=basis):
            return x @ basis if tall else np.swapaxes(basis, -2, -1) @ x

        n = beta2 * n + (1 - beta2) * project(g) ** 2
        c1, c2 = (1 - beta1 ** (t + 1), 1 - beta2 ** (t + 1)) if correct_bias else (1, 1)
        ratio = project(m) / c1 / (np.sqrt(n / c2) + eps)
        step = ratio @ np.swapaxes(basis, -2, -1) if tall else basis @ ratio
        w = w * (1 - lr * weight_decay) - lr * scale * step
    return w


@pytest.mark.parametrize("values", [{}, {"update_proj_gap": 1, "scale": 1.0}, {"correct_bias": False}])
def test_conda(values):
    check_parity("conda", derive, shapes=MATRICES, **values)


def test_tables_take_part():
    model = language_model()
    optimizer = fhf.create_optimizer(model, "conda")
    train("conda", model, optimizer, batches(1))
    assert set(optimizer.state[model.model.embed_tokens.weight]) == {"step", "m", "n", "u"}


def test_the_basis_is_reproducible_without_full_rank():
    torch.manual_seed(0)
    x = torch.randn(3, 5, 2, dtype=torch.float64) @ torch.randn(3, 2, 9, dtype=torch.float64)
    x[2] = 0
    u = left_basis(x)
    torch.testing.assert_close(u.mT @ u, torch.eye(5).to(u).expand(3, 5, 5))
    torch.testing.assert_close(u[:, :, :2] @ u[:, :, :2].mT @ x, x)
    assert u[2].abs().equal(torch.eye(5).to(u))
    turn = torch.linalg.qr(torch.randn(9, 9, dtype=torch.float64))[0]
    torch.testing.assert_close(left_basis(x @ turn).abs(), u.abs())


def test_zero_gradients_move_nothing():
    w = nn.Parameter(torch.ones(4, 3))
    optimizer = fhf.optim.spec.load("conda:Conda")([{"params": [w], "kind": "matrix", "layout": "stack"}])
    w.grad = torch.zeros(4, 3)
    optimizer.step()
    assert w.eq(1).all()
