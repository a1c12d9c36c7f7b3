"""The delta rule core against a sequential fp64 loop, and the properties every mixer on it relies on."""

import pytest
import torch
from torch.nn import functional as F

from frankenstein_hf.modeling.ops.delta_rule import delta_rule, recurrent_delta_rule

NAMES = ("query", "key", "erase", "write", "log_decay", "initial_state")
GATES = ("mild", "zero", -1.5, -2.0, -5.0, -50.0, "mixture", "bursts")
PER_KEY = pytest.mark.parametrize("per_key", [False, True], ids=["per_head", "per_key"])


def loop(q, k, e, z, g, S, scale):
    """S_t = (I − k_t e_tᵀ) Diag(exp g_t) S_{t-1} + k_t z_tᵀ,  o_t = scale · S_tᵀ q_t, with the matrices written out."""
    identity, outputs = torch.eye(k.shape[-1], dtype=k.dtype), []
    for t in range(q.shape[2]):
        q_t, k_t, e_t, z_t = (x[:, :, t, :, None] for x in (q, k, e, z))
        decay = torch.diag_embed(g[:, :, t].exp() if g.dim() == 4 else g[:, :, t, None].exp().expand(k[:, :, t].shape))
        S = (identity - k_t @ e_t.mT) @ decay @ S + k_t @ z_t.mT
        outputs.append(scale * (S.mT @ q_t).squeeze(-1))
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


def make_inputs(gates="mild", per_key=False, B=2, H=2, T=100, K=16, V=12, dtype=torch.float32, beta=None, seed=0):
    torch.manual_seed(seed)
    q, k = (F.normalize(torch.randn(B, H, T, K), dim=-1) for _ in range(2))
    b = torch.rand(B, H, T, 1) if beta is None else torch.full((B, H, T, 1), beta)
    g = make_gates(gates, (B, H, T, K) if per_key else (B, H, T))
    tensors = (q, k, b * k, b * torch.randn(B, H, T, V), g, torch.randn(B, H, K, V))
    return [x.to(dtype) for x in tensors]


def run(inputs, **options):
    *tensors, state = inputs
    return delta_rule(*tensors, scale=0.5, initial_state=state, output_final_state=True, **options)


