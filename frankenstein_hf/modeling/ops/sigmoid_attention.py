"""Attention whose weights are sigmoids, each key on its own, tile by tile.

Shapes: B batch, G key/value heads, H query heads, T queries, S keys, K, V head widths; N = B·G, R = H/G.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .biased_attention import KEYS, QUERIES, Visible, key_tiles, query_tiles
from .numerics import LOG_TINY, at_least_fp32, full_precision, untraced


def eager_sigmoid_attention(
    query: Tensor, key: Tensor, value: Tensor, level: Tensor, mask: Tensor, normalize: bool = False,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """σ(q kᵀ / √K + level) v over the visible keys, with the weights materialised; twice differentiable.

    Args:
        query: [B, H, T, K].
        key, value: [B, G, S, K] and [B, G, S, V].
        level: [B, H, T] added to the logits of each query.
        mask: [B or 1, 1, T, S] True = visible.
        normalize: Divide every query's weights by their sum.
        dropout: Probability of dropping a weight.

    Returns:
        Output [B, H, T, V] and weights [B, H, T, S].
    """
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    logits = at_least_fp32(query * query.shape[-1] ** -0.5 @ key.mT) + level[..., None]
    weights = logits.clamp_min(LOG_TINY).sigmoid().masked_fill(~mask, 0.0)
    if normalize:
        mass = weights.sum(-1, keepdim=True)
        weights = weights / mass.masked_fill(mass == 0, 1.0)
    weights = F.dropout(weights, dropout, training=dropout > 0).to(query.dtype)
    return weights @ value, weights


def sigmoid_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    level: Tensor,
    last: Tensor,
    normalize: bool = False,
    *,
    tile: tuple[int, int] = (QUERIES, KEYS),
) -> Tensor:
    """The same for queries that see the keys up to `last` [B or 1, T] (−1: none); once differentiable.

    Args:
        query, key, value, level, normalize: As in `eager_sigmoid_attention`.
        last: Place of the last key each query sees.
        tile: Queries and keys of a tile.

    Returns:
        Output [B, H, T, V] in the dtype of `query`; zero where nothing is seen.
    """
    (B, H, T, K), G = query.shape, key.shape[1]
    # the level is one more channel, which keys meet with a one
    q = torch.cat([at_least_fp32(query) * K**-0.5, at_least_fp32(level)[..., None]], dim=-1)
    k, v = (at_least_fp32(x).flatten(0, 1) for x in (key, value))
    out = _run(q.view(B * G, H // G, T, K + 1), F.pad(k, (0, 1), value=1.0), v, last, normalize, tile)
    return out.view(B, H, T, -1).to(query.dtype)


@untraced
@full_precision
def _run(q: Tensor, k: Tensor, v: Tensor, last: Tensor, normalize: bool, tile: tuple[int, int]) -> Tensor:
    return _SigmoidAttention.apply(q, k, v, last, normalize, tile)


class _SigmoidAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, last: Tensor, normalize: bool, tile: tuple[int, int]
    ) -> Tensor:
        (N, R, T), (S, V) = q.shape[:3], v.shape[1:]
        visible = Visible(last, N // len(last), S)
        out = v.new_zeros(N, R, T, V)
        mass = v.new_zeros(N, R, T, 1)
        for n, i in query_tiles(q, S, tile):
            rows = q[n, :, i].flatten(1, 2)
            total, sums = v.new_zeros(*rows.shape[:2], V), v.new_zeros(*rows.shape[:2], 1)
            seen_by_all, stop = visible.span(n, i)
            for j in key_tiles(stop, tile[1]):
                weights = _weights(rows @ k[n, j].mT, visible, n, i, j, seen_by_all)
                total.baddbmm_(weights, v[n, j])
                if normalize:
                    sums += weights.sum(-1, keepdim=True)
            out[n, :, i], mass[n, :, i] = total.view_as(out[n, :, i]), sums.view_as(mass[n, :, i])
        mass = mass.masked_fill_(mass == 0, 1.0) if normalize else torch.ones_like(mass)
        out = out / mass
        ctx.save_for_backward(q, k, v, out, mass)
        ctx.visible, ctx.normalize, ctx.tile = visible, normalize, tile
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, mass = ctx.saved_tensors
        return *_backward(q, k, v, out, mass, dout, ctx.visible, ctx.normalize, ctx.tile), None, None, None


@full_precision
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    mass: Tensor,
    dout: Tensor,
    visible: Visible,
    normalize: bool,
    tile: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """dS = P (1 − P) ∘ (dO Vᵀ − Σ_v dO∘O) / mass; the middle term and the mass only if the weights are normalised."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dout = dout / mass
    widened = v
    left = dout
    if normalize:
        left, widened = torch.cat([dout, -(dout * out).sum(-1, keepdim=True)], dim=-1), F.pad(v, (0, 1), value=1.0)
    for n, i in query_tiles(q, k.shape[1], tile):
        rows, do, do_left = (x[n, :, i].flatten(1, 2) for x in (q, dout, left))
        drows = torch.zeros_like(rows)
        seen_by_all, stop = visible.span(n, i)
        for j in key_tiles(stop, tile[1]):
            weights = _weights(rows @ k[n, j].mT, visible, n, i, j, seen_by_all)
            dv[n, j].baddbmm_(weights.mT, do)
            grad = torch.ops.aten.sigmoid_backward(do_left @ widened[n, j].mT, weights)
            drows.baddbmm_(grad, k[n, j])
            dk[n, j].baddbmm_(grad.mT, rows)
        dq[n, :, i] = drows.view_as(dq[n, :, i])
    return dq, dk, dv


def _weights(scores: Tensor, visible: Visible, n: slice, i: slice, j: slice, seen_by_all: int) -> Tensor:
    """Scores [n, R·C, D] -> σ in place, never subnormal, zero where hidden."""
    weights = scores.clamp_min_(LOG_TINY).sigmoid_()
    if j.stop > seen_by_all:
        hidden = visible.hidden(n, i, j)
        weights.view(len(weights), -1, *hidden.shape[2:]).masked_fill_(hidden, 0.0)
    return weights
