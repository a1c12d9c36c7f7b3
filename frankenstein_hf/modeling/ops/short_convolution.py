"""Short causal depthwise convolution, y_t = bias + Σ_w weight_w · x_{t-W+1+w}, over a row and the inputs before it.

Shapes: B batch, T time, D channels, W taps (the last one meets the current token).

A depthwise convolution of a few taps is W shifted multiply-adds. Doing them in place in one autograd function is, with
the backward pass, two to four times as fast on a CPU as `F.conv1d(groups=D)` (which wants channels first) and two to
three times as fast as the same sum through autograd (which fills a T-sized buffer per tap). Only `x` itself is kept.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .numerics import at_least_fp32

BLOCK = 2**17  # numbers of a block: half a megabyte, what a core's cache holds beside its temporaries
EPS = 1e-6  # of the length of a head


def short_convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None, tail: Tensor | None = None) -> Tensor:
    """Convolve every channel of `x` with its own taps, looking at the current and the W-1 preceding tokens only.

    Args:
        x: [B, T, D], any floating dtype, T ≥ 1.
        weight: [D, W], the last tap meets the current token (a `Conv1d(groups=D)` weight without its middle axis).
        bias: [D] or None.
        tail: [B, W-1, D], the W-1 inputs that preceded `x`, oldest first; None means zeros.

    Returns:
        [B, T, D] in the dtype of `x`, accumulated in at least fp32. Differentiable twice.

    Raises:
        ValueError: if the shapes do not fit together.
    """
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[0] != x.shape[2] or weight.shape[1] < 1:
        raise ValueError(
            f"short_convolution wants x [B, T, D] and weight [D, W]; got {list(x.shape)} and {list(weight.shape)}"
        )
    B, _, D = x.shape
    if bias is not None and bias.shape != (D,):
        raise ValueError(f"short_convolution: bias must be [D] = [{D}], got {list(bias.shape)}")
    if tail is not None and tail.shape != (B, weight.shape[1] - 1, D):
        raise ValueError(
            f"short_convolution: tail must be [B, W-1, D] = [{B}, {weight.shape[1] - 1}, {D}], got {list(tail.shape)}"
        )
    return _ShortConvolution.apply(x, weight, bias, tail)


class _ShortConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, tail)
        T, W = x.shape[1], weight.shape[1]
        x_wide, taps = _channels_last(x), _taps(weight)
        y = x_wide * taps[-1] if bias is None else torch.addcmul(at_least_fp32(bias), x_wide, taps[-1])
        for shift in range(1, W):
            tap, border = taps[W - 1 - shift], min(shift, T)  # outputs before `border` reach back into the tail
            y[:, border:].addcmul_(x_wide[:, : T - border], tap)
            if tail is not None:
                y[:, :border].addcmul_(at_least_fp32(tail[:, W - 1 - shift : W - 1 - shift + border]), tap)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        # Differentiable operations only: a second derivative comes for free. Autograd casts to the inputs' dtypes.
        x, weight, tail = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_tail = ctx.needs_input_grad
        T, W = x.shape[1], weight.shape[1]
        dy, x, taps = _channels_last(dy), _channels_last(x), _taps(weight)
        if tail is not None:
            tail = at_least_fp32(tail)
        dx = dy * taps[-1] if needs_x else None
        dtaps = [(x * dy).sum((0, 1))] if needs_weight else []
        dtail = torch.zeros_like(tail) if needs_tail else None
        for shift in range(1, W):
            tap, border = taps[W - 1 - shift], min(shift, T)
            in_tail = slice(W - 1 - shift, W - 1 - shift + border)
            if dx is not None:
                dx[:, : T - border].addcmul_(dy[:, border:], tap)
            if dtail is not None:
                dtail[:, in_tail].addcmul_(dy[:, :border], tap)
            if needs_weight:
                dtap = (x[:, : T - border] * dy[:, border:]).sum((0, 1))
                dtaps.append(dtap if tail is None else dtap + (tail[:, in_tail] * dy[:, :border]).sum((0, 1)))
        dweight = torch.stack(dtaps[::-1], dim=1) if needs_weight else None
        return dx, dweight, dy.sum((0, 1)) if needs_bias else None, dtail


class Stream(NamedTuple):
    """Some of the channels, in order; with a head width, heads of that width are brought to length one."""

    channels: int
    unit_heads: int | None = None


def convolved_streams(
    x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor | None, streams: tuple[Stream, ...]
) -> tuple[Tensor, ...]:
    """`short_convolution`, then SiLU, then heads of length one (as `l2_normalize` makes them), in one pass.

    Args:
        x, weight, bias, tail: As in `short_convolution`.
        streams: How the channels are parted; their sum is D.

    Returns:
        [B, T, channels] of every stream, in the dtype of `x`, unit heads in at least fp32. Once differentiable.
    """
    return _ConvolvedStreams.apply(x, weight, bias, tail, streams)


class _ConvolvedStreams(torch.autograd.Function):
    """Walks over blocks of a row that stay in the processor's cache; the backward pass recomputes each from `x`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor | None, streams: tuple[Stream, ...]
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight, bias, tail)
        ctx.streams = streams
        wide, taps = _channels_last(x), _taps(weight)
        bias, tail = (None if y is None else at_least_fp32(y) for y in (bias, tail))
        outputs = tuple(
            torch.empty(*x.shape[:2], n, dtype=wide.dtype if unit else x.dtype, device=x.device) for n, unit in streams
        )
        for rows, start, stop in _blocks(x):
            u = _convolve(wide, taps, bias, tail, rows, start, stop)
            for output, part, (_, unit) in zip(outputs, u.split([n for n, _ in streams], dim=-1), streams):
                out = output[rows, start:stop]
                if unit is None:
                    out.copy_(F.silu(part)) if out.dtype != part.dtype else torch.ops.aten.silu.out(part, out=out)
                else:
                    heads = F.silu(part).unflatten(-1, (-1, unit))
                    torch.mul(heads, _inverse_length(heads), out=out.unflatten(-1, (-1, unit)))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, tail = ctx.saved_tensors
        W, sizes = weight.shape[1], [n for n, _ in ctx.streams]
        wide, taps = _channels_last(x), _taps(weight)
        bias, tail = (None if y is None else at_least_fp32(y) for y in (bias, tail))
        dx, dtaps = torch.empty(x.shape, dtype=wide.dtype, device=x.device), torch.zeros_like(taps)
        dbias, dtail = (None if y is None else torch.zeros_like(y) for y in (bias, tail))
        for rows, start, stop in _blocks(x):
            u = _convolve(wide, taps, bias, tail, rows, start, stop)
            dy = torch.empty_like(u)
            for grad, part, d_part, (_, unit) in zip(grads, u.split(sizes, -1), dy.split(sizes, -1), ctx.streams):
                d_part.copy_(grad[rows, start:stop])
                if unit is not None:
                    heads, d_heads = (y.unflatten(-1, (-1, unit)) for y in (F.silu(part), d_part))
                    inverse = _inverse_length(heads)
                    heads.mul_(inverse)
                    along = (heads * d_heads).sum(-1, keepdim=True)
                    d_heads.addcmul_(heads, along, value=-1).mul_(inverse)
            du = torch.ops.aten.silu_backward(dy, u)
            torch.mul(du, taps[-1], out=dx[rows, start:stop])
            products = torch.mul(wide[rows, start:stop], du, out=u)
            dtaps[-1] += products.sum((0, 1))
            if dbias is not None:
                dbias += du.sum((0, 1))
            for shift in range(1, W):
                tap, border = W - 1 - shift, max(0, min(shift - start, stop - start))
                if start + border < stop:
                    earlier = slice(start + border - shift, stop - shift)
                    dx[rows, earlier].addcmul_(du[:, border:], taps[tap])
                    dtaps[tap] += torch.mul(wide[rows, earlier], du[:, border:], out=products[:, border:]).sum((0, 1))
                if border and tail is not None and dtail is not None:
                    before = slice(tap + start, tap + start + border)
                    dtail[rows, before].addcmul_(du[:, :border], taps[tap])
                    dtaps[tap] += (tail[rows, before] * du[:, :border]).sum((0, 1))
        return dx.to(x.dtype), dtaps.t().to(weight.dtype), dbias, dtail, None


