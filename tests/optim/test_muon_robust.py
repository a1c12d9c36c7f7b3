"""Dion3 and ROOT against numpy and Muon."""

import numpy as np
import pytest
import torch
from torch import nn

from frankenstein_hf.optim import muon_robust
from frankenstein_hf.optim.newton_schulz import schedule

from .orthogonal import MATRICES, MUON, norm, ns
from .toy import check_parity, optimizer_of


def derive_dion3(w, gradients, *, lr, weight_decay, momentum, fraction, normuon, beta2, eps, coefficients, **_):
    if w.ndim == 3:
        values = dict(lr=lr, weight_decay=weight_decay, momentum=momentum, fraction=fraction, normuon=normuon)
        values |= dict(beta2=beta2, eps=eps, coefficients=coefficients)
        return np.stack([derive_dion3(w[i], [g[i] for g in gradients], **values) for i in range(len(w))])
    if w.shape[0] > w.shape[1]:
        w, gradients, back = w.T, [g.T for g in gradients], True
    else:
        back = False
    m, v, k = np.zeros_like(w), np.zeros(len(w)), int(np.ceil(fraction * len(w)))
    for g in gradients:
        m = m + g
        rows = np.argsort(-np.abs(m).sum(1))[:k]
        o = ns(m[rows], schedule(coefficients, 5))
        if normuon:
            v[rows] = beta2 * v[rows] + (1 - beta2) * (o**2).mean(1)
            even = o / (np.sqrt(v[rows]) + eps)[:, None]
            o = even * norm(o) / norm(even)
        w = w * (1 - lr * weight_decay)
        w[rows] -= lr * o
        m[rows] *= momentum
    return w.T if back else w


def derive_root(w, gradients, *, lr, weight_decay, momentum, percentile, softthresh, triples=MUON * 5, **_):
    m = np.zeros_like(w)
    for g in gradients:
        m = momentum * m + g
        size = np.abs(m).reshape(*m.shape[:-2], -1)
        bound = np.quantile(size, percentile, axis=-1)[..., None, None]
        outliers = np.sign(m) * np.maximum(np.abs(m) - bound, 0) if softthresh else 0
        w = w * (1 - lr * weight_decay) - lr * ns(m - outliers, triples)
    return w


@pytest.mark.parametrize("normuon", [False, True])
@pytest.mark.parametrize("fraction", [0.25, 0.6, 1.0])
def test_dion3(fraction, normuon):
    check_parity("dion3", derive_dion3, shapes=MATRICES, fraction=fraction, normuon=normuon)


def test_dion3_with_all_rows_is_muon_without_nesterov():
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(s, dtype=torch.float64)) for s in ((4, 9), (9, 4), (2, 3, 3))]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    values = dict(lr=0.1, weight_decay=0.1, adjust_lr="none", coefficients="polar_express")
    dion = optimizer_of("dion3", [{"params": ours}], fraction=1.0, normuon=False, **values)
    muon = optimizer_of("muon", [{"params": theirs}], nesterov=False, **values)
    for _ in range(5):
        for p, q in zip(ours, theirs):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        dion.step()
        muon.step()
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-9)


def test_dion3_moves_the_largest_rows_and_all_in_turn():
    torch.manual_seed(0)
    w = nn.Parameter(torch.zeros(8, 12))
    optimizer = optimizer_of("dion3", [w], fraction=0.25, momentum=0.5, normuon=False)
    moved = torch.zeros(8)
    for t in range(12):
        before = w.detach().clone()
        w.grad = torch.randn(8, 12)
        if t == 0:
            w.grad[3:5] *= 10
        optimizer.step()
        rows = (w.detach() != before).any(1)
        assert rows.sum() == 2 and (t or rows.nonzero().flatten().tolist() == [3, 4])
        moved += rows
    assert (moved > 0).all()


@pytest.mark.parametrize("softthresh", [True, False])
@pytest.mark.parametrize("percentile", [0.9, 0.5, 1.0])
def test_root(percentile, softthresh):
    check_parity("root", derive_root, shapes=MATRICES, percentile=percentile, softthresh=softthresh)


def test_root_takes_the_coefficients_of_the_shape(monkeypatch):
    triple = (2.9, -3.8, 1.86)
    monkeypatch.setitem(muon_robust.BY_SHAPE, (5, 2), triple)

    def derive(w, gradients, **values):
        return derive_root(w, gradients, triples=(triple,) * 5, **values)

    check_parity("root", derive, shapes=((2, 5), (5, 2)))
    check_parity("root", derive_root, shapes=((2, 5), (5, 2)), ada_newton=False)


def test_quantiles_are_torchs():
    torch.manual_seed(0)
    x = torch.randn(3, 11)
    for p in (0.0, 0.33, 0.9, 1.0):
        torch.testing.assert_close(muon_robust.quantile(x, p), torch.quantile(x, p, dim=1))
