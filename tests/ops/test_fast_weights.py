"""The cores of the Falcon family against sequential fp64 loops, and the properties mixers rely on."""

import pytest
import torch
from torch.nn import functional as F

from frankenstein_hf.modeling.ops.banded import banded_product, banded_scores, banded_transpose
from frankenstein_hf.modeling.ops.fast_weights import channelwise_delta_rule
from frankenstein_hf.modeling.ops.rehearsal import rehearsal_delta_rule, rehearsal_scan

CORES = {f.__name__: f for f in (channelwise_delta_rule, rehearsal_delta_rule, rehearsal_scan)}
every_core = pytest.mark.parametrize("core", CORES)
GATES = ("mild", "zero", -2.0, -9.2, -50.0, "mixture", "bursts")
NAMES = ("query", "key", "value", "step", "log_decay", "initial_state")


def loop(core, q, k, v, step, g, S):
    """All three in one: a window of pairs, and a step and a decay per head ([B, H, T]) or value channel."""
    step, a = (x if x.dim() == 4 else x.unsqueeze(-1) for x in (step, g.exp()))
    window, outputs = k.shape[2] - q.shape[2] + 1, []
    for t in range(q.shape[2]):
        x, y = k[:, :, t : t + window], v[:, :, t : t + window]
        error = y if core == "rehearsal_scan" else y - x @ S
        S = S * a[:, :, t, None] + x.mT @ (step[:, :, t, None] * error)
        outputs.append(0.5 * (q[:, :, t, None] @ S)[:, :, 0])
    return torch.stack(outputs, dim=2), S


def make_gates(kind, shape):
    if not isinstance(kind, str):
        return torch.full(shape, kind)
    mild, which = -0.1 * torch.rand(shape), torch.rand(shape)
    if kind == "mixture":
        return torch.where(which < 0.3, -50.0, torch.where(which < 0.6, -3 * torch.rand(shape), mild))
    if kind == "bursts":
        mild[:, :, 20:29] = -50.0
        mild[:, :, 70:72] = -15.0
    return torch.zeros(shape) if kind == "zero" else mild


def make_inputs(core, gates="mild", B=2, H=2, T=100, K=16, V=12, W=4, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    vector = core == "channelwise_delta_rule"
    past = 0 if vector else W - 1
    q, k = F.normalize(torch.randn(B, H, T, K), dim=-1), F.normalize(torch.randn(B, H, past + T, K), dim=-1)
    shape = (B, H, T, V) if vector else (B, H, T)
    step = 1.9 * torch.rand(shape) / (past + 1)
    tensors = (q, k, torch.randn(B, H, past + T, V), step, make_gates(gates, shape), torch.randn(B, H, K, V))
    return [x.to(dtype) for x in tensors]


def run(core, inputs, **options):
    *tensors, state = inputs
    return CORES[core](*tensors, scale=0.5, initial_state=state, output_final_state=True, **options)


def with_gradients(function, inputs):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    results = function(inputs)
    generator = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=generator, dtype=torch.float32)).sum() for x in results)
    return [x.detach() for x in results] + list(torch.autograd.grad(loss, inputs))


def assert_equals_loop(core, inputs, tolerance=2e-6, **options):
    ours = with_gradients(lambda x: run(core, x, **options), inputs)
    reference = with_gradients(lambda x: loop(core, *x), [x.double() for x in inputs])
    for name, x, r in zip(("output", "state", *NAMES), ours, reference):
        assert x.isfinite().all(), name
        error = (x.double() - r).square().mean().sqrt()
        # gradients as small as those of a decay of exp(-9) are differences of larger numbers
        assert error <= tolerance * r.square().mean().sqrt() + 3e-8, f"{name}: {error / r.square().mean().sqrt():.1e}"


@every_core
@pytest.mark.parametrize("gates", GATES)
def test_equals_the_sequential_loop_in_output_and_gradients(core, gates):
    assert_equals_loop(core, make_inputs(core, gates))


@every_core
@pytest.mark.parametrize("T", [*range(1, 10), 16, 17, 32, 33, 65])
def test_any_length_and_odd_widths(core, T):
    assert_equals_loop(core, make_inputs(core, "mixture", T=T, K=5, V=7))


@pytest.mark.parametrize("core", ["rehearsal_delta_rule", "rehearsal_scan"])
@pytest.mark.parametrize("W", [1, 2, 3, 16, 33, 80])
def test_any_window(core, W):
    assert_equals_loop(core, make_inputs(core, "bursts", T=50, W=W))


