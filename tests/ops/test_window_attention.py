import pytest
import torch

from frankenstein_hf.modeling.ops.window_attention import window_attention


def dense(args, left, right, num_sinks=0, lengths=None):
    """Softmax over an explicit T x S mask, from the definition of visibility."""
    query, key, value = args
    (B, H, T, D), (K, S) = query.shape, key.shape[1:3]
    i, j = torch.arange(S - T, S)[:, None], torch.arange(S)
    mask = (i - left <= j) & (j <= i + right) | (j < num_sinks)
    if right == 0:
        mask &= j <= i
    mask = mask.expand(B, T, S)
    if lengths is not None:
        mask = mask & (j < lengths[:, None])[:, None]
    key, value = (x.repeat_interleave(H // K, dim=1) for x in (key, value))
    scores = query @ key.mT * D**-0.5
    return scores.masked_fill(~mask[:, None], -1e300).softmax(-1) @ value


def inputs(B, H, K, T, S, D, dtype=torch.float64):
    torch.manual_seed(B + 10 * H + 100 * T + S)
    return [torch.randn(B, h, t, D, dtype=dtype, requires_grad=True) for h, t in ((H, T), (K, S), (K, S))]


def rms(a, b):
    return ((a.double() - b.double()).square().mean() / b.double().square().mean()).sqrt().item()


CASES = [
    # B, H, K, T, S, D, left, right, num_sinks
    *[(2, 2, 1, T, T, 5, 3, 0, 2) for T in range(1, 10)],
    *[(1, 2, 2, T, T, 5, 2, 3, 1) for T in (1, 2, 5, 9)],
    (1, 2, 2, 300, 300, 8, 20, 0, 0),
    (2, 4, 2, 300, 300, 8, 31, 0, 4),
    (2, 6, 2, 259, 259, 7, 17, 9, 3),
    (1, 2, 1, 257, 257, 8, 0, 0, 0),
    (1, 2, 1, 200, 330, 8, 40, 0, 4),  # older keys before the first query, more than the window holds
    (1, 2, 1, 200, 210, 8, 40, 5, 4),  # fewer
    (2, 4, 2, 1, 150, 8, 40, 0, 4),  # decoding
    (1, 2, 2, 64, 64, 8, 100, 0, 4),  # the window covers the row
    (1, 2, 2, 130, 130, 8, 500, 500, 200),
    (1, 1, 1, 1800, 1800, 8, 700, 0, 0),  # whole blocks of keys masked away
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_dense_masked_softmax_with_gradients(case):
    B, H, K, T, S, D, left, right, num_sinks = case
    args = inputs(B, H, K, T, S, D)
    expected = dense(args, left, right, num_sinks)
    go = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, args, go)
    args32 = [a.detach().float().requires_grad_() for a in args]
    out = window_attention(*args32, left=left, right=right, num_sinks=num_sinks)
    assert out.shape == (B, H, T, D) and rms(out, expected) < 1e-6
    for name, grad, reference in zip("qkv", torch.autograd.grad(out, args32, go.float()), expected_grads):
        # a row that sees only itself has no score gradient at all
        assert (grad - reference).norm() < 2e-6 * reference.norm() + 1e-5, name


@pytest.mark.parametrize(("T", "right"), [(200, 0), (200, 12), (9, 0), (9, 12)])
def test_garbage_behind_the_lengths_matters_nowhere(T, right):
    args = inputs(3, 4, 2, T, T, 6)
    lengths = torch.tensor([T, T // 2, 1])
    expected = dense(args, 15, right, 2, lengths)
    spoiled = [a.detach().clone() for a in args]
    for b, length in enumerate(lengths):
        for a in spoiled:
            a[b, :, length:] = torch.nan
    spoiled = [a.requires_grad_() for a in spoiled]
    out = window_attention(*spoiled, left=15, right=right, num_sinks=2, lengths=lengths)
    real = (torch.arange(T) < lengths[:, None])[:, None, :, None]
    torch.testing.assert_close(out * real, expected * real)
    assert out.isfinite().all()
    go = torch.randn_like(out)
    grads = torch.autograd.grad(out, spoiled, go)
    for grad, reference in zip(grads, torch.autograd.grad(expected, args, go * real)):
        torch.testing.assert_close(grad, reference)


@pytest.mark.parametrize(("T", "right"), [(4, 0), (70, 0), (70, 1)])
def test_gradcheck(T, right):
    args = inputs(1, 2, 1, T, T, 2)

    def attend(q, k, v):
        return window_attention(q, k, v, left=2, right=right, num_sinks=1, scale=0.7)

    assert torch.autograd.gradcheck(attend, args, fast_mode=T > 4)


@pytest.mark.parametrize("window", [(40, 4), (1000, 0)])
def test_is_causal_bit_for_bit(window):
    left, num_sinks = window
    args = [a.detach() for a in inputs(2, 4, 2, 300, 300, 16, torch.float32)]
    before = window_attention(*args, left=left, right=0, num_sinks=num_sinks)
    changed = [a.clone() for a in args]
    for a in changed:
        a[:, :, 133] += 2.0
    after = window_attention(*changed, left=left, right=0, num_sinks=num_sinks)
    assert torch.equal(before[:, :, :133], after[:, :, :133])
    assert not torch.equal(before[:, :, 134], after[:, :, 134])


def test_non_contiguous_and_half_precision_inputs():
    args = inputs(1, 4, 2, 300, 300, 8)
    expected = dense(args, 30, 0, 4)
    turned = [a.detach().transpose(1, 2).contiguous().transpose(1, 2) for a in args]
    torch.testing.assert_close(window_attention(*turned, left=30, right=0, num_sinks=4), expected)
    half = window_attention(*[a.detach().bfloat16() for a in args], left=30, right=0, num_sinks=4)
    assert half.dtype == torch.bfloat16 and rms(half, expected) < 2e-2


def test_dropout_keeps_the_mean():
    q, k, v = (a.detach() for a in inputs(1, 2, 2, 200, 200, 4))
    plain = window_attention(q, k, v.abs(), left=30, right=0)
    dropped = window_attention(q, k, v.abs(), left=30, right=0, dropout=0.5)
    assert not torch.equal(plain, dropped)
    torch.testing.assert_close(dropped.mean(), plain.mean(), rtol=0.1, atol=0)


def test_wrong_arguments_are_refused():
    q, k, v = (a.detach() for a in inputs(2, 4, 2, 5, 6, 4))
    wrong = [
        {"query": q[0]},
        {"key": k[:, :, 1:]},
        {"query": q[:, :3]},
        {"key": k[:, :, :3], "value": v[:, :, :3]},
        {"left": -1},
        {"lengths": torch.tensor([5, 5])},
    ]
    for change in wrong:
        with pytest.raises(ValueError, match="window_attention"):
            window_attention(**{"query": q, "key": k, "value": v, "left": 2, "right": 0, **change})
