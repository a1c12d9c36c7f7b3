import pytest
import torch

from frankenstein_hf.modeling.ops.lse_merge import merge_partial_softmax


def partial(scores, values):
    """Softmax attention over one set of keys and its log-sum-exp; a set that is masked away gives NaN and -inf."""
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


def test_union_equals_one_softmax_with_gradients():
    torch.manual_seed(0)
    scores = (torch.randn(2, 3, 5, 12, dtype=torch.float64) * 20).requires_grad_()
    values = torch.randn(2, 3, 12, 4, dtype=torch.float64, requires_grad=True)
    parts = [(0, 1), (1, 6), (6, 12)]
    outputs, lses = zip(*[partial(scores[..., a:b], values[..., a:b, :]) for a, b in parts])
    merged = merge_partial_softmax(outputs, lses)
    expected = partial(scores, values)
    for one, other in zip(merged, expected):
        go = torch.randn_like(other)
        torch.testing.assert_close(one, other)
        grads = torch.autograd.grad(one, [scores, values], go, retain_graph=True, allow_unused=True)
        for grad, reference in zip(grads, torch.autograd.grad(other, [scores, values], go, True, allow_unused=True)):
            if reference is not None:
                torch.testing.assert_close(grad, reference)


def test_parts_that_saw_nothing_count_nothing_and_keep_gradients_finite():
    torch.manual_seed(1)
    outputs = [torch.randn(4, 3, requires_grad=True) for _ in range(2)]
    lses = [torch.randn(4, requires_grad=True) for _ in range(2)]
    blind = torch.tensor([[False, True, True, False], [False, False, True, False]])
    seen_out = [o.masked_fill(b[:, None], torch.nan) for o, b in zip(outputs, blind)]
    seen_lse = [m.masked_fill(b, -torch.inf) for m, b in zip(lses, blind)]
    out, lse = merge_partial_softmax(seen_out, seen_lse)
    torch.testing.assert_close(out[1], outputs[1][1])
    torch.testing.assert_close(lse[1], lses[1][1])
    assert torch.equal(out[2], torch.zeros(3)) and lse[2] == -torch.inf
    for grad in torch.autograd.grad(out.sum() + lse[[0, 1, 3]].sum(), [*outputs, *lses]):
        assert grad.isfinite().all() and (grad[2] == 0).all()


def test_half_precision_parts_are_weighted_in_fp32():
    torch.manual_seed(2)
    outputs = [torch.randn(64, 8).bfloat16() for _ in range(3)]
    lses = [300 + torch.randn(64) for _ in range(3)]
    out, lse = merge_partial_softmax(outputs, lses)
    exact, _ = merge_partial_softmax([o.double() for o in outputs], [m.double() for m in lses])
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), exact, rtol=4e-3, atol=1e-5)


def test_wrong_parts_are_refused():
    o, m = torch.zeros(2, 3), torch.zeros(2)
    for outputs, lses in [([], []), ([o], [m, m]), ([o], [o]), ([o, torch.zeros(2, 4)], [m, m])]:
        with pytest.raises(ValueError, match="merge_partial_softmax"):
            merge_partial_softmax(outputs, lses)
