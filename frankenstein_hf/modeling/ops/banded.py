"""Products of every token with the last W tokens: scores, weighted sums, and the longest combination.

Shapes: B batch, H heads, T time, K width, W window. What is looked back at starts W − 1 tokens earlier.

The first three functions are the derivatives of Σ_{t,b} weights_tb · x_t · y_{t−b}; each is the others' backward. They
go diagonal by diagonal and in place: autograd's own backward of a shifted slice would fill a buffer of full length.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .numerics import flush_tiny, full_precision

POWER_SQUARINGS = 12  # 4096 steps of power iteration


def banded_scores(x: Tensor, y: Tensor) -> Tensor:
    """[B, H, T, W]: x_t · y_{t−b} for b < W, where y [B, H, W−1+T, K] starts W − 1 tokens before x [B, H, T, K]."""
    return _BandedScores.apply(x, y)


def banded_product(weights: Tensor, y: Tensor) -> Tensor:
    """[B, H, T, K]: Σ_b weights_tb y_{t−b}; weights [B, H, T, W], y as in `banded_scores`."""
    return _BandedProduct.apply(weights, y)


def banded_transpose(weights: Tensor, x: Tensor) -> Tensor:
    """[B, H, W−1+T, K]: Σ_b weights_{s+b,b} x_{s+b} for every s from W − 1 tokens before x [B, H, T, K] on."""
    return _BandedTranspose.apply(weights, x)


def _diagonals(y: Tensor, T: int) -> list[Tensor]:
    """y_{t−b} for all t, by b."""
    return [y[:, :, b : b + T] for b in reversed(range(y.shape[2] - T + 1))]


class _BandedScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return torch.stack([(x * y_b).sum(-1) for y_b in _diagonals(y, x.shape[2])], dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors
        needs_x, needs_y = ctx.needs_input_grad
        return banded_product(grad, y) if needs_x else None, banded_transpose(grad, x) if needs_y else None


class _BandedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(weights, y)
        first, *rest = zip(weights.unsqueeze(-2).unbind(-1), _diagonals(y, weights.shape[2]))
        out = first[0] * first[1]
        for weight, y_b in rest:
            out.addcmul_(weight, y_b)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, y = ctx.saved_tensors
        needs_weights, needs_y = ctx.needs_input_grad
        return banded_scores(grad, y) if needs_weights else None, banded_transpose(weights, grad) if needs_y else None


class _BandedTranspose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(weights, x)
        B, H, T, W = weights.shape
        out = x.new_zeros(B, H, W - 1 + T, x.shape[-1])
        for weight, out_b in zip(weights.unsqueeze(-2).unbind(-1), _diagonals(out, T)):
            out_b.addcmul_(weight, x)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, x = ctx.saved_tensors
        needs_weights, needs_x = ctx.needs_input_grad
        return banded_scores(x, grad) if needs_weights else None, banded_product(weights, grad) if needs_x else None


@full_precision
@torch.no_grad()
def dominant_combination(x: Tensor, window: int) -> Tensor:
    """Top eigenvector u [B, H, T, W] of the Gram matrix of x_t, x_{t−1}, … x_{t−W+1}: Σ_b u_b x_{t−b} is the longest.

    ‖Σ_b u_b x_{t−b}‖² is then the largest eigenvalue of XᵀX, and its gradient with u held fixed is the eigenvalue's.

    Args:
        x: [B, H, W−1+T, K] in at least fp32. A window of zeros gives u = 0.
        window: W.
    """
    W, T = window, x.shape[2] - window + 1
    dots = banded_scores(x, F.pad(x, (0, 0, W - 1, 0)))  # [B, H, W−1+T, W]
    entries = [[dots[:, :, W - 1 - min(b, c) :, abs(b - c)][:, :, :T] for c in range(W)] for b in range(W)]
    gram = torch.stack([torch.stack(row, dim=-1) for row in entries], dim=-2)
    for _ in range(POWER_SQUARINGS):  # of unit trace, squared over and over: tends to u uᵀ
        trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
        gram = flush_tiny(gram / trace.clamp_min(torch.finfo(gram.dtype).tiny))
        gram = gram @ gram
    column = gram.diagonal(dim1=-2, dim2=-1).argmax(-1, keepdim=True)
    u = gram.gather(-1, column.unsqueeze(-2).expand(*gram.shape[:-1], 1))[..., 0]
    return u / u.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(u.dtype).tiny)
