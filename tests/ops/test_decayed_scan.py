"""The decayed scan against its recurrence, written here as a loop in fp64."""

import pytest
import torch
from torch import Tensor

from frankenstein_hf.modeling.ops.decayed_scan import decayed_scan, recurrent_decayed_scan

B, H, K, V = 2, 3, 5, 7
KINDS = ["none", "constant", "scalar", "key", "value"]
STRENGTHS = [-0.05, -1.5, -2.0, -5.0, -50.0, 0.0, "mixed", "bursts"]


def axis_of(kind: str) -> str:
    return "value" if kind == "value" else "key"


def log_decays(kind: str, strength: float | str, T: int, sizes: tuple[int, ...]) -> Tensor | None:
    B, H, K, V = sizes
    if kind == "none":
        return None
    shape = {"constant": (H,), "scalar": (B, H, T), "key": (B, H, T, K), "value": (B, H, T, V)}[kind]
    if strength == "mixed":
        return torch.tensor([-0.05, -1.5, -5.0, -50.0, 0.0])[torch.randint(5, shape)]
    if strength == "bursts":
        g = -0.05 * torch.rand(shape)
        time = g.ndim - 1 if g.ndim < 4 else 2
        g.narrow(time, g.shape[time] // 3, max(1, g.shape[time] // 5)).fill_(-50.0)
        return g
    return strength * (0.8 + 0.4 * torch.rand(shape))


def inputs(kind: str, strength: float | str, T: int, dtype=torch.float32, sizes=(B, H, K, V)) -> list[Tensor | None]:
    """query, key, value, log_decay, initial_state; the first two with the strides of a projection's output."""
    torch.manual_seed(0)
    B, H, K, V = sizes
    q, k = (torch.randn(B, T, H, K).transpose(1, 2) for _ in range(2))
    tensors = [q, k, torch.randn(B, H, T, V), log_decays(kind, strength, T, sizes), torch.randn(B, H, K, V)]
    return [x if x is None else x.to(dtype) for x in tensors]


def require_grad(tensors):
    return [x if x is None else x.requires_grad_() for x in tensors]


def loop(q, k, v, g, S, *, axis: str = "key", scale: float = 1.0):
    outputs = []
    for t in range(q.shape[2]):
        if g is None:
            a = 1.0
        elif g.ndim == 1:
            a = g.exp()[:, None, None]
        elif g.ndim == 3:
            a = g[:, :, t, None, None].exp()
        else:
            a = g[:, :, t, :, None].exp() if axis == "key" else g[:, :, t, None, :].exp()
        S = a * S + torch.einsum("bhk,bhv->bhkv", k[:, :, t], v[:, :, t])
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, :, t], S))
    return torch.stack(outputs, dim=2), S


def with_gradients(function, tensors, dtype):
    """Output, final state and the gradients of all tensors under random weights of the first two."""
    leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in tensors]
    output, state = function(*leaves)
    generator = torch.Generator().manual_seed(1)
    # weights that bf16 represents, so that what flows back is the same in every dtype
    weights = [torch.randn(x.shape, generator=generator).bfloat16() for x in (output, state)]
    leaves = [x for x in leaves if x is not None]
    return [
        output,
        state,
        *torch.autograd.grad([output, state], leaves, [w.to(x.dtype) for w, x in zip(weights, (output, state))]),
    ]


def chunked(kind: str, **options):
    def function(q, k, v, g, S):
        return decayed_scan(
            q, k, v, g, initial_state=S, decay_axis=axis_of(kind), output_final_state=True, scale=0.3, **options
        )

    return function


def assert_matches_loop(kind: str, tensors, dtype=torch.float32, rtol=1e-6, **options) -> None:
    actual = with_gradients(chunked(kind, **options), tensors, dtype)
    expected = with_gradients(lambda *x: loop(*x, axis=axis_of(kind), scale=0.3), tensors, torch.float64)
    names = ["output", "state", "query", "key", "value", *([] if kind == "none" else ["log_decay"]), "initial_state"]
    for name, x, y in zip(names, actual, expected, strict=True):
        assert x.isfinite().all(), name
        error = (x.double() - y).norm()
        # gradients of 1e-20 through a decay of -50 are returned as (nearly) nothing
        assert error <= rtol * y.norm() + 1e-12 * y.numel() ** 0.5, f"{name}: {error / y.norm():.1e}"


@pytest.mark.parametrize("kind, strength", [("none", 0.0), *((kind, s) for kind in KINDS[1:] for s in STRENGTHS)])
def test_outputs_and_gradients_match_the_recurrence(kind, strength):
    assert_matches_loop(kind, inputs(kind, strength, T=100))


@pytest.mark.parametrize("T", [*range(1, 10), 33, 65])
@pytest.mark.parametrize("kind", KINDS)
def test_any_length(kind, T):
    assert_matches_loop(kind, inputs(kind, -0.5, T))


@pytest.mark.parametrize("kind", KINDS)
def test_many_segments_and_odd_chunks(kind):
    assert_matches_loop(kind, inputs(kind, -0.05, T=100), chunk_size=7)  # five chunks a segment


