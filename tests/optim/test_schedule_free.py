"""Schedule-free AdamW: the recursion, and which weights are saved."""

import numpy as np
import pytest
import torch
from torch import nn

import frankenstein_hf as fhf

from .toy import assert_equal_states, batches, check_parity, language_model, optimizer_of, saved, train, trainer

NAME = "schedulefree_adamw"


def streams(w, gradients, *, lr, weight_decay, betas, eps, warmup_steps, r, weight_lr_power):
    """The paper's three sequences: y and x after the steps."""
    y, z, x, v, total, lr_max = w, w, w, 0.0, 0.0, 0.0
    for t, g in enumerate(gradients, 1):
        gamma = lr * min(1.0, t / warmup_steps) if warmup_steps else lr
        lr_max = max(lr_max, gamma)
        v = betas[1] * v + (1 - betas[1]) * g**2
        z = z - gamma * (g / (np.sqrt(v / (1 - betas[1] ** t)) + eps) + weight_decay * y)
        weight = t**r * lr_max**weight_lr_power
        total += weight
        x = x + weight / total * (z - x)
        y = (1 - betas[0]) * z + betas[0] * x
    return y, x


def test_schedule_free_adamw():
    check_parity("schedulefree_adamw", lambda w, g, **values: streams(w, g, **values)[0])
    check_parity(
        "schedulefree_adamw", lambda w, gradients, **values: streams(w, gradients, **values)[0], warmup_steps=0, r=0.0
    )


def test_eval_weights_are_the_weighted_mean_of_z():
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(6, dtype=torch.float64))
    optimizer = optimizer_of(NAME, [w], lr=0.1, warmup_steps=3, r=2.0)
    points, weights = [], []
    for t in range(1, 9):
        w.grad = torch.randn(6, dtype=torch.float64)
        optimizer.step()
        points.append(optimizer.state[w]["z"].clone())
        weights.append(t**2 * (0.1 * min(1.0, t / 3)) ** 2)
    y = w.detach().clone()
    optimizer.eval()
    mean = sum(z * c for z, c in zip(points, weights)) / sum(weights)
    torch.testing.assert_close(w.detach(), mean, rtol=1e-9, atol=1e-9)
    with pytest.raises(RuntimeError, match=r"optimizer\.train\(\)"):
        optimizer.step()
    optimizer.eval()
    optimizer.train()
    assert torch.equal(w, y) and "y" not in optimizer.state[w]


def test_resuming_from_averaged_weights_is_exact():
    data = batches(6)
    whole, half = language_model(), language_model()
    optimizer, first = optimizer_of(NAME, whole), optimizer_of(NAME, half)
    train(NAME, whole, optimizer, data)
    train(NAME, half, first, data[:3])
    first.eval()
    state = saved(first)
    resumed = language_model(seed=3)
    resumed.load_state_dict(half.state_dict())
    second = optimizer_of(NAME, resumed)
    second.load_state_dict(state)
    train(NAME, resumed, second, data[3:])
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), resumed.parameters()))
    assert_equal_states(second.state_dict(), optimizer.state_dict())


def test_trainer_saves_the_averaged_weights(tmp_path):
    def run(folder, **changes):
        values = dict(optimizer=fhf.trainer_optimizer(NAME, lr=0.05), callbacks=fhf.trainer_callbacks(NAME))
        result = trainer(folder, language_model(), **values, **changes)
        result.train()
        return result

    def weights(folder):
        return fhf.FrankensteinForCausalLM.from_pretrained(folder).state_dict()

    first = run(tmp_path / "a", save_steps=3, max_steps=4)
    # the last step left the model with x
    optimizer = first.optimizer.optimizer
    assert not optimizer.param_groups[0]["train_mode"]
    x = {key: p.detach().clone() for key, p in first.model.named_parameters()}
    optimizer.train()
    assert any(not torch.equal(p, x[key]) for key, p in first.model.named_parameters())
    # a checkpoint in the middle has the x of its own step: what a run of that length ends with
    short = run(tmp_path / "b", max_steps=3, save_steps=3)
    middle, end = weights(tmp_path / "a" / "checkpoint-3"), weights(tmp_path / "b" / "checkpoint-3")
    for key, p in short.model.named_parameters():
        assert torch.equal(middle[key], end[key]) and torch.equal(middle[key], p)
