"""The largest stable learning rate: closed forms, differences of losses, and that a probe leaves no trace."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable

import frankenstein_hf as fhf
from frankenstein_hf.configuration.registries import MIXERS
from frankenstein_hf.diagnostics import StableLearningRate, StableStep, max_stable_lr
from frankenstein_hf.diagnostics.curvature import rehearsed, stable_step
from frankenstein_hf.diagnostics.snapshot import unchanged

from ..optim.toy import NAMES, Rows, assert_equal_states, batches, language_model, optimizer_of, step, trainer
from ..tiny import MODES, tiny_model, tokens


class Quadratic(nn.Module):
    """½ θᵀ A θ − bᵀ θ; the batch is a factor."""

    def __init__(self, A: torch.Tensor, b: torch.Tensor, start: torch.Tensor) -> None:
        super().__init__()
        self.A, self.b, self.theta = A, b, nn.Parameter(start.clone())

    def loss(self, factor: float) -> torch.Tensor:
        return factor * (0.5 * self.theta @ self.A @ self.theta - self.b @ self.theta)


def quadratic(size=7):
    generator = torch.Generator().manual_seed(2)
    root, b, start = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((size, size), (size,), (size,))
    )
    return Quadratic(root @ root.T + torch.eye(size), b, start)


def loss(model, batch):
    return model.loss(batch)


@pytest.mark.parametrize("method", ["exact", "difference"])
def test_gradient_descent_on_a_quadratic_has_the_closed_form(method):
    model = quadratic()
    g = (model.A @ model.theta - model.b).detach()
    found = max_stable_lr(model, torch.optim.SGD(model.parameters(), lr=0.01), 1.0, loss=loss, method=method)
    assert math.isclose(found.max_lr, 2 * (g @ g / (g @ model.A @ g)).item(), rel_tol=1e-6)
    assert found.max_lr >= 2 / torch.linalg.eigvalsh(model.A).max() - 1e-9
    # at that rate the loss is what it was
    with torch.no_grad():
        before = model.loss(1.0)
        model.theta -= found.max_lr * g
        assert abs(model.loss(1.0) - before) < 1e-6 * abs(before)


@pytest.mark.parametrize("method", ["exact", "difference"])
def test_adamw_on_a_quadratic_has_the_closed_form_decay_and_clipping_included(method):
    model = quadratic()
    lr, decay, (b1, b2), eps, clip = 0.03, 0.4, (0.9, 0.98), 1e-8, 0.7
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay, betas=(b1, b2), eps=eps)
    theta, A, b = (x.detach().numpy().copy() for x in (model.theta, model.A, model.b))
    m, v = np.zeros(7), np.zeros(7)
    for t in range(1, 5):
        g = A @ theta - b
        clipped = g * min(1, clip / (np.linalg.norm(g) + 1e-6))
        m, v = b1 * m + (1 - b1) * clipped, b2 * v + (1 - b2) * clipped**2
        u = -(m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps) + decay * theta)
        found = max_stable_lr(model, optimizer, 1.0, loss=loss, max_grad_norm=clip, method=method)
        assert math.isclose(found.max_lr, -2 * (g @ u) / (u @ A @ u), rel_tol=1e-6)
        assert math.isclose(found.slope, g @ u, rel_tol=1e-6) and found.lr == lr
        theta = theta + lr * u
        optimizer.zero_grad()
        model.loss(1.0).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        np.testing.assert_allclose(model.theta.detach().numpy(), theta, rtol=1e-9)


def test_what_rises_or_never_curves_upwards_follows_the_conventions():
    hill = Quadratic(-torch.eye(3), torch.zeros(3), torch.ones(3))
    down = max_stable_lr(hill, torch.optim.SGD(hill.parameters(), lr=0.1), 1.0, loss=loss)
    assert down.descends and down.max_lr == math.inf and down.is_stable and down.curvature < 0
    up = max_stable_lr(hill, torch.optim.SGD(hill.parameters(), lr=0.1, maximize=True), 1.0, loss=loss)
    assert not up.descends and up.max_lr == 0 and not up.is_stable
    line = Quadratic(torch.zeros(3, 3), torch.ones(3), torch.ones(3))
    straight = max_stable_lr(line, torch.optim.SGD(line.parameters(), lr=0.1), 1.0, loss=loss)
    assert straight.max_lr == math.inf
    assert not StableStep(0.1, math.nan, -1.0, math.nan).is_stable


@pytest.mark.parametrize("name", ["adamw", "muon", "lion"])
def test_a_small_model_agrees_with_differences_of_its_loss(name):
    """The loss itself along what a real step changes, at three points; nothing here differentiates."""

    def own(model, x):  # fp64 throughout
        return nn.functional.cross_entropy(model(x).logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())

    model, (x, *others) = language_model().double().eval(), batches(4)
    optimizer = optimizer_of(name, model, lr=1e-2, weight_decay=0.1)
    for y in others:
        step(name, optimizer, lambda y=y: own(model, y))
    found = max_stable_lr(model, optimizer, x, loss=own, method="exact")
    twin = copy.deepcopy(model)
    other = optimizer_of(name, twin, lr=1e-2, weight_decay=0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(name, other, lambda: own(twin, x))
    moves = [(q - p).detach() / 1e-2 for p, q in zip(model.parameters(), twin.parameters())]
    values, e = [], 1e-4
    for a in (-e, 0.0, e):
        shifted = copy.deepcopy(model)
        with torch.no_grad():
            for p, move in zip(shifted.parameters(), moves):
                p.add_(move, alpha=a)
            values.append(own(shifted, x).item())
    slope, curvature = (values[2] - values[0]) / (2 * e), (values[2] - 2 * values[1] + values[0]) / e**2
    assert math.isclose(found.slope, slope, rel_tol=1e-4)
    assert math.isclose(found.curvature, curvature, rel_tol=1e-3)
    expected = -2 * slope / curvature if curvature > 0 else math.inf
    assert math.isclose(found.max_lr, expected, rel_tol=1e-3)
    by_difference = max_stable_lr(model, optimizer, x, loss=own, method="difference")
    assert math.isclose(by_difference.curvature, curvature, rel_tol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_a_probe_of_any_optimizer_leaves_no_trace(name):
    runs = []
    for probed in (False, True):
        model = language_model(hidden_dropout=0.1).train()
        optimizer = optimizer_of(name, model)
        torch.manual_seed(7)
        for x in batches(2):
            if probed:
                found = max_stable_lr(model, optimizer, {"input_ids": x, "labels": x}, max_grad_norm=1.0)
                assert found.max_lr >= 0 and math.isfinite(found.slope)
                assert model.training and all(module.training for module in model.modules())
            step(name, optimizer, lambda x=x, model=model: model(x, labels=x).loss)
        runs.append((model.state_dict(), optimizer.state_dict()))
    assert_equal_states(runs[1][0], runs[0][0])
    assert_equal_states(runs[1][1], runs[0][1])


def hessian_both_ways(name, is_causal):
    values = dict(MIXERS.get(name).small_params)
    if name.startswith("falcon"):  # the other λ is a statistic that takes no gradient
        values["lambda_mode"] = "static"
    model, x = tiny_model([name], is_causal, mixer_params={name: values}).double(), tokens(2, 13)

    def own(model, x):
        return nn.functional.cross_entropy(model(x).logits.flatten(0, 1), x.roll(1, 1).flatten())

    def slope_of():
        found = torch.autograd.grad(own(model, x), params, allow_unused=True)
        return sum((g * d).sum() for g, d in zip(found, update.values()) if g is not None).item()

    torch.manual_seed(3)
    params = list(model.parameters())
    gradient = torch.autograd.grad(own(model, x), params, allow_unused=True)
    update = {p: 0.1 * torch.randn_like(p) - (0 if g is None else g) for p, g in zip(params, gradient)}
    exact = stable_step(model, update, 0.1, x, loss=own, method="exact")
    assert model.config._attn_implementation == "sdpa"
    slopes, e = [], 1e-6 / torch.cat([u.flatten() for u in update.values()]).norm().item()
    for a in (e, -2 * e):  # small enough for models whose slope bends as sharply as these'
        with torch.no_grad():
            for p, u in update.items():
                p.add_(u, alpha=a)
        slopes.append(slope_of())
    return exact.curvature, (slopes[0] - slopes[1]) / (2 * e)


@pytest.mark.parametrize("name", ["standard", "gated_deltanet", "self_consensus", "mamba"])
def test_two_backward_passes_agree_with_the_difference_of_gradients_of_the_fast_form(name):
    exact, difference = hessian_both_ways(name, True)
    assert math.isclose(exact, difference, rel_tol=1e-4)


# fpa has a surrogate gradient; an eigenvector in falcon3 and falcon3a is held fixed, which the first derivative allows
APART = ("fpa", "falcon3", "falcon3a")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "is_causal"), [mode for mode in MODES if mode[0] not in APART])
def test_every_mixer_has_a_second_derivative_that_is_right(name, is_causal):
    exact, difference = hessian_both_ways(name, is_causal)
    assert math.isclose(exact, difference, rel_tol=1e-4)


class OnceOnly(torch.autograd.Function):
    """x³, differentiated by hand, once."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad * 3 * ctx.saved_tensors[0] ** 2


