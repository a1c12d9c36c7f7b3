"""Shampoo and SOAP against derivations from their papers, and where they become AdaGrad or Adam."""

import numpy as np
import pytest
import torch
from torch import nn

from frankenstein_hf.optim.second_order import inverse_root, with_ties_broken

from .test_first_order import adamw
from .toy import check_parity, optimizer_of


def each_matrix(one):
    """`one(w, gradients, **params)` for every matrix of a stack; vectors as they are."""

    def derive(w, gradients, **params):
        if w.ndim < 3:
            return one(w, gradients, **params)
        return np.stack([one(x, [g[s] for g in gradients], **params) for s, x in enumerate(w)])

    return derive


# ---------------------------------------------------------------------- Shampoo


def power(a, exponent, least):
    values, vectors = np.linalg.eigh(a)
    return vectors @ np.diag(np.maximum(values, least) ** exponent) @ vectors.T


@each_matrix
def shampoo(w, gradients, *, lr, weight_decay, eps, beta, momentum, precondition_frequency, max_precond_dim):
    sides = [s for s, size in enumerate(w.shape) if size <= max_precond_dim and w.ndim == 2]
    statistics, roots, h = [eps * np.eye(w.shape[s]) for s in sides], [None] * len(sides), eps
    weight, m = (1 if beta == 1 else 1 - beta), 0.0
    for t, g in enumerate(gradients, 1):
        u = g
        for i, s in enumerate(sides):
            statistics[i] = beta * statistics[i] + weight * (g.T @ g if s else g @ g.T)
            if t <= precondition_frequency or t % precondition_frequency == 0:
                roots[i] = power(statistics[i], -1 / (2 * len(sides)), eps)
            u = u @ roots[i] if s else roots[i] @ u
        if not sides:
            h = beta * h + weight * g**2
            u = g / np.sqrt(h)
        m = momentum * m + u
        w = w * (1 - lr * weight_decay) - lr * m
    return w


@pytest.mark.parametrize(
    "params", [{}, {"beta": 0.9, "momentum": 0.8, "eps": 1e-3}, {"max_precond_dim": 3}, {"precondition_frequency": 1}]
)
def test_shampoo(params):
    check_parity("shampoo", shampoo, **params)


def test_shampoo_with_no_axis_is_adagrad():
    def derive(w, gradients, *, lr, weight_decay, eps, **_):
        p = nn.Parameter(torch.from_numpy(w))
        reference = torch.optim.Adagrad([p], lr, eps=0.0, initial_accumulator_value=eps)
        for g in gradients:
            p.data *= 1 - lr * weight_decay
            p.grad = torch.from_numpy(g)
            reference.step()
        return p.detach().numpy()

    check_parity("shampoo", derive, max_precond_dim=0)


def test_shampoos_first_step_is_orthogonal():
    g = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    w = nn.Parameter(torch.zeros_like(g))
    optimizer = optimizer_of("shampoo", [w], lr=1.0, eps=1e-12)
    w.grad = g
    optimizer.step()
    u, _, vh = torch.linalg.svd(g, full_matrices=False)
    torch.testing.assert_close(-w.detach(), u @ vh, rtol=1e-4, atol=1e-4)


