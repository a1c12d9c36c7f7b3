"""EvE against a derivation from its description, and in `Trainer`."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import frankenstein_hf as fhf
from frankenstein_hf.optim.exact_state import seeded_generator

from .toy import batches, language_model, optimizer_of, parity_of, saved, train, trainer


class Derivation:
    """EvE on the unit cube, as its description has it: every point a list of arrays z, one a parameter."""

    def __init__(self, anchor, half, lrs, decays, *, seed, sigma, difference, jitter, burst, mutate, index):
        self.anchor, self.half, self.lrs, self.decays = anchor, half, lrs, decays
        self.seed, self.F, self.γ, self.burst, self.mutate, self.index = seed, difference, jitter, burst, mutate, index
        self.z = [[np.full(w.shape, 0.5) for w in anchor]]
        for k in (1, 2, 3):
            noises = [
                torch.randn(w.shape, generator=seeded_generator(seed, 0, k, position), dtype=torch.float64).numpy()
                for position, w in enumerate(anchor)
            ]
            self.z.append([np.clip(0.5 + sigma * noise, 0, 1) for noise in noises])
        self.m = [[np.zeros(w.shape) for w in anchor] for _ in range(4)]
        self.v = [[np.zeros(w.shape) for w in anchor] for _ in range(4)]
        self.t = [0] * 4
        self.f, self.history = None, []

    def x(self, z):
        return [c - h + 2 * h * part for c, h, part in zip(self.anchor, self.half, z)]

    def step(self, number, loss, gradient):
        i = (number - 1) % 4
        if self.f is None:
            self.f = [loss(self.x(z)) for z in self.z]
        self.f[i] = loss(self.x(self.z[i]))
        generator = seeded_generator(self.seed, number)
        a, b, c = [[k for k in range(4) if k != i][j] for j in torch.randperm(3, generator=generator)]
        u = torch.rand((), generator=generator, dtype=torch.float64).item()
        pbest = int(np.argmin(self.f))
        F_t = self.F * (1 + self.γ * (u - 0.5))
        child = [
            np.clip(za + F_t * (zb - zc) + self.F * (zp - za), 0, 1)
            for za, zb, zc, zp in zip(*(self.z[k] for k in (a, b, c, pbest)))
        ]
        f_child = loss(self.x(child))
        what = "child"
        if self.mutate:
            mutant = self.mutation(child, generator)
            f_mutant = loss(self.x(mutant))
            if f_mutant < f_child:
                child, f_child, what = mutant, f_mutant, "mutant"
        if f_child >= self.f[i]:
            x = self.x(child)
            for _ in range(self.burst):
                self.t[i] += 1
                for n, g in enumerate(gradient(x)):
                    g = g + self.decays[n] * x[n]
                    self.m[i][n] = 0.9 * self.m[i][n] + 0.1 * g
                    self.v[i][n] = 0.999 * self.v[i][n] + 0.001 * g**2
                    m_hat, v_hat = self.m[i][n] / (1 - 0.9 ** self.t[i]), self.v[i][n] / (1 - 0.999 ** self.t[i])
                    low, high = self.anchor[n] - self.half[n], self.anchor[n] + self.half[n]
                    x[n] = np.clip(x[n] - self.lrs[n] * m_hat / (np.sqrt(v_hat) + 1e-8), low, high)
            if (f_adam := loss(x)) < f_child:
                child = [(w - c + h) / (2 * h) for w, c, h in zip(x, self.anchor, self.half)]
                f_child, what = f_adam, "adam"
        if f_child < self.f[i]:
            self.z[i], self.f[i] = child, f_child
        else:
            what = "nothing"
        self.history.append(what)
        return self.x(self.z[int(np.argmin(self.f))])

    def mutation(self, z, generator):
        gene = int(torch.randint(sum(part.size for part in z), (), generator=generator))
        r = torch.rand((), generator=generator, dtype=torch.float64).item()
        flat, power = np.concatenate([part.ravel() for part in z]), self.index + 1
        δ1, δ2 = flat[gene], 1 - flat[gene]
        if r <= 0.5:
            δq = (2 * r + (1 - 2 * r) * (1 - δ1) ** power) ** (1 / power) - 1
        else:
            δq = 1 - (2 * (1 - r) + 2 * (r - 0.5) * (1 - δ2) ** power) ** (1 / power)
        flat[gene] += δq
        ends = np.cumsum([part.size for part in z])
        return [x.reshape(part.shape) for x, part in zip(np.split(flat, ends[:-1]), z)]


@parity_of("eve")
@pytest.mark.parametrize(
    ("params", "lr", "expected"),
    [
        ({}, 0.1, {"child", "adam"}),
        ({"burst": 1, "seed": 5, "jitter": 0.5, "difference": 0.8}, 1e-3, {"child", "nothing"}),
        ({"mutate": True, "mutation_index": 3.0, "sigma": 0.3, "seed": 2}, 0.3, {"mutant", "adam"}),
    ],
)
def test_steps_equal_a_derivation_on_the_unit_cube(params, lr, expected):
    random = np.random.default_rng(0)
    anchor = [random.normal(size=(4, 3)), random.normal(size=5), random.normal(size=(2, 3, 2))]
    half = [np.sqrt(6 / fan_in) for fan_in in (3, 5, 6)]
    steps = 14
    targets = 2 * random.normal(size=(steps, 29))
    values = dict(sigma=0.1, difference=0.5, jitter=1e-4, burst=3, mutate=False, mutation_index=20.0, seed=0) | params
    tensors = [nn.Parameter(torch.from_numpy(w.copy())) for w in anchor]
    lrs, decays = [lr, lr / 3, lr], [0.2, 0.0, 0.1]
    groups = [{"params": [p], "lr": a, "weight_decay": d} for p, a, d in zip(tensors, lrs, decays)]
    optimizer = fhf.optim.eve.EvE([*groups[:2], groups[2] | {"layout": "flatten"}], **values)
    index = values.pop("mutation_index")
    derivation = Derivation(anchor, half, lrs, decays, index=index, **values)
    for number, target in enumerate(targets, 1):
        aim = torch.from_numpy(target)

        def closure(target=aim):
            loss = (torch.cat([p.flatten() for p in tensors]) - target).square().mean()
            if torch.is_grad_enabled():
                optimizer.zero_grad()
                loss.backward()
            return loss

        def loss(x, target=target):
            return np.mean((np.concatenate([w.ravel() for w in x]) - target) ** 2)

        def gradient(x, target=target):
            flat = 2 / 29 * (np.concatenate([w.ravel() for w in x]) - target)
            return [g.reshape(w.shape) for g, w in zip(np.split(flat, [12, 17]), x)]

        optimizer.step(closure)
        for p, expected_w in zip(tensors, derivation.step(number, loss, gradient)):
            np.testing.assert_allclose(p.detach().numpy(), expected_w, rtol=1e-7, atol=1e-9)
    assert expected <= set(derivation.history)


def bowl(w, center):
    """A deterministic objective and the optimizer of it."""
    optimizer = optimizer_of("eve", [w], lr=0.05)

    def closure():
        loss = (w - center).square().sum()
        if torch.is_grad_enabled():
            optimizer.zero_grad()
            loss.backward()
        return loss

    return optimizer, closure


def test_on_a_deterministic_objective_the_best_value_never_rises_and_stays_in_the_box():
    torch.manual_seed(0)
    w = nn.Parameter(torch.zeros(4, 6))
    optimizer, closure = bowl(w, torch.full((4, 6), 3.0))  # outside of the box
    best = [closure().item()]
    for _ in range(40):
        optimizer.step(closure)
        with torch.no_grad():
            best.append(float(closure()))
        assert w.abs().max() <= 1.0  # √(6/6)
    assert all(after <= before for before, after in pairwise(best)) and best[-1] < 0.6 * best[0]


def test_the_parameters_are_the_best_slot_whatever_moves_them_between_steps():
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(3, 4))
    optimizer, closure = bowl(w, torch.zeros(3, 4))
    for _ in range(5):
        optimizer.step(closure)
    with torch.no_grad():
        w.zero_()  # the optimum: nothing can be strictly better
        optimizer.zero_grad()
    for _ in range(8):
        optimizer.step(closure)
    assert torch.equal(w, torch.zeros(3, 4))


def test_weights_are_restored_when_the_closure_fails_and_a_loss_of_nan_never_wins():
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(5))
    optimizer, closure = bowl(w, torch.zeros(5))
    optimizer.step(closure)
    before, calls = w.detach().clone(), []

    def failing():
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError
        return closure()

    with pytest.raises(ZeroDivisionError):
        optimizer.step(failing)
    assert torch.equal(w, before)
    with torch.no_grad():
        value = float(closure())
    for _ in range(4):
        optimizer.step(lambda: closure() * (1 if torch.equal(w, before) else torch.nan))
    assert torch.equal(w, before)
    with torch.no_grad():
        assert float(closure()) == value
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step()


def test_what_is_only_as_good_replaces_nothing():
    w = nn.Parameter(torch.randn(3, 2))
    optimizer = optimizer_of("eve", [w])

    def closure():
        optimizer.zero_grad()
        loss = (w * 0).sum() + 1
        if torch.is_grad_enabled():
            loss.backward()
        return loss.detach()

    before = w.detach().clone()
    optimizer.step(closure)
    slots = optimizer.state[w]["slots"].clone()
    for _ in range(4):
        optimizer.step(closure)
    assert torch.equal(w, before) and torch.equal(optimizer.state[w]["slots"], slots)


def test_16_bit_parameters_have_wider_slots():
    model = language_model().to(torch.bfloat16)
    optimizer = optimizer_of("eve", model)
    train("eve", model, optimizer, batches(3))
    twin = copy.deepcopy(model)
    other = optimizer_of("eve", twin)
    other.load_state_dict(saved(optimizer))
    train("eve", model, optimizer, batches(3, seed=2))
    train("eve", twin, other, batches(3, seed=2))
    for p, q in zip(model.parameters(), twin.parameters()):
        assert p.isfinite().all() and torch.equal(p, q)
        assert optimizer.state[p]["slots"].dtype == torch.float32


def test_trainer_runs_it_under_autocast_and_evaluates_as_the_model_does(tmp_path):
    run = trainer(
        tmp_path,
        language_model(),
        optimizer=fhf.trainer_optimizer("eve", burst=2, lr=0.02),
        callbacks=fhf.trainer_callbacks("eve"),
        bf16=True,
    )
    dtypes = set()
    hook = run.model.model.layers[0].mlp.up_proj.register_forward_hook(lambda m, i, output: dtypes.add(output.dtype))
    run.train()
    hook.remove()
    assert dtypes == {torch.bfloat16}
    assert run.optimizer.optimizer.shared_state()["step"] == 4


def test_trainer_needs_the_callback_one_batch_a_step_and_a_loss(tmp_path):
    kwargs = dict(optimizer=fhf.trainer_optimizer("eve"))
    with pytest.raises(RuntimeError, match="trainer_callbacks"):
        trainer(tmp_path, language_model(), **kwargs).train()
    kwargs["callbacks"] = fhf.trainer_callbacks("eve")
    with pytest.raises(ValueError, match="gradient_accumulation_steps=1"):
        trainer(tmp_path, language_model(), gradient_accumulation_steps=2, **kwargs).train()
    with pytest.raises(ValueError, match="label_smoothing_factor"):
        trainer(tmp_path, language_model(), label_smoothing_factor=0.1, **kwargs).train()