def _inverse_length(heads: Tensor) -> Tensor:
    return heads.square().sum(-1, keepdim=True).add_(EPS).rsqrt_()


def _blocks(x: Tensor) -> list[tuple[slice, int, int]]:
    """Rows, first token and token after the last of each block, a row's own in order."""
    B, T, D = x.shape
    length = min(T, max(16, BLOCK // D))
    rows = max(1, BLOCK // (D * length))
    return [(slice(b, b + rows), t, min(t + length, T)) for b in range(0, B, rows) for t in range(0, T, length)]


def _convolve(
    x: Tensor, taps: Tensor, bias: Tensor | None, tail: Tensor | None, rows: slice, start: int, stop: int
) -> Tensor:
    """The convolution of one block, [rows, stop − start, D]."""
    own = x[rows, start:stop]
    y = own * taps[-1] if bias is None else torch.addcmul(bias, own, taps[-1])
    W = taps.shape[0]
    for shift in range(1, W):
        border = max(0, min(shift - start, stop - start))  # outputs before it reach back into the tail
        if start + border < stop:
            y[:, border:].addcmul_(x[rows, start + border - shift : stop - shift], taps[W - 1 - shift])
        if border and tail is not None:
            before = slice(W - 1 - shift + start, W - 1 - shift + start + border)
            y[:, :border].addcmul_(tail[rows, before], taps[W - 1 - shift])
    return y


def _channels_last(x: Tensor) -> Tensor:
    """`x` in at least fp32 with adjacent channels, which is what makes the broadcast multiply-adds vectorise."""
    x = at_least_fp32(x)
    return x if x.stride(-1) == 1 else x.contiguous()


def _taps(weight: Tensor) -> Tensor:
    return at_least_fp32(weight).t().contiguous()  # [W, D]
