"""Normalise heads, scale them and gate them, in one pass over blocks that stay in the processor's cache.

Shapes: N tokens, H heads, W head width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .numerics import at_least_fp32

BLOCK = 2**16  # numbers of a block


def gated_norm(
    x: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, activation: str
) -> Tensor:
    """norm(x) · weight (+ bias) · activation(gate), a head at a time.

    Args:
        x: [..., H, W].
        gate: [..., H·W], or None for no gate.
        weight: [W] or [H, W].
        bias: [H, W]: the mean of each head is subtracted too (layer norm); None: root mean square norm.
        eps: Of the norm.
        activation: "silu" or "sigmoid".

    Returns:
        [..., H·W] in the dtype of `x`, computed in at least fp32. Once differentiable.
    """
    return _GatedNorm.apply(x, gate, weight, bias, eps, activation)


def gated_norm_reference(
    x: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, activation: str
) -> Tensor:
    """`gated_norm` in plain PyTorch: differentiable any number of times, and for compilers."""
    y = at_least_fp32(x)
    if bias is not None:
        y = F.layer_norm(y, y.shape[-1:], eps=eps) * weight + bias
    else:
        y = F.rms_norm(y, y.shape[-1:], eps=eps) * weight
    y = y.flatten(-2)
    if gate is not None:
        g = at_least_fp32(gate)
        y = y * (F.silu(g) if activation == "silu" else g.sigmoid())
    return y.to(x.dtype)


class _GatedNorm(torch.autograd.Function):
    """Block by block; the backward pass recomputes each block from the inputs."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, activation: str
    ) -> Tensor:
        ctx.save_for_backward(x, gate, weight, bias)
        ctx.eps, ctx.activation = eps, activation
        y = torch.empty(*x.shape[:-2], x.shape[-2] * x.shape[-1], dtype=x.dtype, device=x.device)
        xs, gates, out = _tokens(x, x), _tokens(gate, x), _tokens(y, x)
        for part in _blocks(xs):
            normed, _ = _normed(xs[part], eps, bias is not None)
            normed.mul_(weight)
            if bias is not None:
                normed.add_(bias)
            if gates is not None:
                normed.mul_(_activated(at_least_fp32(gates[part]), activation))
            out[part] = normed
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight, bias = ctx.saved_tensors
        xs, gates, dys = _tokens(x, x), _tokens(gate, x), _tokens(dy, x)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        d_gate = None if gate is None else torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        dxs, d_gates = _tokens(dx, x), _tokens(d_gate, x)
        per_head = torch.zeros(x.shape[-2:], dtype=at_least_fp32(x[:0]).dtype, device=x.device)
        d_weight, d_bias = per_head, torch.zeros_like(per_head)
        for part in _blocks(xs):
            normed, inverse = _normed(xs[part], ctx.eps, bias is not None)
            d_normed = at_least_fp32(dys[part])
            if gates is not None and d_gates is not None:
                scaled = normed * weight
                if bias is not None:
                    scaled.add_(bias)
                g = at_least_fp32(gates[part])
                scaled.mul_(d_normed)  # the gradient of the activated gate
                if ctx.activation == "silu":
                    d_gates[part] = torch.ops.aten.silu_backward(scaled, g)
                else:
                    d_gates[part] = torch.ops.aten.sigmoid_backward(scaled, g.sigmoid())
                d_normed = d_normed * _activated(g, ctx.activation)
            else:
                d_normed = d_normed.clone()
            d_weight += (d_normed * normed).sum(0)
            if bias is not None:
                d_bias += d_normed.sum(0)
            d_normed.mul_(weight)
            along = (d_normed * normed).mean(-1, keepdim=True)
            if bias is not None:
                d_normed.sub_(d_normed.mean(-1, keepdim=True))
            dxs[part] = d_normed.addcmul_(normed, along, value=-1).mul_(inverse)
        d_weight = d_weight if weight.dim() == 2 else d_weight.sum(0)
        return dx, d_gate, d_weight.to(weight.dtype), None if bias is None else d_bias.to(bias.dtype), None, None


def _tokens(y: Any, x: Tensor) -> Any:
    """[..., H, W] or [..., H·W] -> [N, H, W]."""
    return None if y is None else y.reshape(-1, *x.shape[-2:])


def _blocks(xs: Tensor) -> list[slice]:
    size = max(1, BLOCK // (xs.shape[1] * xs.shape[2]))
    return [slice(start, start + size) for start in range(0, len(xs), size)]


def _normed(x: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """x over its deviation or root mean square, and the inverse of that."""
    y = at_least_fp32(x)
    if centred:
        y = y - y.mean(-1, keepdim=True)
    inverse = y.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return y * inverse, inverse


def _activated(gate: Tensor, activation: str) -> Tensor:
    return F.silu(gate) if activation == "silu" else gate.sigmoid()
