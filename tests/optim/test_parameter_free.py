"""LAMB and Prodigy against derivations from their papers."""

import numpy as np
import pytest
import torch
from torch import nn

import frankenstein_hf as fhf

from .toy import SHAPES, check_parity, optimizer_of, parity_of


@pytest.mark.parametrize("adapt_vectors", [False, True])
def test_lamb(adapt_vectors):
    def derive(w, gradients, *, lr, weight_decay, betas, eps, adapt_vectors):
        m = v = 0.0
        for t, g in enumerate(gradients, 1):
            m = betas[0] * m + (1 - betas[0]) * g
            v = betas[1] * v + (1 - betas[1]) * g**2
            r = (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps) + weight_decay * w
            ratio = np.linalg.norm(w) / np.linalg.norm(r) if w.ndim > 1 or adapt_vectors else 1.0
            w = w - lr * ratio * r
        return w

    check_parity("lamb", derive, adapt_vectors=adapt_vectors)


def test_lamb_moves_a_parameter_that_is_zero():
    w = nn.Linear(3, 3, bias=False)
    nn.init.zeros_(w.weight)
    optimizer = fhf.create_optimizer(w, "lamb", lr=0.5)
    w(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert torch.allclose(w.weight, torch.tensor(-0.5), atol=1e-5)


@parity_of("prodigy")
@pytest.mark.parametrize(
    "options",
    [
        {"d0": 0.1},
        {"d0": 1e-3, "use_bias_correction": True, "d_coef": 2.0},
        {"d0": 1e-2, "safeguard_warmup": True, "beta3": 0.9},
        {"d0": 1e-2, "growth_rate": 1.5},
    ],
)
def test_prodigy(options):
    """As one flat vector, since the estimate is shared; two groups differ in learning rate and decay."""
    beta1, beta2, eps, rng = 0.9, 0.999, 1e-8, np.random.default_rng(0)
    beta3 = options.get("beta3", beta2**0.5)
    groups = ({"lr": 1.0, "weight_decay": 0.1}, {"lr": 0.5, "weight_decay": 0.0})
    tensors = [[nn.Parameter(torch.from_numpy(rng.normal(size=s))) for s in SHAPES] for _ in groups]
    optimizer = optimizer_of("prodigy", [{"params": p, **g} for p, g in zip(tensors, groups)], **options)

    def flat(read):
        return np.concatenate([np.asarray(read(p)).ravel() for ps in tensors for p in ps])

    counts = [sum(p.numel() for p in ps) for ps in tensors]
    lr, wd = (np.repeat([g[key] for g in groups], counts) for key in ("lr", "weight_decay"))
    w = flat(lambda p: p.detach().numpy().copy())
    w0, m, v, s, r = w.copy(), 0.0, 0.0, 0.0, 0.0
    d = d_max = d0 = options["d0"]
    for t in range(1, 11):
        gradients = [[rng.normal(size=p.shape) + 1.0 for p in ps] for ps in tensors]
        for ps, gs in zip(tensors, gradients):
            for p, g in zip(ps, gs):
                p.grad = torch.from_numpy(g.copy())
        optimizer.step()
        g = np.concatenate([g.ravel() for gs in gradients for g in gs])
        scale = np.sqrt(1 - beta2**t) / (1 - beta1**t) if options.get("use_bias_correction") else 1.0
        step = d * lr * scale
        r = beta3 * r + (d / d0) * np.sum(step * g * (w0 - w))
        s = beta3 * s + (d / d0) * (d if options.get("safeguard_warmup") else step) * g
        m = beta1 * m + (1 - beta1) * d * g
        v = beta2 * v + (1 - beta2) * d**2 * g**2
        found = options.get("d_coef", 1.0) * r / np.abs(s).sum()
        d_max = max(d_max, found)
        if d == d0:
            d = max(d, found)
        d = min(d_max, d * options.get("growth_rate", np.inf))
        w = w - step * wd * w - step * m / (np.sqrt(v) + d * eps)
    assert d > d0
    np.testing.assert_allclose(flat(lambda p: p.detach().numpy()), w, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(float(optimizer.shared_state()["d"]), d, rtol=1e-6)