def with_gradients(function, inputs):
    """Output, final state and the gradients of all inputs for a fixed random weighting of both results."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    results = function(inputs)
    generator = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=generator, dtype=torch.float32)).sum() for x in results)
    return [x.detach() for x in results] + list(torch.autograd.grad(loss, inputs))


def assert_equals_loop(inputs, tolerance=2e-6, **options):
    ours = with_gradients(lambda x: run(x, **options), inputs)
    reference = with_gradients(lambda x: loop(*x, 0.5), [x.double() for x in inputs])
    for name, x, r in zip(("output", "state", *NAMES), ours, reference):
        assert x.isfinite().all(), name
        error = (x.double() - r).square().mean().sqrt()
        # gradients as small as 1e-22 (of a decay of exp(-50)) may come out as zero
        assert error <= tolerance * r.square().mean().sqrt() + 1e-9, f"{name}: {error / r.square().mean().sqrt():.1e}"


@PER_KEY
@pytest.mark.parametrize("gates", GATES)
def test_equals_the_sequential_loop_in_output_and_gradients(gates, per_key):
    assert_equals_loop(make_inputs(gates, per_key))


@PER_KEY
@pytest.mark.parametrize("T", [*range(1, 10), 16, 17, 32, 33, 65])
def test_any_length_and_odd_widths(T, per_key):
    assert_equals_loop(make_inputs("mixture", per_key, T=T, K=5, V=7))


@PER_KEY
@pytest.mark.parametrize("gates", ["mild", "zero"])
def test_repeated_unit_keys_with_full_writes(gates, per_key):
    q, k, _, z, g, S = make_inputs(gates, per_key, beta=1.0)
    k = k[:, :, :1].expand_as(k)
    assert_equals_loop([q, k, k, z, g, S])


@PER_KEY
def test_several_segments(per_key, monkeypatch):
    monkeypatch.setattr("frankenstein_hf.modeling.ops.delta_rule.SEGMENT_ROWS", 64)
    assert_equals_loop(make_inputs("bursts", per_key), chunk_size=8)


def test_key_width_one():
    assert_equals_loop(make_inputs("mixture", per_key=True, K=1, V=3))


@PER_KEY
def test_fp64_is_computed_in_fp64(per_key):
    assert_equals_loop(make_inputs("mixture", per_key, dtype=torch.float64), tolerance=1e-13)


@PER_KEY
@pytest.mark.parametrize("sequential", [False, True])
def test_gradcheck(per_key, sequential):
    inputs = make_inputs("mild", per_key, B=1, H=2, T=9, K=3, V=2, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(lambda *x: run(x, chunk_size=4, sequential=sequential), inputs)


def test_the_sequential_form_is_twice_differentiable():
    inputs = make_inputs("mild", per_key=True, B=1, H=1, T=3, K=2, V=2, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradgradcheck(lambda *x: run(x, sequential=True), inputs)


@PER_KEY
@pytest.mark.parametrize("gates", ["mild", "mixture", -2.0])
def test_later_values_change_no_earlier_output_by_a_single_bit(gates, per_key):
    inputs = make_inputs(gates, per_key, T=150)
    before, _ = run(inputs)
    for t in (0, 1, 15, 16, 40, 63, 64, 149):
        changed = [x.clone() for x in inputs]
        for x, new in zip(changed[:5], make_inputs("bursts", per_key, T=150, seed=t + 1)):
            x[:, :, t:] = 3 * new[:, :, t:]
        after, _ = run(changed)
        assert torch.equal(before[:, :, :t], after[:, :, :t]), t
        assert not torch.equal(before[:, :, t], after[:, :, t])


@PER_KEY
def test_continuing_from_the_final_state_equals_one_call(per_key):
    *tensors, state = make_inputs("mixture", per_key, T=90)
    whole, last = run([*tensors, state])
    outputs = []
    for part in (slice(0, 50), slice(50, 51), slice(51, 54), slice(54, 90)):
        output, state = run([*(x[:, :, part] for x in tensors), state])
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, dim=2), whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, last, rtol=1e-5, atol=1e-6)


@PER_KEY
@pytest.mark.parametrize("T", [1, 70])
def test_bf16_gives_bf16_output_and_an_fp32_state(T, per_key):
    inputs = [x.bfloat16().requires_grad_() for x in make_inputs("mild", per_key, T=T)]
    output, state = run(inputs)
    assert output.dtype == torch.bfloat16 and state.dtype == torch.float32
    exact, _ = run([x.detach().float() for x in inputs])
    torch.testing.assert_close(output, exact.bfloat16())
    (output.sum() + state.sum()).backward()
    assert all(x.grad.dtype == torch.bfloat16 and x.grad.isfinite().all() for x in inputs)


@PER_KEY
@pytest.mark.parametrize("sequential", [False, True])
def test_autocast_lowers_no_precision(per_key, sequential):
    inputs = make_inputs("mild", per_key, T=40)
    expected = with_gradients(lambda x: run(x, sequential=sequential), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        got = with_gradients(lambda x: run(x, sequential=sequential), inputs)
    assert all(torch.equal(x, y) for x, y in zip(expected, got))


@PER_KEY
def test_strided_inputs_and_incoming_gradients_are_read_only(per_key):
    inputs = make_inputs("mild", per_key, B=1, H=1, T=64)  # whole chunks of one head: chunking them is only a view
    expected = with_gradients(run, inputs)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    kept = [x.clone() for x in strided]
    leaves = [x.requires_grad_() for x in strided]
    output, state = run(leaves)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(x.shape, generator=generator) for x in (output, state)]
    copies = [x.clone() for x in grads]
    got = torch.autograd.grad((output, state), leaves, grads)
    assert all(torch.equal(x, y) for x, y in zip(kept + copies, leaves + grads))
    for x, y in zip(expected, (output, state, *got)):
        torch.testing.assert_close(y, x)


def test_without_decay_or_state_equals_zeros():
    q, k, e, z, g, S = make_inputs("zero", beta=0.5)
    expected, state = delta_rule(q, k, e, z, g, initial_state=torch.zeros_like(S), output_final_state=True)
    for sequential in (False, True):
        output, none = delta_rule(q, k, e, z, sequential=sequential)
        assert none is None
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    _, got = recurrent_delta_rule(q, k, e, z, output_final_state=True)
    torch.testing.assert_close(got, state, rtol=1e-5, atol=1e-6)


@PER_KEY
def test_fading_states_and_their_gradients_are_never_handed_on_as_subnormals(per_key):
    inputs = make_inputs(-0.2, per_key, T=460, B=1, H=1)
    for x in inputs[1:4]:
        x[:, :, 1:] = 0  # one write, then only decay: exp(-92) is 1e-40
    leaves = [x.requires_grad_() for x in inputs]
    output, state = run(leaves)
    (d_state,) = torch.autograd.grad(output[:, :, -1].sum(), leaves[-1])
    assert state.eq(0).all() and d_state.eq(0).all()


@PER_KEY
def test_little_more_than_the_inputs_is_kept_for_backward(per_key):
    inputs = [x.requires_grad_() for x in make_inputs("mild", per_key, B=1, H=4, T=4096, K=16, V=16)]
    kept = {}

    def pack(x):
        kept[x.data_ptr()] = x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run(inputs)
    assert sum(kept.values()) <= 1.1 * sum(x.numel() for x in inputs)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("query", (2, 2, 9, 4), "share one shape"),
        ("erase", (2, 2, 10, 5), "share one shape"),
        ("write", (2, 2, 9, 3), "write must be"),
        ("log_decay", (2, 2, 10, 1), "log_decay must be"),
        ("initial_state", (2, 2, 3, 4), "initial_state must be"),
    ],
)
@pytest.mark.parametrize("function", [delta_rule, recurrent_delta_rule])
def test_wrong_shapes_are_named(function, name, shape, message):
    inputs = dict(zip(NAMES, make_inputs(T=10, K=4, V=3)))
    with pytest.raises(ValueError, match=message):
        function(**{**inputs, name: torch.zeros(shape)})


def test_chunk_size_must_be_positive():
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        run(make_inputs(), chunk_size=0)
