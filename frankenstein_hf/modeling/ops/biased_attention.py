"""Softmax attention with a bias of its own kind, tile by tile: nothing of size T×S arises, forwards or backwards.

Shapes: B batch, G key/value heads, R query heads a key/value head, H = G·R, T queries, S keys, K, V head widths;
        N = B·G, C queries and D keys of a tile.

A query sees the keys up to a place of its own, so rows with pads behind and a past are one case. The running maximum
of an online softmax starts at the newest keys. Weights below 1e-26 of it are zero: subnormal numbers make products
slow, and whole tiles of forgotten keys can be passed over without changing a bit. Scores are in units of ln 2, because
PyTorch computes powers of two on a CPU three times as fast as exponentials; the rest is matrix products.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .numerics import TINY, at_least_fp32, full_precision, untraced

LOG2_E = math.log2(math.e)
LOG2_TINY = -88.0  # 2^-88 < TINY
QUERIES, KEYS = 256, 256  # of a tile
ENTRIES = 1 << 19  # scores computed at a time


class Bias:
    """What is added to the scores of a tile. A subclass says how, and collects its gradient.

    Slices `n` run over N, `i` over queries, `j` over keys. A tile is [n, R, C, D]; its scores are in units of ln 2, as
    are their gradients: whoever multiplies a bias by LOG2_E on the way in multiplies its gradient by LOG2_E.
    """

    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors it is made of; gradients go to them, in this order."""
        return ()

    def begin(self, n: slice, i: slice) -> None:
        """Called before the tiles of some queries."""

    def add(self, scores: Tensor, n: slice, i: slice, j: slice, whole: bool) -> None:
        """Add the bias to a tile; `whole`: all of these queries see all of these keys."""

    def range(self, n: slice, i: slice, j: slice) -> tuple[Tensor | float, Tensor | float]:
        """Bounds of the bias of each query in a whole tile: numbers, or [n, R, C]."""
        return 0.0, 0.0

    def reset(self) -> None:
        """Called before gradients are collected."""

    def collect(self, grad: Tensor, n: slice, i: slice, j: slice) -> None:
        """Take the gradient of a tile; follows `add` of the same tile."""

    def end(self, n: slice, i: slice) -> None:
        """Called behind the tiles of some queries, when gradients are collected."""

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Of the `inputs`."""
        return ()


def biased_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    last: Tensor,
    bias: Bias,
    *,
    scale: float | None = None,
    tile: tuple[int, int] = (QUERIES, KEYS),
) -> tuple[Tensor, Tensor]:
    """softmax(scale · q kᵀ + bias, over the keys up to `last`) v.

    Args:
        query: [B, H, T, K].
        key, value: [B, G, S, K] and [B, G, S, V]; each serves H/G consecutive query heads.
        last: [B or 1, T] place of the last key each query sees; −1: none.
        bias: Of the scores.
        scale: K^−½ by default.
        tile: Queries and keys of a tile.

    Returns:
        Output [B, H, T, V] in the dtype of `query`, and the logarithm of each softmax's denominator [B, H, T] in at
        least fp32; zero and −inf where nothing is seen. Once differentiable.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    (B, H), G = query.shape[:2], key.shape[1]
    q = at_least_fp32(query * (scale * LOG2_E)).reshape(B * G, H // G, *query.shape[2:])
    k, v = (at_least_fp32(x).flatten(0, 1) for x in (key, value))
    out, lse = _run(q, k, v, last, bias, tile)
    return out.reshape(B, H, *out.shape[2:]).to(query.dtype), lse.reshape(B, H, -1)


@untraced
@full_precision
def _run(q: Tensor, k: Tensor, v: Tensor, last: Tensor, bias: Bias, tile: tuple[int, int]) -> tuple[Tensor, Tensor]:
    return _BiasedAttention.apply(q, k, v, last, bias, tile, *bias.inputs())


class Visible:
    """Which keys of a tile are seen, for queries that see those up to `last` [B or 1, T].

    Args:
        last: See `biased_attention`.
        num_groups: G.
        num_keys: S.
    """

    def __init__(self, last: Tensor, num_groups: int, num_keys: int) -> None:
        self.last = last.repeat_interleave(num_groups, dim=0) if len(last) > 1 else last
        self.num_keys = num_keys
        self.place = torch.arange(num_keys, device=last.device)

    def rows(self, n: slice, i: slice) -> Tensor:
        """[n or 1, 1, C, 1] last key of these queries."""
        return (self.last[n] if len(self.last) > 1 else self.last)[:, None, i, None]

    def span(self, n: slice, i: slice) -> tuple[int, int]:
        """Keys before the first number are seen by all of these queries, keys from the second on by none."""
        low, high = self.rows(n, i).aminmax()
        return int(low) + 1, min(int(high) + 1, self.num_keys)

    def hidden(self, n: slice, i: slice, j: slice) -> Tensor:
        """[n or 1, 1, C, D]."""
        return self.place[j] > self.rows(n, i)


def query_tiles(q: Tensor, num_keys: int, tile: tuple[int, int]) -> Iterator[tuple[slice, slice]]:
    """Slices of N and T: as many heads at a time as make `ENTRIES` scores with a tile of keys."""
    N, R, T = q.shape[:3]
    C = min(tile[0], T)
    some = max(1, ENTRIES // (R * C * min(tile[1], num_keys)))
    for n in range(0, N, some):
        for i in range(0, T, C):
            yield slice(n, min(n + some, N)), slice(i, min(i + C, T))


def key_tiles(stop: int, size: int) -> Iterator[slice]:
    """Slices of the keys before `stop`, the newest first; borders do not depend on `stop`."""
    for j in reversed(range(0, stop, size)):
        yield slice(j, min(j + size, stop))


class _BiasedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, last: Tensor, bias: Bias, tile: tuple[int, int], *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        (N, R, T), (S, V) = q.shape[:3], v.shape[1:]
        visible = Visible(last, N // len(last), S)
        out, lse = v.new_zeros(N, R, T, V), q.new_full((N, R, T), -torch.inf)
        summed = F.pad(v, (0, 1), value=1.0)  # a column of ones sums the weights
        bounds = _Bounds(q, k, bias)
        for n, i in query_tiles(q, S, tile):
            shape, rows = q[n, :, i].shape[:3], q[n, :, i].flatten(1, 2)
            total = v.new_zeros(*rows.shape[:2], V + 1)
            largest = q.new_full((*rows.shape[:2], 1), -torch.inf)
            seen_by_all, stop = visible.span(n, i)
            bias.begin(n, i)
            for j in key_tiles(stop, tile[1]):
                whole = j.stop <= seen_by_all
                if whole and bounds.forgotten(n, i, j, largest):
                    continue
                scores = rows @ k[n, j].mT
                bias.add(scores.view(*shape, -1), n, i, j, whole)
                if not whole:
                    scores.view(*shape, -1).masked_fill_(visible.hidden(n, i, j), -torch.inf)
                new = torch.maximum(largest, scores.amax(-1, keepdim=True))
                reference = new.masked_fill(new == -torch.inf, 0)
                _decay_exp2_(scores.sub_(reference), whole and bounds.mild(n, i, j, reference))
                total = total.mul_(_decay_exp2_(largest - reference)).baddbmm_(scores, summed[n, j])
                largest = new
            mass = total[..., V:]
            seen = mass > 0
            out[n, :, i] = (total[..., :V] / mass.masked_fill(~seen, 1)).view(*shape, V)
            lse[n, :, i] = (largest + mass.log2()).masked_fill(~seen, -torch.inf).view(shape)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.visible, ctx.bias, ctx.tile = visible, bias, tile
        return out, lse / LOG2_E

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = _backward(q, k, v, out, lse, dout, dlse, ctx.visible, ctx.bias, ctx.tile)
        return dq, dk, dv, None, None, None, *ctx.bias.gradients()


@full_precision
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor,
    visible: Visible,
    bias: Bias,
    tile: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """dS = P ∘ (dO Vᵀ − Σ_v dO∘O + d lse), with P = exp(S − lse) computed once more; divided by LOG2_E, as S is not."""
    K = k.shape[-1]
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    lse = lse.masked_fill(lse == -torch.inf, -LOG2_TINY)  # rows that have seen nothing have no gradient
    # one more channel subtracts the log-sum-exps from the scores, and what a softmax subtracts from its gradients
    q = torch.cat([q, -lse[..., None]], dim=-1)
    offset = dlse - (dout * out).sum(-1)
    scaled = torch.cat([dout, offset[..., None]], dim=-1) / LOG2_E
    k, v = F.pad(k, (0, 1), value=1.0), F.pad(v, (0, 1), value=1.0)
    bounds = _Bounds(q[..., :K], k[..., :K], bias)
    bias.reset()
    for n, i in query_tiles(q, k.shape[1], tile):
        shape, (rows, do, do_scaled) = q[n, :, i].shape[:3], (x[n, :, i].flatten(1, 2) for x in (q, dout, scaled))
        level, drows = lse[n, :, i].flatten(1)[..., None], torch.zeros_like(rows[..., :K])
        seen_by_all, stop = visible.span(n, i)
        bias.begin(n, i)
        for j in key_tiles(stop, tile[1]):
            whole = j.stop <= seen_by_all
            if whole and bounds.forgotten(n, i, j, level):
                continue
            weights = rows @ k[n, j].mT
            bias.add(weights.view(*shape, -1), n, i, j, whole)
            if not whole:
                weights.view(*shape, -1).masked_fill_(visible.hidden(n, i, j), -torch.inf)
            _decay_exp2_(weights, whole and bounds.mild(n, i, j, level))
            dv[n, j].baddbmm_(weights.mT, do)
            grad = (do_scaled @ v[n, j].mT).mul_(weights)
            bias.collect(grad.view(*shape, -1), n, i, j)
            drows.baddbmm_(grad, k[n, j, :K])
            dk[n, j].baddbmm_(grad.mT, rows[..., :K])
        bias.end(n, i)
        dq[n, :, i] = drows.view(*shape, K)
    return dq, dk, dv


class _Bounds:
    """What is known of a tile before it is computed: |q·k| ≤ ‖q‖ ‖k‖, and where its bias lies."""

    def __init__(self, q: Tensor, k: Tensor, bias: Bias) -> None:
        self.q, self.k, self.bias = q.norm(dim=-1) * 1.01, k.norm(dim=-1), bias  # a little more, for rounding

    def _product(self, n: slice, i: slice, j: slice) -> Tensor:
        return self.q[n, :, i] * self.k[n, j].amax(-1)[:, None, None]

    def forgotten(self, n: slice, i: slice, j: slice, level: Tensor) -> bool:
        """Whether every weight 2^(score − level) will be zero; level is [n, R·C, 1]."""
        _, upper = self.bias.range(n, i, j)
        return bool((upper + self._product(n, i, j) < level.view(-1, *self.q[n, :, i].shape[1:]) + LOG2_TINY).all())

    def mild(self, n: slice, i: slice, j: slice, level: Tensor) -> bool:
        """Whether none will be."""
        lower, _ = self.bias.range(n, i, j)
        return bool((lower - self._product(n, i, j) > level.view(-1, *self.q[n, :, i].shape[1:]) + LOG2_TINY + 2).all())


def _decay_exp2_(x: Tensor, mild: bool = False) -> Tensor:
    """2^x in place, exactly zero below 1e-26; `mild`: no x is that small."""
    return x.exp2_() if mild else torch.threshold_(x.clamp_min_(LOG2_TINY).exp2_(), TINY, 0.0)