def test_inverse_roots():
    x = torch.randn(2, 5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    a = x @ x.mT
    for power_ in (2, 4):
        root = torch.linalg.matrix_power(inverse_root(a, power_, 0.0), power_)
        torch.testing.assert_close(root @ a, torch.eye(5, dtype=a.dtype).expand(2, 5, 5))
    assert inverse_root(torch.zeros(1, 3, 3), 4, 0.0).isfinite().all()


# ---------------------------------------------------------------------- SOAP


def falling(a):
    size = len(a)
    return a + 1e-6 * np.trace(a) / size * np.diag(np.arange(size, 0, -1) / size)


@each_matrix
def soap(w, gradients, *, lr, weight_decay, betas, eps, shampoo_beta, accumulate, precondition_frequency, refresh,
         max_precond_dim):  # fmt: skip
    beta = betas[1] if shampoo_beta is None else shampoo_beta
    left, right = (w.ndim == 2 and size <= max_precond_dim for size in (*w.shape, 0)[:2])
    rows, columns = w.shape if w.ndim == 2 else (1, len(w))
    w, gradients = w.reshape(rows, columns), [g.reshape(rows, columns) for g in gradients]
    l_, r_, q_l, q_r = np.zeros((rows, rows)), np.zeros((columns, columns)), np.eye(rows), np.eye(columns)
    m, v = np.zeros_like(w), np.zeros_like(w)
    keep, add = (1, 1) if accumulate else (beta, 1 - beta)
    for t, g in enumerate(gradients):
        if t > 0:
            m = betas[0] * m + (1 - betas[0]) * g
            v = betas[1] * v + (1 - betas[1]) * (q_l.T @ g @ q_r) ** 2
            n = (q_l.T @ m @ q_r) / (1 - betas[0] ** t) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
            w = w * (1 - lr * weight_decay) - lr * q_l @ n @ q_r.T
        l_, r_ = keep * l_ + add * g @ g.T, keep * r_ + add * g.T @ g
        if t % precondition_frequency:
            continue
        if t == 0 or refresh == "eigh":
            q_l = np.linalg.eigh(falling(l_))[1][:, ::-1] if left else q_l
            q_r = np.linalg.eigh(falling(r_))[1][:, ::-1] if right else q_r
            continue
        if left:
            order = np.argsort(-np.diag(q_l.T @ falling(l_) @ q_l))
            q_l, v = np.linalg.qr(falling(l_) @ q_l[:, order])[0], v[order]
        if right:
            order = np.argsort(-np.diag(q_r.T @ falling(r_) @ q_r))
            q_r, v = np.linalg.qr(falling(r_) @ q_r[:, order])[0], v[:, order]
    return w


def soap_of(w, gradients, **params):
    return soap(w, gradients, **params).reshape(w.shape)


@pytest.mark.parametrize(
    "params",
    [{}, {"refresh": "eigh"}, {"accumulate": True}, {"shampoo_beta": 0.5, "precondition_frequency": 1},
     {"max_precond_dim": 3}],
)  # fmt: skip
def test_soap(params):
    check_parity("soap", soap_of, **params)


def test_soap_in_the_identity_basis_is_adam():
    """One step late, as the first gradient only sets the basis."""
    check_parity("soap", lambda w, gradients, **params: adamw(w, gradients[1:], **params), max_precond_dim=0)
    # gradients with one entry in each row and column leave the axes as they are
    w = nn.Parameter(torch.zeros(3, 3, dtype=torch.float64))
    optimizer = optimizer_of("soap", [w], lr=0.1, refresh="eigh")
    gradients = [torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=w.dtype) * (1 + 0.1 * t)) for t in range(6)]
    for g in gradients:
        w.grad = g
        optimizer.step()
    values = dict(lr=0.1, weight_decay=0.0, betas=(0.95, 0.95), eps=1e-8)
    expected = adamw(np.zeros((3, 3)), [g.numpy() for g in gradients[1:]], **values)
    np.testing.assert_allclose(w.detach().numpy(), expected, rtol=1e-6)


def test_soap_follows_a_rotation_of_the_problem():
    """In exact arithmetic SOAP commutes with orthogonal changes of basis, which Adam does not."""
    generator = torch.Generator().manual_seed(0)
    u = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64, generator=generator)).Q
    gradients = torch.randn(8, 4, 5, dtype=torch.float64, generator=generator)
    ends = []
    for a in (torch.eye(4, dtype=u.dtype), u):
        w = nn.Parameter(torch.zeros(4, 5, dtype=torch.float64))
        optimizer = optimizer_of("soap", [w], lr=0.1, max_precond_dim=4)  # R would have no full rank at first
        for g in gradients:
            w.grad = a @ g
            optimizer.step()
        ends.append(a.T @ w.detach())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-3, atol=1e-4)


def test_breaking_ties_changes_nothing_else():
    a = torch.diag(torch.tensor([1.0, 4.0, 4.0, 0.0]))[None].double()
    broken = with_ties_broken(a)
    assert (broken - a).abs().max() < 3e-6 and len(torch.linalg.eigvalsh(broken)[0].unique()) == 4
    assert torch.equal(with_ties_broken(torch.zeros(1, 3, 3)), torch.zeros(1, 3, 3))