@pytest.mark.parametrize("kind", KINDS)
def test_fp64_is_fp64_throughout(kind):
    assert_matches_loop(kind, inputs(kind, "mixed", T=70), dtype=torch.float64, rtol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind):
    tensors = inputs(kind, -0.7, T=9, dtype=torch.float64, sizes=(1, 1, 2, 3))
    assert torch.autograd.gradcheck(chunked(kind, chunk_size=4), require_grad(tensors))


@pytest.mark.parametrize("kind", KINDS)
def test_the_recurrent_form_is_the_recurrence_and_twice_differentiable(kind):
    assert_matches_loop(kind, inputs(kind, -2.0, T=9), sequential=True)
    tensors = inputs(kind, -0.7, T=3, dtype=torch.float64, sizes=(1, 1, 2, 3))

    def recurrent(q, k, v, g, S):
        return recurrent_decayed_scan(q, k, v, g, decay_axis=axis_of(kind), initial_state=S)[0]

    assert torch.autograd.gradgradcheck(recurrent, require_grad(tensors))


@pytest.mark.parametrize("strength", [-0.5, "mixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_output_depends_on_a_later_token_bit_for_bit(kind, strength):
    T = 75
    q, k, v, g, S = inputs(kind, strength, T)
    before = chunked(kind)(q, k, v, g, S)[0]
    for t in (1, 31, 32, 50, 63, 64, 74):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[:, :, t] = 100.0 * torch.randn_like(x[:, :, t])
        g_changed = g
        if g is not None and g.ndim > 1:
            g_changed = g.clone()
            g_changed[:, :, t] = -20.0 * torch.rand_like(g[:, :, t])
        after = chunked(kind)(*changed, g_changed, S)[0]
        assert torch.equal(after[:, :, :t], before[:, :, :t]), t
        assert not torch.equal(after[:, :, t:], before[:, :, t:])


@pytest.mark.parametrize("kind", KINDS)
def test_two_calls_joined_by_the_state_equal_one(kind):
    q, k, v, g, S = inputs(kind, -0.3, T=90)
    whole, last = chunked(kind)(q, k, v, g, S)
    parts = []
    for time in (slice(0, 41), slice(41, 42), slice(42, 90)):
        g_part = g if g is None or g.ndim == 1 else g[:, :, time]
        part, S = chunked(kind)(q[:, :, time], k[:, :, time], v[:, :, time], g_part, S)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, dim=2), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(S, last, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_computed_in_fp32(kind, autocast):
    tensors = [x if x is None else x.bfloat16() for x in inputs(kind, -0.3, T=100)]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        actual = with_gradients(chunked(kind), tensors, torch.bfloat16)
    expected = with_gradients(lambda *x: loop(*x, axis=axis_of(kind), scale=0.3), tensors, torch.float64)
    assert actual[0].dtype == torch.bfloat16 and actual[1].dtype == torch.float32
    assert (actual[1].double() - expected[1]).norm() <= 1e-6 * expected[1].norm()
    for x, y in zip(actual, expected, strict=True):
        assert (x.double() - y).norm() <= 4e-3 * y.norm()  # one rounding to bf16


@pytest.mark.parametrize("kind", ["constant", "scalar", "key", "value"])
def test_minus_infinity_resets_the_state(kind):
    q, k, v, g, S = inputs(kind, -0.3, T=50)
    if kind == "constant":
        g[0] = -torch.inf
    else:
        g[:, :, 20] = -torch.inf
    for actual, expected in zip(chunked(kind)(q, k, v, g, S), loop(q, k, v, g, S, axis=axis_of(kind), scale=0.3)):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_gradients_without_an_initial_state_and_only_through_the_final_state():
    q, k, v, g, _ = require_grad(inputs("key", -0.3, T=40))
    _, state = decayed_scan(q, k, v, g, output_final_state=True)
    assert decayed_scan(q, k, v, g)[1] is None
    actual = torch.autograd.grad(state.square().sum(), (k, v, g))
    _, state = loop(q, k, v, g, torch.zeros(B, H, K, V))
    for x, y in zip(actual, torch.autograd.grad(state.square().sum(), (k, v, g))):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"key": torch.zeros(B, H, 8, K + 1)}, "query and key"),
        ({"value": torch.zeros(B, H, 9, V)}, "value"),
        ({"log_decay": torch.zeros(B, H, 8, V)}, "log_decay"),
        ({"log_decay": torch.zeros(B, H, 8, K), "decay_axis": "value"}, "log_decay"),
        ({"log_decay": torch.zeros(H + 1)}, "log_decay"),
        ({"decay_axis": "keys"}, "decay_axis"),
        ({"initial_state": torch.zeros(B, H, V, K)}, "initial_state"),
        ({"chunk_size": 0}, "chunk_size"),
    ],
)
def test_misfits_are_named(change, message):
    arguments = {
        "query": torch.zeros(B, H, 8, K),
        "key": torch.zeros(B, H, 8, K),
        "value": torch.zeros(B, H, 8, V),
    }
    with pytest.raises(ValueError, match=message):
        decayed_scan(**(arguments | change))
