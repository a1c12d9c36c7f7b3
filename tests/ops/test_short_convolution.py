import pytest
import torch

from frankenstein_hf.modeling.ops.short_convolution import short_convolution


def loop(x, weight, bias, tail):
    """y_t = bias + Σ_w weight_w x_{t-W+1+w}, token by token."""
    W = weight.shape[1]
    row = torch.cat([x.new_zeros(x.shape[0], W - 1, x.shape[2]) if tail is None else tail, x], dim=1)
    y = torch.stack([(row[:, t : t + W] * weight.t()).sum(1) for t in range(x.shape[1])], dim=1)
    return y if bias is None else y + bias


def inputs(B, T, D, W, bias=True, tail=True, dtype=torch.float64):
    torch.manual_seed(B * 1000 + T * 100 + D * 10 + W)
    made = [torch.randn(B, T, D), torch.randn(D, W), torch.randn(D) if bias else None]
    made.append(torch.randn(B, W - 1, D) if tail else None)
    return [None if a is None else a.to(dtype).requires_grad_() for a in made]


def rms(a, b):
    return ((a.double() - b.double()).square().mean() / b.double().square().mean().clamp_min(1e-30)).sqrt().item()


@pytest.mark.parametrize("W", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("T", [1, 2, 3, 5, 9, 130])
def test_equals_a_token_loop_with_all_gradients(T, W):
    args = inputs(3, T, 7, W)
    expected = loop(*args)
    go = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, args, go, allow_unused=True, materialize_grads=True)
    args32 = [a.detach().float().requires_grad_() for a in args]
    y = short_convolution(*args32)
    grads = torch.autograd.grad(y, args32, go.float())
    assert y.dtype == torch.float32 and rms(y, expected) < 1e-6
    for name, grad, reference in zip(["x", "weight", "bias", "tail"], grads, expected_grads):
        if grad.numel():
            assert rms(grad, reference) < 1e-6, name


@pytest.mark.parametrize(("bias", "tail"), [(False, False), (True, False), (False, True)])
def test_optional_inputs_default_to_zeros(bias, tail):
    args = inputs(2, 6, 5, 4, bias, tail)
    torch.testing.assert_close(short_convolution(*args), loop(*args))


@pytest.mark.parametrize("T", [1, 2, 5])
def test_first_and_second_derivatives(T):
    args = inputs(2, T, 3, 4)
    assert torch.autograd.gradcheck(short_convolution, args)
    assert torch.autograd.gradgradcheck(short_convolution, args)


def test_tail_continues_a_split_row():
    x, weight, bias, tail = inputs(2, 11, 6, 4, dtype=torch.float32)
    whole = short_convolution(x, weight, bias, tail)
    row = torch.cat([tail, x], dim=1)
    for start, stop in [(0, 1), (1, 3), (3, 8), (8, 11)]:
        part = short_convolution(x[:, start:stop], weight, bias, row[:, start : start + 3])
        torch.testing.assert_close(part, whole[:, start:stop], rtol=1e-6, atol=1e-6)


def test_is_causal_bit_for_bit():
    x, weight, bias, tail = inputs(2, 40, 33, 5, dtype=torch.float32)
    changed = x.detach().clone()
    changed[:, 17] += 3.0
    before, after = short_convolution(x, weight, bias, tail), short_convolution(changed, weight, bias, tail)
    assert torch.equal(before[:, :17], after[:, :17])
    assert not torch.equal(before[:, 21], after[:, 21]) and torch.equal(before[:, 22:], after[:, 22:])


def test_non_contiguous_inputs_and_half_precision():
    x, weight, bias, tail = inputs(2, 9, 6, 4)
    expected = loop(x, weight, bias, tail)
    turned = x.detach().transpose(1, 2).contiguous().transpose(1, 2)
    sliced = torch.cat([x, x], dim=2).detach()[..., :6]
    for view in (turned, sliced):
        torch.testing.assert_close(short_convolution(view, weight, bias, tail), expected)
    half = [a.detach().bfloat16().requires_grad_() for a in (x, weight, bias, tail)]
    y = short_convolution(*half)
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and rms(y, expected) < 2e-2
    assert all(a.grad.dtype == torch.bfloat16 for a in half)


def test_wrong_shapes_are_refused():
    x, weight, bias, tail = inputs(2, 5, 6, 4)
    for wrong in [(x, weight.t()), (x[0], weight), (x, weight, bias[:2]), (x, weight, bias, tail[:, 1:])]:
        with pytest.raises(ValueError, match="short_convolution"):
            short_convolution(*wrong)
