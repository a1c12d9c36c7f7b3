"""What must not hurt any optimizer: bad gradients, odd parameters, 16 bits, plain closures, memory layouts."""

import math

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import frankenstein_hf as fhf
from frankenstein_hf.optim.low_precision import stochastic
from frankenstein_hf.optim.screening import usable
from frankenstein_hf.optim.spec import BF16_UPDATES, OPTIMIZERS

from .toy import NAMES, WITH_GRADIENT, assert_equal_states, optimizer_of, saved, step

every = pytest.mark.parametrize("name", NAMES)
GIVEN = [name for name in WITH_GRADIENT if not OPTIMIZERS.get(name).closure]  # take the gradients that are there
given = pytest.mark.parametrize("name", GIVEN)
# without those that need a model of ours, for what they do to attention logits
plain = pytest.mark.parametrize("name", [name for name in GIVEN if not OPTIMIZERS.get(name).stabilizers])


def parameters(*shapes, dtype=torch.float32):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def give(params, seed, scale=1.0):
    """Random gradients."""
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


# ---------------------------------------------------------------------- gradients that are not finite


@given
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e25])
@pytest.mark.parametrize("first", [False, True])
def test_a_bad_gradient_leaves_its_tensor_out_and_nothing_else(name, bad, first, caplog):
    """As if it had not been there: bit for bit, and counted."""
    ours, theirs = (parameters((4, 3), (4, 3), (5,)) for _ in range(2))
    optimizer, reference = (optimizer_of(name, [{"params": params}]) for params in (ours, theirs))
    for t in range(4):
        give(ours, t)
        give(theirs, t)
        if t == (0 if first else 2):
            ours[1].grad[2, 1] = bad
            theirs[1].grad = None
            kept = ours[1].grad
        optimizer.step()
        reference.step()
    assert all(torch.equal(p, q) and p.isfinite().all() for p, q in zip(ours, theirs))
    assert kept[2, 1].isnan() or kept[2, 1] == bad  # the gradient is the user's
    shared = optimizer.shared_state()
    assert shared.pop("skipped") == {1: 1} and shared.pop("skipping_steps") == 1
    assert_equal_states(saved(optimizer)["state"].get("global", {}), saved(reference)["state"].get("global", {}))
    for p, q in zip(ours, theirs):
        assert_equal_states(dict(optimizer.state[p]), dict(reference.state[q]))
    assert caplog.text.count("was left out") == 1 and "[4, 3]" in caplog.text


@plain
def test_bad_gradients_raise_or_pass_where_asked(name):
    model = nn.Linear(3, 4)
    optimizer = fhf.create_optimizer(model, name, nonfinite="raise")
    model.weight.grad, model.bias.grad = torch.full_like(model.weight, math.nan), torch.zeros_like(model.bias)
    before = model.bias.detach().clone()
    with pytest.raises(RuntimeError, match=r"gradient of weight is not finite"):
        optimizer.step()
    assert torch.equal(model.bias, before) and model.weight.isfinite().all()
    optimizer = fhf.create_optimizer(model, "sgd", nonfinite="take")
    optimizer.step()
    assert model.weight.isnan().all()


def test_bad_gradients_are_reported_by_name_at_the_first_second_fourth_time_and_survive_a_resume(caplog):
    model = nn.Linear(3, 4)
    optimizer = fhf.create_optimizer(model, "lion")
    for _ in range(5):
        model.weight.grad = torch.full_like(model.weight, math.inf)
        optimizer.step()
    assert optimizer.skipped_updates() == {"weight": 5}
    assert [record.message.count("weight") > 0 for record in caplog.records] == [True] * 3
    resumed = fhf.create_optimizer(model, "lion")
    resumed.load_state_dict(saved(optimizer))
    resumed.step()
    assert resumed.skipped_updates() == {"weight": 6} and optimizer.skipped_updates() == {"weight": 5}


