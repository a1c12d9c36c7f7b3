"""What every registered optimizer must honour."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import frankenstein_hf as fhf
from frankenstein_hf.configuration.component import describe_range
from frankenstein_hf.optim.spec import OPTIMIZERS

from .toy import (
    NAMES,
    WITH_GRADIENT,
    assert_equal_states,
    batches,
    language_model,
    optimizer_of,
    saved,
    small,
    step,
    train,
)

every = pytest.mark.parametrize("name", NAMES)
every_with_gradient = pytest.mark.parametrize("name", WITH_GRADIENT)


@every
def test_2n_steps_equal_n_saved_resumed_and_n_more(name):
    data = batches(12)
    whole = language_model()
    optimizer = optimizer_of(name, whole)
    train(name, whole, optimizer, data)

    half = language_model()
    first = optimizer_of(name, half)
    train(name, half, first, data[:6])
    state, weights = saved(first), copy.deepcopy(half.state_dict())
    resumed = language_model(seed=5)
    resumed.load_state_dict(weights)
    second = optimizer_of(name, resumed)
    second.load_state_dict(state)
    train(name, resumed, second, data[6:])
    assert_equal_states(second.state_dict(), optimizer.state_dict())
    for (key, p), q in zip(whole.named_parameters(), resumed.parameters()):
        assert torch.equal(p, q), key
    # what was loaded is a copy: the first optimizer's state has not moved
    assert_equal_states(saved(first), state)


@every_with_gradient
def test_parameters_without_gradient_stay_and_zero_gradients_do_no_harm(name):
    torch.manual_seed(0)
    a, b, c = (nn.Parameter(torch.randn(4, 3)) for _ in range(3))
    optimizer = optimizer_of(name, [{"params": [a, b, c]}], weight_decay=0.0)
    before = b.detach().clone()
    for i in range(6):
        # c starts late, so its step count differs
        step(name, optimizer, lambda i=i: (a * 0).sum() + ((c**2).sum() if i > 2 else 0))
    assert torch.equal(b, before)
    assert a.isfinite().all() and c.isfinite().all()
    assert b not in optimizer.state or not optimizer.state[b]


@every
def test_tied_parameters_are_updated_once(name):
    model = language_model()
    optimizer = optimizer_of(name, model)
    owned = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert len(owned) == len(set(owned)) == len(list(model.parameters()))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    train(name, model, optimizer, batches(2))
    assert model.lm_head.weight is model.model.embed_tokens.weight


@every
@pytest.mark.parametrize("shape", [(3, 4, 5), (4, 2, 2, 3), (6, 1), (1,), ()])
def test_any_shape_and_a_single_parameter(name, shape):
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(shape))
    target = torch.randn(shape)
    optimizer = optimizer_of(name, [w])
    before = w.detach().clone()
    for _ in range(5):
        step(name, optimizer, lambda: (w - target).square().sum())
    assert w.isfinite().all() and not torch.equal(w, before)


@every
def test_an_empty_group_is_no_trouble(name):
    w = nn.Parameter(torch.ones(3, 3))
    optimizer = optimizer_of(name, [{"params": []}, {"params": [w]}])
    step(name, optimizer, lambda: w.square().sum())
    optimizer.load_state_dict(saved(optimizer))
    step(name, optimizer, lambda: w.square().sum())
    assert w.isfinite().all()


@every
def test_a_closure_is_called_with_gradients_enabled_and_its_loss_returned(name):
    w = nn.Parameter(torch.ones(2, 2))
    optimizer = optimizer_of(name, [w])
    enabled = []

    def closure():
        enabled.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = w.square().sum()
        if torch.is_grad_enabled():
            loss.backward()
        return loss.detach()

    assert float(optimizer.step(closure)) == pytest.approx(4.0, rel=0.5)
    assert any(enabled) or not OPTIMIZERS.get(name).gradient


@every
def test_hyperparameters_out_of_range_raise_with_the_range(name):
    spec, model = OPTIMIZERS.get(name), language_model()
    for field in dataclasses.fields(spec.params):
        low, high, below, choices = (field.metadata.get(key) for key in ("minimum", "maximum", "below", "choices"))
        wrong = []
        if low is not None:
            wrong.append(low - 1)
        wrong += [limit for limit in (below, (high or 0) + 1 if high not in (None, float("inf")) else None) if limit]
        if choices:
            wrong.append("nonsense")
        for value in wrong:
            if isinstance(field.default, tuple):
                value = (value,) * len(field.default)
            elif isinstance(field.default, int):
                value = int(value)
            with pytest.raises(ValueError) as caught:
                fhf.create_optimizer(model, name, **{field.name: value})
            message = str(caught.value)
            assert field.name in message and name in message
            expected = "Allowed" if choices else describe_range(field)
            assert expected in message or describe_range(field) in message
    with pytest.raises(ValueError, match="has no parameter 'learning_rate'"):
        fhf.create_optimizer(model, name, learning_rate=1.0)
    with pytest.raises(ValueError, match="lr"):
        fhf.create_optimizer(model, name, groups={"norms": {"lr": -1.0}})
    with pytest.raises(ValueError, match="did you mean 'norms'"):
        fhf.create_optimizer(model, name, groups={"norm": {"lr": 1.0}})


def test_an_unknown_name_raises_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'adamw'"):
        fhf.create_optimizer(language_model(), "adamww")


@every_with_gradient
def test_the_default_learning_rate_lowers_the_loss_of_a_hybrid_model(name):
    model = language_model()
    optimizer = fhf.create_optimizer(model, name)
    losses: list[float] = []
    for part in range(10):  # stops early when the loss is well below
        losses += train(name, model, optimizer, batches(20, seed=part))
        end = sum(losses[-10:]) / 10
        if end < 0.8 * losses[0]:
            break
    assert end < 0.9 * losses[0], f"{losses[0]:.3f} -> {end:.3f}"


@every
def test_state_bytes_are_those_of_the_spec(name):
    spec = OPTIMIZERS.get(name)
    for values in (small(name), {}):
        model = language_model()
        optimizer = fhf.create_optimizer(model, name, **values)
        train(name, model, optimizer, batches(2))
        params = spec.params(**values)
        known = {id(i.parameter): i.kind for i in fhf.optim.grouping.classify(model)}
        shapes = [(tuple(p.shape), known[id(p)]) for g in optimizer.param_groups for p in g["params"]]
        expected = sum(spec.state_bytes(params, *shape) for shape in shapes)
        assert optimizer.state_bytes() == expected + spec.shared_state_bytes(params, shapes)


@every
def test_learning_rate_schedulers_reach_every_group(name):
    model = language_model()
    optimizer = optimizer_of(name, model)
    base = [group["lr"] for group in optimizer.param_groups]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5**t)
    train(name, model, optimizer, batches(1))
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [lr / 2 for lr in base]


@every
def test_spec_is_complete(name):
    spec = fhf.optimizer_spec(name)
    assert spec.summary and spec.reference and spec.family and spec.implementation
    assert name in fhf.list_optimizers(spec.family)
    for field in dataclasses.fields(spec.params):
        assert field.metadata["doc"]
    assert (spec.needs == "callback") == bool(spec.callback)
