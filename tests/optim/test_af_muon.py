"""AF-Muon against numpy."""

import numpy as np
import torch
from torch import nn

from frankenstein_hf.optim.af_muon import AFMuon, capped_rows

from .orthogonal import ns
from .toy import check_parity


def derive(w, gradients, *, lr, weight_decay, momentum, vector_lr_ratio, eps, **_):
    m = np.zeros_like(w)
    for g in gradients:
        w = w * (1 - lr * weight_decay)
        if w.ndim == 1:
            m = momentum * m + g
            w = w - lr * vector_lr_ratio * m / max(np.sqrt((m**2).mean()), eps)
        else:
            m = momentum * m + (1 - momentum) * g
            z = (1 - momentum) * g + momentum * m
            w = w - lr * np.sqrt(max(1, w.shape[-2] / w.shape[-1])) * ns(z)
    return w


def oracle(b, c):
    """By bisection, as in the paper."""
    target = min(b.size, c * c * np.count_nonzero(b))
    low, high = 0.0, 1e12
    for _ in range(200):
        tau = (low + high) / 2
        u = np.sign(b) * np.minimum(c, tau * np.abs(b))
        low, high = (tau, high) if (u**2).sum() < target else (low, tau)
    return u


def test_matrices_and_vectors():
    check_parity("af_muon", derive)


def rows():
    random = np.random.default_rng(0)
    b = random.normal(size=(40, 16)) * np.exp(random.normal(size=(40, 16)))
    b[:10, 1:] *= 0.01
    b[10:20, 3:] = 0
    b[20, :] = 0
    b[21, :] = 1
    return b


def test_capped_rows_solve_the_oracle():
    b = rows()
    for c in (1.0, 1.5, 3.0, 4.0, 10.0):
        expected = np.stack([oracle(row, c) for row in b])
        np.testing.assert_allclose(capped_rows(torch.from_numpy(b), c).numpy(), expected, rtol=1e-7, atol=1e-12)
        single = capped_rows(torch.from_numpy(b * 1e-25).float(), c).numpy()
        np.testing.assert_allclose(single, expected, rtol=1e-4, atol=1e-5)


def test_the_cap_lies_between_signs_and_equal_rows():
    b = torch.from_numpy(rows())
    assert torch.equal(capped_rows(b, 1.0), b.sign())
    full = b[21:]
    size = full.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(capped_rows(full, 4.0), full / size)


def test_tables():
    random = np.random.default_rng(1)
    w, gradients = random.normal(size=(6, 4)), random.normal(size=(10, 6, 4))
    gradients[:, 2] = 0
    p = nn.Parameter(torch.from_numpy(w.copy()))
    optimizer = AFMuon([{"params": [p], "kind": "table", "layout": "stack"}], lr=0.1, cap=1.5)
    b = np.zeros_like(w)
    for g in gradients:
        p.grad = torch.from_numpy(g.copy())
        optimizer.step()
        b = 0.95 * b + g
        w = w - 0.1 * 60 * 0.5 / 4 * np.stack([oracle(row, 1.5) for row in b])
    np.testing.assert_allclose(p.detach().numpy(), w, rtol=1e-6)
