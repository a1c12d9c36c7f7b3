"""TUON against numpy and Muon."""

import numpy as np
import pytest
import torch
from torch import nn

from frankenstein_hf.optim.tuon import FIXED

from .orthogonal import ns
from .toy import check_parity, optimizer_of

SHAPES = ((4, 3), (3, 2, 6), (1, 7), (5, 3, 2))


def derive(w, gradients, *, lr, weight_decay, momentum, transform, refresh_interval, stack, rms_eps, **_):
    shape = w.shape
    w = w.reshape(-1, *shape[-2:])
    m = np.zeros_like(w)
    size = len(w) if stack == "full" else 2
    starts = range(0, len(w), size)
    bases = {}
    for t, g in enumerate(gradients):
        m = momentum * m + (1 - momentum) * g.reshape(w.shape)
        w = w * (1 - lr * weight_decay)
        for start in starts:
            part = m[start : start + size]
            k = len(part)
            if transform != "decorq" and k > 1:
                bases[start] = FIXED[transform](k).numpy()
            elif t % refresh_interval == 0:
                flat = part.reshape(k, -1)
                bases[start] = np.linalg.eigh(flat @ flat.T)[1].T
            q = bases[start]
            mixed = np.einsum("jk,kab->jab", q, part)
            u, _, vh = np.linalg.svd(mixed, full_matrices=False)
            if np.iscomplexobj(mixed):
                # the polynomial of the singular values of a complex matrix
                s = np.linalg.svd(mixed, compute_uv=False)
                s = s / np.sqrt((s**2).sum(-1, keepdims=True))
                for _ in range(5):
                    s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
                p = (u * s[..., None, :]) @ vh
            else:
                p = ns(mixed)
            p = np.einsum("jk,jab->kab", q.conj(), p).real
            gamma = 1 / np.sqrt(max(shape[-2:])) / (np.sqrt((p**2).mean()) + rms_eps)
            w[start : start + size] -= lr * gamma * p
    return w.reshape(shape)


@pytest.mark.parametrize("stack", ["full", "pairs"])
@pytest.mark.parametrize("transform", ["decorq", "dct", "haar", "dft"])
def test_tuon(transform, stack):
    check_parity("tuon", derive, shapes=SHAPES, transform=transform, stack=stack)


@pytest.mark.parametrize("k", [1, 2, 3, 6, 8])
def test_fixed_transforms_are_unitary(k):
    for transform in FIXED.values():
        q = transform(k)
        torch.testing.assert_close(q @ q.mH, torch.eye(k).to(q))


def test_a_single_matrix_takes_muons_direction():
    torch.manual_seed(0)
    p = nn.Parameter(torch.zeros(4, 6))
    q = nn.Parameter(torch.zeros(4, 6))
    tuon = optimizer_of("tuon", [p], lr=0.1)
    muon = optimizer_of("muon", [q], lr=0.1, nesterov=False)
    for _ in range(3):
        before = p.detach().clone(), q.detach().clone()
        p.grad = torch.randn(4, 6)
        q.grad = p.grad.clone()
        tuon.step()
        muon.step()
        ours, theirs = p.detach() - before[0], q.detach() - before[1]
        torch.testing.assert_close(ours / ours.norm(), theirs / theirs.norm(), rtol=1e-4, atol=1e-5)


def test_decorrelated_slices_are_orthogonal_to_each_other():
    torch.manual_seed(0)
    params = [nn.Parameter(torch.zeros(4, 6, dtype=torch.float64)) for _ in range(3)]
    optimizer = optimizer_of("tuon", [{"params": params}])
    for p in params:
        p.grad = torch.randn(4, 6, dtype=torch.float64)
    optimizer.step()
    ((key, q),) = optimizer.shared_state().items()
    assert key == "q 0 4x6" and q.shape == (1, 3, 3)
    flat = q[0] @ torch.stack([p.grad.flatten() for p in params])
    gram = flat @ flat.mT
    torch.testing.assert_close(gram, torch.diag(gram.diagonal()))