@given
def test_after_the_largest_gradients_allowed_everything_is_finite(name):
    params = parameters((4, 3), (5,))
    optimizer = optimizer_of(name, [{"params": params}])
    for t in range(12):
        give(params, t, scale=10.0**15 if t == 2 else 1.0)
        assert all(usable([p.grad for p in params]))
        optimizer.step()
    assert all(p.isfinite().all() for p in params)
    for state in optimizer.state.values():
        assert all(v.isfinite().all() for v in state.values() if isinstance(v, torch.Tensor))


def test_statistics_that_overflow_in_the_long_run_are_an_error_that_says_so():
    (w,) = parameters((4, 3))
    optimizer = optimizer_of("shampoo", [w], nonfinite="take")
    w.grad = torch.full_like(w, 1e20)
    with pytest.raises(RuntimeError, match=r"Clip gradients"):
        optimizer.step()


def test_a_curvature_that_is_not_finite_is_left_out(caplog):
    params = parameters((4, 3), (5,))
    optimizer = optimizer_of("sophia", [{"params": params}])
    give(params, 0)
    estimates = {params[0]: torch.full((4, 3), math.inf), params[1]: torch.ones(5)}
    optimizer.supply(estimates)
    assert not optimizer.state[params[0]] and (optimizer.state[params[1]]["h"] > 0).all()
    assert "curvature" in caplog.text and list(optimizer.skipped_updates().values()) == [1]


def test_eve_ends_a_burst_at_a_bad_gradient_and_ea4llm_ranks_a_bad_loss_last():
    (w,) = parameters((4, 3))
    optimizer = optimizer_of("eve", [w])

    def closure():
        optimizer.zero_grad()
        loss = w.square().sum()
        if torch.is_grad_enabled():
            loss.backward()
            w.grad[0, 0] = math.nan
        return loss.detach()

    for _ in range(6):
        optimizer.step(closure)
    assert all(v.isfinite().all() for v in optimizer.state[w].values() if isinstance(v, torch.Tensor))
    assert w.isfinite().all() and optimizer.skipped_updates()

    optimizer, calls = optimizer_of("ea4llm", [w], population=6), []

    def sometimes():
        calls.append(1)
        return w.detach().square().sum() + (math.nan if len(calls) == 2 else 0)

    before = w.detach().clone()
    optimizer.step(sometimes)
    assert w.isfinite().all() and not torch.equal(w, before)
    before = w.detach().clone()
    optimizer.step(lambda: torch.tensor(math.inf))
    assert torch.equal(w, before) and list(optimizer.skipped_updates().values()) == [1]


# ---------------------------------------------------------------------- 16 bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_rounding_takes_a_neighbour_and_keeps_the_mean(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(37, generator=generator) * torch.logspace(-9, 3, 37)  # the smallest are subnormal in fp16
    draws = torch.stack([stochastic(x, dtype, generator) for _ in range(3000)]).double()
    below = torch.nextafter(x.to(dtype).cpu(), torch.full_like(x, -math.inf).to(dtype)).double()
    above = torch.nextafter(x.to(dtype).cpu(), torch.full_like(x, math.inf).to(dtype)).double()
    assert (draws >= below).all() and (draws <= above).all()
    deviation = draws.std(0) / 3000**0.5
    assert ((draws.mean(0) - x.double()).abs() <= 5 * deviation + (above - below) * 2e-5).all()
    exact = x.to(dtype)
    assert torch.equal(stochastic(exact.float(), dtype, generator), exact)


MOVEMENT = 2.0**-10  # of a step: an eighth of the distance between bf16 numbers above 1
STEADY = {"prodigy": {"d0": 1e-3, "growth_rate": 1.0}}  # whose steps would not be proportional to the rate


