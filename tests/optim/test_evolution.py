"""EA4LLM against a derivation from its paper, and in `Trainer`."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import frankenstein_hf as fhf
from frankenstein_hf.optim._supply import SupplyClosure
from frankenstein_hf.optim.exact_state import seeded_generator
from frankenstein_hf.optim.spec import OPTIMIZERS

from .toy import TWO_GROUPS, batches, language_model, optimizer_of, parity_of, train, trainer


def derive(w, losses, lrs, decays, *, population, sigma, shaping, antithetic, nes, seed):
    """Steps of EA4LLM on a list of arrays, one a loss function."""
    for t, loss in enumerate(losses, 1):
        noises, rewards = [], []
        for j in range(population):
            member, sign = (j // 2, (-1) ** j) if antithetic else (j, 1)
            noises.append(
                [
                    sign
                    * torch.randn(x.shape, generator=seeded_generator(seed, t, member, i), dtype=torch.float64).numpy()
                    for i, x in enumerate(w)
                ]
            )
            rewards.append(-loss([x + sigma * e for x, e in zip(w, noises[-1])]))
        if shaping == "rank":
            weights = np.array([sum(other < r for other in rewards) for r in rewards]) - (population - 1) / 2
        else:
            weights = (np.array(rewards) - np.mean(rewards)) / np.std(rewards)
        for i, (lr, decay) in enumerate(zip(lrs, decays)):
            direction = sum(weights[j] * noises[j][i] for j in range(population)) / population
            w[i] = w[i] * (1 - lr * decay) + lr * direction / (sigma if nes else 1)
    return w


@parity_of("ea4llm")
@pytest.mark.parametrize(
    "params",
    [{}, {"shaping": "rank", "population": 7, "seed": 3}, {"antithetic": True, "nes": True, "population": 6}],
)
def test_ten_steps(params):
    values = dict(population=4, sigma=0.1, shaping="zscore", antithetic=False, nes=False, seed=0) | params
    random = np.random.default_rng(0)
    start = [random.normal(size=(4, 3)), random.normal(size=5)]
    targets = random.normal(size=(10, 17))
    tensors = [nn.Parameter(torch.from_numpy(w.copy())) for w in start]
    optimizer = optimizer_of("ea4llm", [{"params": [p], **own} for p, own in zip(tensors, TWO_GROUPS)], **values)
    for target in torch.from_numpy(targets):
        optimizer.step(lambda x=target: (torch.cat([p.flatten() for p in tensors]) - x).square().sum())
    losses = [lambda w, x=x: np.sum((np.concatenate([y.ravel() for y in w]) - x) ** 2) for x in targets]
    lrs, decays = ([own[key] for own in TWO_GROUPS] for key in ("lr", "weight_decay"))
    for p, expected in zip(tensors, derive([w.copy() for w in start], losses, lrs, decays, **values)):
        np.testing.assert_allclose(p.detach().numpy(), expected, rtol=1e-6)
    assert optimizer.state_bytes() == 0


@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize("shaping", ["zscore", "rank"])
def test_the_direction_is_that_of_the_gradient(antithetic, shaping):
    c = torch.tensor([3.0, -1.0, 0.5, 2.0])
    w = nn.Parameter(torch.zeros(4))
    optimizer = optimizer_of("ea4llm", [w], population=1000, lr=1.0, antithetic=antithetic, shaping=shaping)
    optimizer.step(lambda: (c * w).sum())
    assert nn.functional.cosine_similarity(-w.detach(), c, dim=0) > 0.99


def test_weights_are_restored_when_the_closure_fails_and_equal_rewards_move_nothing():
    w = nn.Parameter(torch.randn(5))
    before, optimizer = w.detach().clone(), optimizer_of("ea4llm", [w])
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert torch.equal(w, before)
    assert optimizer.step(lambda: torch.tensor(2.0)) == 2.0 and torch.equal(w, before)
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step()


def test_trainer_needs_the_callback_and_no_accumulation(tmp_path):
    kwargs = dict(optimizer=fhf.trainer_optimizer("ea4llm", population=2))
    with pytest.raises(RuntimeError, match="trainer_callbacks"):
        trainer(tmp_path, language_model(), **kwargs).train()
    kwargs["callbacks"] = fhf.trainer_callbacks("ea4llm")
    with pytest.raises(ValueError, match="gradient_accumulation_steps=1"):
        trainer(tmp_path, language_model(), gradient_accumulation_steps=2, **kwargs).train()


def test_the_closure_of_one_process_undoes_the_division_by_the_tokens_of_all():
    """`Trainer` divides by the tokens of all processes, and losses and gradients are then averaged over them."""
    callback, model, x = SupplyClosure(), language_model(), batches(1)[0]
    optimizer = optimizer_of("eve", model)
    args = SimpleNamespace(gradient_accumulation_steps=1, fp16=False, average_tokens_across_devices=True, world_size=2)
    callback.on_train_begin(args, None, None, model=model)
    model(input_ids=x, labels=x, num_items_in_batch=torch.tensor(2 * x[:, 1:].numel()))
    callback.on_pre_optimizer_step(args, None, None, model=model, optimizer=optimizer)
    loss = model(input_ids=x, labels=x).loss
    torch.testing.assert_close(optimizer.closure(), loss.detach())
    gradient = model.lm_head.weight.grad.clone()
    model.zero_grad()
    loss.backward()
    torch.testing.assert_close(gradient, model.lm_head.weight.grad)
    callback.on_train_end(args, None, None)
    with pytest.raises(ValueError, match="use bf16"):
        callback.on_train_begin(SimpleNamespace(gradient_accumulation_steps=1, fp16=True), None, None, model=model)


@pytest.mark.parametrize("name", [spec.name for spec in OPTIMIZERS if spec.closure])
def test_parameters_frozen_after_the_optimizer_was_built_stay(name):
    model = language_model()
    optimizer = optimizer_of(name, model)
    train(name, model, optimizer, batches(2))
    frozen = model.model.embed_tokens.weight.requires_grad_(False)
    before = [p.detach().clone() for p in model.parameters()]
    train(name, model, optimizer, batches(6, seed=2))
    assert torch.equal(frozen, before[0])
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), before))
