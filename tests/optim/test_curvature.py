"""Sophia against a derivation from its paper, its two estimates, and that `Trainer` supplies them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import frankenstein_hf as fhf
from frankenstein_hf.optim.curvature import gauss_newton_bartlett, hutchinson
from frankenstein_hf.optim.exact_state import seeded_generator

from .toy import TWO_GROUPS, batches, check_parity, language_model, optimizer_of, trainer


def sophia(w, gradients, curvatures, *, lr, weight_decay, betas, eps, rho, **_):
    m = h = 0.0
    for g, h_hat in zip(gradients, curvatures):
        m = betas[0] * m + (1 - betas[0]) * g
        h = h if h_hat is None else betas[1] * h + (1 - betas[1]) * h_hat
        w = w - lr * weight_decay * w - lr * np.clip(m / np.maximum(rho * h, eps), -1, 1)
    return w


def test_without_curvature_sophia_takes_signs_of_momentum():
    check_parity("sophia", lambda w, gradients, **params: sophia(w, gradients, [None] * 10, **params))


def test_ten_steps_with_curvature_every_third():
    random = np.random.default_rng(0)
    start = [random.normal(size=(4, 3)), random.normal(size=5)]
    tensors = [nn.Parameter(torch.from_numpy(w.copy())) for w in start]
    gradients = [random.normal(size=(10, *w.shape)) for w in start]
    curvatures = [[random.normal(size=w.shape) + 2 if t % 3 == 0 else None for t in range(10)] for w in start]
    values = dict(betas=(0.9, 0.8), eps=1e-12, rho=0.5)
    optimizer = optimizer_of("sophia", [{"params": [p], **own} for p, own in zip(tensors, TWO_GROUPS)], **values)
    for t in range(10):
        for p, g in zip(tensors, gradients):
            p.grad = torch.from_numpy(g[t])
        if t % 3 == 0:
            optimizer.supply({p: torch.from_numpy(h[t]) for p, h in zip(tensors, curvatures)})
        optimizer.step()
    for w, p, g, h, own in zip(start, tensors, gradients, curvatures, TWO_GROUPS):
        expected = sophia(w, g, h, **values, **own)
        np.testing.assert_allclose(p.detach().numpy(), expected, rtol=1e-6)


class Softmax(nn.Module):
    """Logits x W, and a loss with labels."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))

    def forward(self, x, labels=None, attention_mask=None):
        logits = x @ self.weight
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
        return SimpleNamespace(logits=logits, loss=loss)


def exact_diagonal(model, inputs):
    def loss(weight):
        logits = inputs["x"] @ weight
        return nn.functional.cross_entropy(logits.flatten(0, -2), inputs["labels"].flatten())

    hessian = torch.autograd.functional.hessian(loss, model.weight.detach())
    return hessian.reshape(12, 12).diagonal().reshape(3, 4)


@pytest.mark.parametrize("estimate", [gauss_newton_bartlett, hutchinson])
def test_estimates_are_unbiased(estimate):
    """For a softmax of linear logits, Gauss–Newton is the Hessian itself; the labels do not enter."""
    model = Softmax()
    inputs = {"x": torch.randn(2, 5, 3, dtype=torch.float64), "labels": torch.randint(4, (2, 5))}
    draws = [estimate(model, inputs, [model.weight], seeded_generator(0, i))[0] for i in range(2000)]
    mean, error = torch.stack(draws).mean(0), torch.stack(draws).std(0) / 2000**0.5
    assert ((mean - exact_diagonal(model, inputs)).abs() < 5 * error + 1e-6).all()
    assert model.weight.grad is None


def test_padding_does_not_count():
    model = Softmax()
    x, labels = torch.randn(1, 6, 3, dtype=torch.float64), torch.randint(4, (1, 6))
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
    for inputs in ({"x": x, "labels": labels.masked_fill(mask == 0, -100)}, {"x": x, "attention_mask": mask}):
        found = gauss_newton_bartlett(model, inputs, [model.weight], seeded_generator(0))[0]
        assert found.isfinite().all() and found.any()
        x_other = x.clone()
        x_other[:, 4:] += 1.0
        other = gauss_newton_bartlett(model, {**inputs, "x": x_other}, [model.weight], seeded_generator(0))[0]
        torch.testing.assert_close(other, found)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_trainer_supplies_the_curvature_every_k_steps(tmp_path, accumulation):
    kwargs = dict(optimizer=fhf.trainer_optimizer("sophia", update_k=3), callbacks=fhf.trainer_callbacks("sophia"))
    model = language_model()
    run = trainer(tmp_path, model, gradient_accumulation_steps=accumulation, **kwargs)
    optimizer, steps = run.create_optimizer(), []
    original = optimizer.estimate
    optimizer.estimate = lambda *args: (steps.append(args[2]), original(*args))
    run.train()
    assert steps == [0, 3]
    assert all((state["h"] >= 0).all() and state["h"].any() for state in optimizer.state.values())
    assert not model._forward_pre_hooks


def test_hutchinson_on_a_hybrid_model():
    model = language_model()
    optimizer = optimizer_of("sophia", model, estimator="hutchinson", rho=0.01)
    x = batches(1)[0]
    for step in range(2):
        model(x, labels=x).loss.backward()
        optimizer.estimate(model, {"input_ids": x, "labels": x}, step)
        optimizer.step()
    assert all(state["h"].isfinite().all() and state["h"].any() for state in optimizer.state.values())