@every_core
@pytest.mark.parametrize("gates", ["mild", "zero"])
def test_repeated_unit_keys_with_full_steps(core, gates):
    inputs = make_inputs(core, gates)
    inputs[1] = inputs[1][:, :, :1].expand_as(inputs[1])
    inputs[3] = torch.full_like(inputs[3], 1.0 if core == "channelwise_delta_rule" else 0.25)
    assert_equals_loop(core, inputs)


@every_core
def test_several_segments_and_small_chunks(core, monkeypatch):
    for module in ("fast_weights", "rehearsal"):
        monkeypatch.setattr(f"frankenstein_hf.modeling.ops.{module}.SEGMENT_ROWS", 64)
    assert_equals_loop(core, make_inputs(core, "bursts"), chunk_size=8)


@every_core
def test_fp64_is_computed_in_fp64(core):
    inputs = make_inputs(core, "mixture", dtype=torch.float64)
    for x, r in zip(run(core, inputs), loop(core, *inputs)):
        torch.testing.assert_close(x, r, rtol=1e-12, atol=1e-12)


@every_core
def test_gradcheck(core):
    inputs = make_inputs(core, B=1, H=2, T=9, K=3, V=2, W=3, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(lambda *x: run(core, x, chunk_size=4), inputs)


@every_core
@pytest.mark.parametrize("gates", ["mild", "mixture", -2.0])
def test_later_values_change_no_earlier_output_by_a_single_bit(core, gates):
    inputs = make_inputs(core, gates, T=150)
    before, _ = run(core, inputs)
    past = inputs[1].shape[2] - 150
    for t in (0, 1, 15, 16, 40, 63, 64, 149):
        changed = [x.clone() for x in inputs]
        for i, new in enumerate(make_inputs(core, "bursts", T=150, seed=t + 1)[:5]):
            start = t + (past if i in (1, 2) else 0)
            changed[i][:, :, start:] = 3 * new[:, :, start:]
        after, _ = run(core, changed)
        assert torch.equal(before[:, :, :t], after[:, :, :t]), t
        assert not torch.equal(before[:, :, t], after[:, :, t])


@every_core
def test_continuing_from_the_final_state_equals_one_call(core):
    *tensors, state = make_inputs(core, "mixture", T=90)
    whole, last = run(core, [*tensors, state])
    past, outputs = tensors[1].shape[2] - 90, []
    for start, stop in ((0, 50), (50, 51), (51, 54), (54, 90)):
        part = [x[:, :, start : stop + (past if i in (1, 2) else 0)] for i, x in enumerate(tensors)]
        output, state = run(core, [*part, state])
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, dim=2), whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, last, rtol=1e-5, atol=1e-6)


@every_core
@pytest.mark.parametrize("T", [1, 70])
def test_bf16_gives_bf16_output_and_an_fp32_state(core, T):
    inputs = [x.bfloat16().requires_grad_() for x in make_inputs(core, T=T)]
    output, state = run(core, inputs)
    assert output.dtype == torch.bfloat16 and state.dtype == torch.float32
    exact, _ = run(core, [x.detach().float() for x in inputs])
    torch.testing.assert_close(output, exact.bfloat16(), rtol=1e-2, atol=1e-3)
    (output.sum() + state.sum()).backward()
    assert all(x.grad.dtype == torch.bfloat16 and x.grad.isfinite().all() for x in inputs)


@every_core
def test_autocast_lowers_no_precision(core):
    inputs = make_inputs(core, T=40)
    expected = with_gradients(lambda x: run(core, x), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        got = with_gradients(lambda x: run(core, x), inputs)
    assert all(torch.equal(x, y) for x, y in zip(expected, got))


@every_core
def test_strided_inputs_and_incoming_gradients_are_read_only(core):
    inputs = make_inputs(core, B=1, H=1, T=64)
    expected = with_gradients(lambda x: run(core, x), inputs)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    kept = [x.clone() for x in strided]
    leaves = [x.requires_grad_() for x in strided]
    output, state = run(core, leaves)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(x.shape, generator=generator) for x in (output, state)]
    copies = [x.clone() for x in grads]
    got = torch.autograd.grad((output, state), leaves, grads)
    assert all(torch.equal(x, y) for x, y in zip(kept + copies, leaves + grads))
    for x, y in zip(expected, (output, state, *got)):
        torch.testing.assert_close(y, x)


