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

JACOBI_SWEEPS = 2  # and one for each bit of W: converged in fp64


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
    dots = banded_scores(x, F.pad(x, (0, 0, W - 1, 0))).unbind(-1)  # of distance d: [B, H, W−1+T]
    gram = [[dots[abs(b - c)][:, :, W - 1 - min(b, c) :][:, :, :T] for c in range(W)] for b in range(W)]
    trace = torch.stack([gram[b][b] for b in range(W)]).sum(0)
    scale = trace.clamp_min(torch.finfo(trace.dtype).tiny).reciprocal()
    values, vectors = _jacobi([[entry * scale for entry in row] for row in gram])
    top = torch.stack(values, dim=-1).argmax(-1, keepdim=True)
    u = torch.stack([torch.stack(row, dim=-1).gather(-1, top)[..., 0] for row in vectors], dim=-1)
    return u * (trace > 0)[..., None]


def _jacobi(A: list[list[Tensor]]) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Eigenvalues and the eigenvectors, as columns, of symmetric matrices given entry by entry, by plane rotations.

    Each rotation zeroes one entry in all the matrices at once; a few sweeps over all entries converge quadratically,
    however near each other the eigenvalues are.
    """
    W = len(A)
    one, zero = torch.ones_like(A[0][0]), torch.zeros_like(A[0][0])
    tiny = torch.finfo(one.dtype).tiny
    V = [[one if b == c else zero for c in range(W)] for b in range(W)]
    for _ in range(JACOBI_SWEEPS + W.bit_length() if W > 2 else W - 1):
        for p in range(W):
            for q in range(p + 1, W):
                off, gap = flush_tiny(A[p][q]), A[q][q] - A[p][p]
                root = torch.addcmul(gap * gap, off, off, value=4.0).sqrt_()
                tangent = 2.0 * off * torch.where(gap < 0, -one, one) / (gap.abs() + root).clamp_min(tiny)
                cosine = torch.addcmul(one, tangent, tangent).rsqrt_()
                sine = tangent * cosine
                A[p][p], A[q][q] = A[p][p] - tangent * off, A[q][q] + tangent * off
                A[p][q] = A[q][p] = zero
                for r in range(W):
                    if r not in (p, q):
                        at_p, at_q = A[r][p], A[r][q]
                        A[r][p] = A[p][r] = cosine * at_p - sine * at_q
                        A[r][q] = A[q][r] = sine * at_p + cosine * at_q
                    at_p, at_q = V[r][p], V[r][q]
                    V[r][p], V[r][q] = cosine * at_p - sine * at_q, sine * at_p + cosine * at_q
    return [A[b][b] for b in range(W)], V