def drift(name, how, dtype, lr, steps=24):
    """How far weights near 1 move under gradients that are always the same."""
    generator = torch.Generator().manual_seed(3)
    w = nn.Parameter((1 + torch.rand(16, 16, generator=generator) / 2).bfloat16().to(dtype))
    g = (torch.rand(16, 16, generator=generator) + 0.5).bfloat16().to(dtype)
    before = w.detach().double().clone()
    values = {"lr": lr, "bf16_update": how, "weight_decay": 0.0} | STEADY.get(name, {})
    optimizer = optimizer_of(name, [{"params": [w]}], **values)
    for _ in range(steps):
        w.grad = g.clone()
        optimizer.step()
    return w.detach().double() + optimizer.state[w].get("remainder", 0) - before


@given
def test_small_updates_of_bf16_weights_are_not_lost(name):
    lr = 1e-3 * 24 * MOVEMENT / drift(name, "round", torch.float64, 1e-3).abs().mean().item()
    wanted = drift(name, "round", torch.float32, lr)
    size = wanted.abs().mean()
    compensated, stochastic_ = (drift(name, how, torch.bfloat16, lr) for how in ("compensated", "stochastic"))
    assert (compensated - wanted).abs().mean() < 0.02 * size
    # a random walk around the right path: as far off as 24 coins with the odds 1 : 7 may be
    assert (stochastic_ - wanted).abs().mean() < 14 * MOVEMENT
    assert (stochastic_ - wanted).mean().abs() < 0.1 * size


@every
@pytest.mark.parametrize("how", BF16_UPDATES)
def test_bf16_training_resumes_exactly_however_it_rounds(name, how):
    def run(optimizer, params, steps):
        for t in steps:
            target = torch.randn(4, 3, generator=torch.Generator().manual_seed(t))
            step(name, optimizer, lambda target=target: ((params[0] - target) ** 2).sum() + (params[1] ** 2).sum())

    whole = parameters((4, 3), (3,), dtype=torch.bfloat16)
    optimizer = optimizer_of(name, [{"params": whole}], bf16_update=how)
    run(optimizer, whole, range(3))
    half = [nn.Parameter(p.detach().clone()) for p in whole]
    second = optimizer_of(name, [{"params": half}], bf16_update=how)
    second.load_state_dict(saved(optimizer))
    run(optimizer, whole, range(3, 6))
    run(second, half, range(3, 6))
    assert all(torch.equal(p, q) and p.isfinite().all() for p, q in zip(whole, half))
    assert_equal_states(saved(second), saved(optimizer))
    for p in whole:
        remainder = optimizer.state[p].get("remainder")
        assert (remainder is not None) == (how == "compensated")
        others = [value for key, value in optimizer.state[p].items() if key != "remainder"]
        assert all(value.dtype != torch.bfloat16 for value in others if isinstance(value, torch.Tensor))


# ---------------------------------------------------------------------- odd parameters


@every
def test_complex_parameters_are_refused(name):
    for shape in ((3, 3), (3,)):
        with pytest.raises(ValueError, match="view_as_real"):
            optimizer_of(name, [nn.Parameter(torch.zeros(shape, dtype=torch.complex64))])


@every
def test_parameters_without_elements_change_nothing(name):
    ours, theirs = (parameters((4, 3), (3,)) for _ in range(2))
    empty = [nn.Parameter(torch.zeros(shape)) for shape in ((0, 3), (4, 0), (0,))]
    optimizers = [optimizer_of(name, [{"params": ps}]) for ps in (ours + empty, theirs)]
    for _ in range(3):
        for optimizer, ps in zip(optimizers, (ours + empty, theirs)):
            step(name, optimizer, lambda ps=ps: sum((p**2).sum() for p in ps))
    assert all(p.isfinite().all() for p in ours)
    if not OPTIMIZERS.get(name).closure:  # whose random numbers go by position
        assert all(torch.equal(p, q) for p, q in zip(ours, theirs))
    optimizers[0].load_state_dict(saved(optimizers[0]))