@every_core
def test_without_a_state_equals_zeros(core):
    *tensors, state = make_inputs(core)
    expected, _ = CORES[core](*tensors, initial_state=torch.zeros_like(state), output_final_state=True)
    output, none = CORES[core](*tensors)
    assert none is None
    torch.testing.assert_close(output, expected)
    if core == "channelwise_delta_rule":
        tensors[4] = torch.zeros_like(tensors[4])
        torch.testing.assert_close(CORES[core](*tensors[:4])[0], CORES[core](*tensors)[0])


@every_core
def test_fading_states_and_their_gradients_are_never_handed_on_as_subnormals(core):
    inputs = make_inputs(core, -0.2, T=460, B=1, H=1)
    inputs[3][:, :, 1:] = 0  # one write, then only decay: exp(-92) is 1e-40
    leaves = [x.requires_grad_() for x in inputs]
    output, state = run(core, leaves)
    (d_state,) = torch.autograd.grad(output[:, :, -1].sum(), leaves[-1])
    assert state.eq(0).all() and d_state.abs().max() < (1e-38 if core == "rehearsal_scan" else 1e-45)


@every_core
def test_memory_kept_for_backward_is_a_few_times_the_inputs(core):
    inputs = [x.requires_grad_() for x in make_inputs(core, B=1, H=4, T=4096)]
    kept = {}

    def pack(x):
        kept[x.data_ptr()] = x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run(core, inputs)
    limit = {"channelwise_delta_rule": 1.4, "rehearsal_delta_rule": 1.2, "rehearsal_scan": 3.0}[core]
    assert sum(kept.values()) <= limit * sum(x.numel() for x in inputs)


def test_the_three_banded_functions_equal_their_definition_and_are_twice_differentiable():
    torch.manual_seed(0)
    B, H, T, K, W = 1, 2, 5, 3, 4
    shapes = ((B, H, T, W), (B, H, T, K), (B, H, W - 1 + T, K))
    weights, x, y = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    scores = torch.stack([(x * y[:, :, W - 1 - b : W - 1 - b + T]).sum(-1) for b in range(W)], dim=-1)
    torch.testing.assert_close(banded_scores(x, y), scores)
    total = (scores * weights).sum()
    product, transpose = torch.autograd.grad(total, (x, y))
    torch.testing.assert_close(banded_product(weights, y), product)
    torch.testing.assert_close(banded_transpose(weights, x), transpose)
    for function, arguments in (
        (banded_scores, (x, y)),
        (banded_product, (weights, y)),
        (banded_transpose, (weights, x)),
    ):
        assert torch.autograd.gradcheck(function, arguments)
        assert torch.autograd.gradgradcheck(function, arguments)


@pytest.mark.parametrize(
    ("core", "name", "shape", "message"),
    [
        ("channelwise_delta_rule", "query", (2, 2, 9, 4), "query and key must be"),
        ("channelwise_delta_rule", "value", (2, 2, 9, 3), "value must be"),
        ("channelwise_delta_rule", "step", (2, 2, 10), "step must be"),
        ("channelwise_delta_rule", "log_decay", (2, 2, 10), "log_decay must be"),
        ("channelwise_delta_rule", "initial_state", (2, 2, 3, 4), "initial_state must be"),
        ("rehearsal_delta_rule", "key", (2, 2, 9, 4), "query, key and value must be"),
        ("rehearsal_delta_rule", "value", (2, 2, 12, 3), "query, key and value must be"),
        ("rehearsal_scan", "step", (2, 2, 10, 3), "weight must be"),
        ("rehearsal_scan", "log_decay", (2, 2, 9), "log_decay must be"),
        ("rehearsal_scan", "initial_state", (2, 2, 3, 4), "initial_state must be"),
    ],
)
def test_wrong_shapes_are_named(core, name, shape, message):
    inputs = dict(zip(NAMES, make_inputs(core, T=10, K=4, V=3)))
    arguments = {**inputs, name: torch.zeros(shape)}
    state = arguments.pop("initial_state")
    with pytest.raises(ValueError, match=message):
        CORES[core](*arguments.values(), initial_state=state)


@every_core
def test_chunk_size_must_be_positive(core):
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        run(core, make_inputs(core), chunk_size=0)