def test_forms_without_a_second_derivative_are_never_walked_past():
    class Cubic(nn.Module):
        def __init__(self):
            super().__init__()
            self.theta = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))

        def loss(self, batch):
            return OnceOnly.apply(self.theta).square().sum()

    model = Cubic()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        max_stable_lr(model, optimizer, None, loss=loss, method="exact")
    g, H = 6 * model.theta.detach() ** 5, 30 * model.theta.detach() ** 4
    found = max_stable_lr(model, optimizer, None, loss=loss)
    assert math.isclose(found.max_lr, (2 * (g * g).sum() / (g * H * g).sum()).item(), rel_tol=1e-4)


def test_the_model_may_end_with_the_gradients_it_had_and_bad_input_is_refused():
    model, x = language_model(), batches(1)[0]
    batch = {"input_ids": x, "labels": x}
    model(**batch).loss.backward()
    before = {key: (p.grad, p.grad.clone()) for key, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    max_stable_lr(model, optimizer, batch)
    assert all(p.grad is before[key][0] and torch.equal(*before[key]) for key, p in model.named_parameters())
    assert not optimizer.state
    with pytest.raises(ValueError, match="put labels into the batch"):
        max_stable_lr(model, optimizer, {"input_ids": x})
    with pytest.raises(ValueError, match="method must be one of"):
        max_stable_lr(model, optimizer, batch, method="guess")
    with pytest.raises(ValueError, match="learning rate of 0"):
        max_stable_lr(model, torch.optim.SGD(model.parameters(), lr=0.0), batch)
    half = language_model().to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"bfloat16 weights .* under autocast"):
        max_stable_lr(half, torch.optim.SGD(half.parameters(), lr=1e-3), batch)


