"""Muon and Turbo-Muon against numpy and torch."""

import numpy as np
import pytest
import torch
from torch import nn

from frankenstein_hf.optim import matrix_method, muon
from frankenstein_hf.optim.newton_schulz import COEFFICIENTS

from .orthogonal import MATRICES, norm, ns, polynomial
from .toy import check_parity, optimizer_of


def derive_muon(w, gradients, *, lr, weight_decay, momentum, nesterov, adjust_lr, orthogonalise=ns, **_):
    m = np.zeros_like(w)
    rows, columns = w.shape[-2:]
    scale = {"original": np.sqrt(max(1, rows / columns)), "match_rms_adamw": 0.2 * np.sqrt(max(rows, columns))}
    for g in gradients:
        m = momentum * m + g
        w = w * (1 - lr * weight_decay)
        w = w - lr * scale.get(adjust_lr, 1) * orthogonalise(g + momentum * m if nesterov else m)
    return w


def turbo(x):
    wide = x if x.shape[-2] <= x.shape[-1] else np.swapaxes(x, -2, -1)
    gram = np.abs(wide @ np.swapaxes(wide, -2, -1)).sum(-1)
    y = polynomial(wide / np.sqrt(gram)[..., None], COEFFICIENTS["quintic"][1:])
    return y if wide is x else np.swapaxes(y, -2, -1)


@pytest.mark.parametrize("adjust_lr", matrix_method.ADJUST)
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon(nesterov, adjust_lr):
    check_parity("muon", derive_muon, shapes=MATRICES, nesterov=nesterov, adjust_lr=adjust_lr)


def test_muon_clips_steps_are_muons():
    """What it does after them is `qk_clip`'s, which has its own tests."""
    check_parity("muon_clip", derive_muon, shapes=MATRICES)


def test_muon_with_other_coefficients():
    triples = (*COEFFICIENTS["polar_express"][:5],)
    check_parity(
        "muon",
        lambda w, g, **values: derive_muon(w, g, orthogonalise=lambda x: ns(x, triples), **values),
        shapes=MATRICES,
        coefficients="polar_express",
    )


def test_turbo_muon():
    check_parity("turbo_muon", lambda w, g, **values: derive_muon(w, g, orthogonalise=turbo, **values), shapes=MATRICES)


def test_the_shortcuts_are_cubic():
    cubic = ((1.5, -0.5, 0.0),)

    def derive(triples):
        return lambda w, g, **values: derive_muon(w, g, orthogonalise=lambda x: ns(x, triples), **values)

    check_parity("muon", derive(cubic * 5), shapes=MATRICES, coefficients="cubic", momentum=0.0)
    turbos = derive(cubic + COEFFICIENTS["quintic"][1:])
    check_parity("turbo_muon", turbos, shapes=MATRICES, preconditioner="cubic")


def tensors(*shapes, dtype=torch.float64):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]


def run(optimizer, params, steps=5):
    torch.manual_seed(1)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape).to(p)
        optimizer.step()


def test_without_orthogonalisation_it_is_sgd_with_nesterov(monkeypatch):
    monkeypatch.setattr(muon, "newton_schulz", lambda x, *_, **__: x.clone())
    ours, theirs = tensors((4, 3), (3, 3)), tensors((4, 3), (3, 3))
    run(optimizer_of("muon", [{"params": ours}], lr=0.1, momentum=0.9, adjust_lr="none"), ours)
    # torch's buffer sums gradients, ours averages them
    run(torch.optim.SGD(theirs, lr=0.1 * (1 - 0.9), momentum=0.9, nesterov=True), theirs)
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
def test_muon_is_torchs(monkeypatch, adjust_lr):
    shapes = [(6, 4), (4, 9), (5, 5)]
    values = dict(lr=0.05, momentum=0.9, weight_decay=0.1)
    rounded, exact, ours = (tensors(*shapes) for _ in range(3))
    run(torch.optim.Muon(rounded, adjust_lr_fn=adjust_lr, **values), rounded)
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x)  # its Newton–Schulz in double precision
    run(torch.optim.Muon(exact, adjust_lr_fn=adjust_lr, **values), exact)
    run(optimizer_of("muon", [{"params": ours}], adjust_lr=adjust_lr, **values), ours)
    for p, q, r in zip(ours, exact, rounded):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(p, r, rtol=0.02, atol=0.02)


def test_convolutions_are_flattened_and_experts_are_not():
    torch.manual_seed(0)
    g = torch.randn(4, 3, 2, dtype=torch.float64)
    moved = {}
    for layout in ("flatten", "stack"):
        p = nn.Parameter(torch.zeros_like(g))
        optimizer = muon.Muon([{"params": [p], "kind": "matrix", "layout": layout}], lr=1.0, adjust_lr="none")
        p.grad = g.clone()
        optimizer.step()
        moved[layout] = -p.detach().numpy()
    np.testing.assert_allclose(moved["flatten"], ns(g.numpy().reshape(4, 6)).reshape(4, 3, 2), rtol=1e-9)
    np.testing.assert_allclose(moved["stack"], ns(g.numpy()), rtol=1e-9)
    assert norm(moved["flatten"]).size == 4