@given
def test_gradients_of_any_memory_layout_give_the_same_step(name):
    ours, theirs = (parameters((4, 3), (2, 5, 3)) for _ in range(2))
    optimizers = [optimizer_of(name, [{"params": ps}]) for ps in (ours, theirs)]
    for t in range(3):
        give(ours, t)
        give(theirs, t)
        for p in ours:
            p.grad = p.grad.mT.contiguous().mT
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q)


class Layers(nn.Module):
    """Two layers of equal shape, as torch's Linear or as GPT-2's Conv1D with the same weights."""

    def __init__(self, transposed):
        super().__init__()
        torch.manual_seed(0)
        linears = [nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(5, 5)]
        self.layers = nn.ModuleList([Conv1D(layer.out_features, layer.in_features) for layer in linears])
        for i, layer in enumerate(linears):
            if not transposed:
                self.layers[i] = layer
            else:
                self.layers[i].weight = nn.Parameter(layer.weight.detach().T.clone())
                self.layers[i].bias = nn.Parameter(layer.bias.detach().clone())


@plain
def test_a_transposed_layer_is_trained_as_its_transpose(name):
    ours, theirs = Layers(True), Layers(False)
    optimizers = [optimizer_of(name, model, weight_decay=0.1) for model in (ours, theirs)]
    for t in range(5):
        give(theirs.parameters(), t)
        for p, q in zip(ours.parameters(), theirs.parameters()):
            p.grad = q.grad.T.clone()
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(p.T, q, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- closures


@every
def test_torchs_usual_closure_will_do(name):
    """Zero, compute, backward, return: whatever is enabled around it."""
    (w,) = parameters((4, 3))
    optimizer = optimizer_of(name, [w])

    def closure():
        optimizer.zero_grad()
        loss = w.square().sum()
        loss.backward()
        return loss

    before = float(w.detach().square().sum())
    losses = [float(optimizer.step(closure)) for _ in range(3)]
    assert all(math.isfinite(loss) for loss in losses) and losses[0] == pytest.approx(before, rel=0.2)


@pytest.mark.parametrize("name", [spec.name for spec in OPTIMIZERS if spec.closure])
def test_other_errors_of_a_closure_come_through_at_once(name):
    calls = []

    def closure():
        calls.append(1)
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        optimizer_of(name, parameters((2, 2))).step(closure)
    assert len(calls) == 1


# ---------------------------------------------------------------------- torch's kernels


@pytest.mark.parametrize("name", [spec.name for spec in OPTIMIZERS if "foreach" in spec.params.types()])
def test_all_of_torchs_kernels_do_the_same(name):
    kernels = [{"foreach": True}, {"foreach": False}, {}]
    kernels += [{"fused": True}, {"fused": False}] if "fused" in OPTIMIZERS.get(name).params.types() else []
    results = []
    for kernel in kernels:
        params = parameters((4, 3), (5,), (2, 2), dtype=torch.float64)
        optimizer = optimizer_of(name, [{"params": params}], **kernel)
        for t in range(4):
            give(params, t)
            if t < 2:
                params[2].grad = None  # joins late
            optimizer.step()
        results.append(params)
    for params in results:
        for p, q in zip(params, results[0]):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
    if {"fused": True} in kernels:
        with pytest.raises(ValueError, match="exclude each other"):
            optimizer_of(name, parameters((2,)), fused=True, foreach=True)


def test_gradients_are_unscaled_before_they_are_screened():
    """torch's fused kernels would unscale them themselves, too late."""
    (w,) = parameters((4, 3))
    optimizer, scaler = optimizer_of("adamw", [w], fused=True), torch.amp.GradScaler("cpu", init_scale=2.0**60)
    scaler.scale(w.square().sum()).backward()
    assert not usable([w.grad])[0]
    before = w.detach().clone()
    scaler.step(optimizer)
    assert not torch.equal(w, before) and not optimizer.skipped_updates()