def test_what_happens_inside_is_taken_back_even_after_an_error():
    model = language_model()
    optimizer = torch.optim.Adam(model.parameters())
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with pytest.raises(KeyError), unchanged(model, optimizer):
        model(**(dict(input_ids=batches(1)[0], labels=batches(1)[0]))).loss.backward()
        rehearsed(optimizer)
        torch.rand(3)
        raise KeyError
    assert_equal_states(model.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), state) and not optimizer.state
    assert all(p.grad is None for p in model.parameters())


# ---------------------------------------------------------------------- in the Trainer


@pytest.mark.parametrize("name", ["adamw", "schedulefree_adamw", "sophia", "eve"])
def test_the_trainer_logs_probes_and_trains_as_it_would_have(name, tmp_path):
    runs, probe = [], StableLearningRate(every=2)
    for callbacks in ([], [probe]):
        kwargs = dict(optimizer=fhf.trainer_optimizer(name), callbacks=[*fhf.trainer_callbacks(name), *callbacks])
        run = trainer(tmp_path / str(len(runs)), language_model(hidden_dropout=0.1), save_strategy="no", **kwargs)
        run.train()
        runs.append(run)
    assert_equal_states(runs[1].model.state_dict(), runs[0].model.state_dict())
    assert [number for number, _ in probe.probes] == [0, 2]
    logged = [entry for entry in runs[1].state.log_history if "stable_share" in entry]
    assert len(logged) == 2
    assert logged[0]["stable_share"] == float(probe.probes[0][1].is_stable)
    assert set(probe.summary()) == {"max_stable_lr", "stable_share", "ascent_share"}
    for wrong in ({"every": 0}, {"method": "guess"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            StableLearningRate(**wrong)


def test_probes_of_the_trainer_are_those_of_the_function(tmp_path):
    """First step: no state yet, one batch of all rows, clipped."""
    probe, (x,) = StableLearningRate(every=100), batches(1)
    kwargs = dict(optimizer=fhf.trainer_optimizer("adamw", lr=1e-2), max_grad_norm=0.1, callbacks=[probe])
    model = language_model()
    expected = max_stable_lr(
        model,
        fhf.create_optimizer(model, "adamw", lr=1e-2),
        {"input_ids": x, "labels": x},
        max_grad_norm=0.1,
    )
    run = trainer(tmp_path, model, save_strategy="no", max_steps=1, **kwargs)
    run.train_dataset = Rows([x])
    run.train()
    (_, seen) = probe.probes[0]
    assert expected.lr == seen.lr == 1e-2
    assert math.isclose(seen.slope, expected.slope, rel_tol=1e-4)
    assert math.isclose(seen.max_lr, expected.max_lr, rel_tol=1e-3)
