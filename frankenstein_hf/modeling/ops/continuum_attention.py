"""Attention as an integral over keys and values that are joined by straight lines, tile by tile.

Shapes: B batch, G key/value heads, H query heads, T queries, S keys, K, V head widths; N = B·G, R = H/G; a tile has C
        queries and D keys, the last of which end segments of the line.

Between two neighbouring keys the score runs from a to b = a + Δ. With e_a = exp a, e_b = exp b, E = e_a + e_b:
    M = ∫ exp(a + uΔ) du = (e_b − e_a) / Δ,   X = ∫ u (1 − u) exp(a + uΔ) du = (E − 2M) / Δ²,
    the weights of the two values are ∫ u exp = (M + XΔ) / 2 and ∫ (1 − u) exp = (M − XΔ) / 2,
and X is also what their derivatives with respect to a and b share. Near Δ = 0, X = E · y(Δ²/4) / 4 with y(z) = (1 −
tanh(√z)/√z) / z as a fraction of polynomials, and M = (E − Δ²X) / 2 everywhere.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .biased_attention import LOG2_E, LOG2_TINY, Visible, key_tiles, query_tiles
from .numerics import TINY, at_least_fp32, full_precision, untraced

TILE = (128, 256)  # queries and keys


def _near_zero(dtype: torch.dtype) -> float:
    """Δ² up to which the fraction is exact to rounding, and from which on nothing cancels."""
    return 1.0 if dtype == torch.float64 else 16.0


def _fraction(z: Tensor) -> Tensor:
    """y(z): the seventh convergent of tanh."""
    top = (z * 27.0).add_(2772.0).mul_(z).add_(45045.0)
    return top.div_((z * 28.0).add_(3150.0).mul_(z).add_(62370.0).mul_(z).add_(135135.0))


def eager_continuum_attention(
    query: Tensor, key: Tensor, value: Tensor, last: Tensor, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """o_i = ∫ p_i(t) v(t) dt from half a token before the first key to half a token behind the last; see the module.

    p_i(t) ∝ exp(q_i k(t) / √K), with k(t) and v(t) piecewise linear and constant over the half tokens. Materialised and
    twice differentiable.

    Args:
        query: [B, H, T, K].
        key, value: [B, G, S, K] and [B, G, S, V].
        last: [B or 1, T] place of the last key a query sees; −1: none.
        dropout: Probability of dropping a weight.

    Returns:
        Output [B, H, T, V] and the weights of the values [B, H, T, S], which sum to one.
    """
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    place, last = torch.arange(key.shape[2], device=key.device), last[:, None, :, None]
    visible = place <= last
    s = at_least_fp32(query * query.shape[-1] ** -0.5 @ key.mT).masked_fill(~visible, -torch.inf)
    reference = s.amax(-1, keepdim=True)
    s = (s - reference.masked_fill(reference == -torch.inf, 0).detach()).masked_fill(~visible, 0.0)
    e = s.exp() * visible
    e_a, e_b, Δ, both = e[..., :-1], e[..., 1:], s[..., 1:] - s[..., :-1], visible[..., 1:]
    E, small = (e_a + e_b) * both, Δ.square() <= _near_zero(s.dtype)
    far, near = torch.where(small, 4.0, Δ), torch.where(small, Δ, 0.0)
    X_far = (E - 2 * (e_b - e_a) * both / far) / far.square()
    z = near.square() / 4
    y = (45045 + z * (2772 + 27 * z)) / (135135 + z * (62370 + z * (3150 + 28 * z)))
    X = torch.where(small, E * y / 4, X_far)
    M = (E - Δ.square() * X) / 2
    weights = F.pad((M + X * Δ) / 2, (1, 0)) + F.pad((M - X * Δ) / 2, (0, 1))
    weights = weights + e / 2 * (place == 0) + e / 2 * (place == last)
    mass = weights.sum(-1, keepdim=True)
    weights = weights / mass.masked_fill(mass == 0, 1.0)
    weights = F.dropout(weights, dropout, training=dropout > 0).to(query.dtype)
    return weights @ value, weights


def continuum_attention(
    query: Tensor, key: Tensor, value: Tensor, last: Tensor, *, tile: tuple[int, int] = TILE
) -> Tensor:
    """The output of `eager_continuum_attention` without anything of size T×S; once differentiable.

    Args:
        query, key, value, last: As there.
        tile: Queries and keys of a tile.
    """
    (B, H, T, K), G = query.shape, key.shape[1]
    q = at_least_fp32(query * (K**-0.5 * LOG2_E)).reshape(B * G, H // G, T, K)
    k, v = (at_least_fp32(x).flatten(0, 1) for x in (key, value))
    return _run(q, k, v, last, tile).view(B, H, T, -1).to(query.dtype)


@untraced
@full_precision
def _run(q: Tensor, k: Tensor, v: Tensor, last: Tensor, tile: tuple[int, int]) -> Tensor:
    return _ContinuumAttention.apply(q, k, v, last, tile)


def _segments(s: Tensor, j: slice, place: Tensor | None, last: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights of the values of one tile and X of its segments, both times the density of the reference.

    Args:
        s: [n, R·C, D'] scores less their reference, in units of ln 2; D' = D, and one more for the key before the tile,
            if there is one. They are overwritten.
        j: The keys of the tile.
        place: [D'] of the keys; None when each of the queries sees more than the whole tile.
        last: [n or 1, R·C, 1] last key of each query.
    """
    before = s.shape[-1] - (j.stop - j.start)
    Δ = s[..., 1:] - s[..., :-1]
    e = torch.threshold_(s.clamp_min_(LOG2_TINY).exp2_(), TINY, 0.0)
    E, rise = e[..., :-1] + e[..., 1:], e[..., 1:] - e[..., :-1]
    if place is not None:
        assert last is not None
        both = torch.le(place[1:], last).to(s.dtype)
        E.mul_(both)
        rise.mul_(both)
    Δ.div_(LOG2_E)
    square, border = Δ * Δ, _near_zero(s.dtype)
    bounded = square.clamp_min(border)
    far = rise.mul_(Δ).div_(bounded).mul_(-2.0).add_(E).div_(bounded)
    near = _fraction(square * 0.25).mul_(E).mul_(0.25)
    X = near.lerp_(far, (square - border).mul_(1e30).clamp_(0.0, 1.0))
    M = E.sub_(square.mul_(X)).mul_(0.5)
    half = Δ.mul_(X).mul_(0.5)
    M.mul_(0.5)
    weights = torch.zeros_like(e)
    weights[..., 1:].add_(M).add_(half)
    weights[..., :-1].add_(M).sub_(half)
    if j.start == 0:
        own = e[..., 0] * 0.5
        weights[..., 0] += own if last is None else own * (last[..., 0] >= 0)
    if place is not None:
        assert last is not None
        weights[..., before:].addcmul_(e[..., before:], (place[before:] == last).to(e.dtype), value=0.5)
    return weights, X


def _hide(visible: Visible, n: slice, i: slice, j: slice, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Places of the keys and last keys of the queries of a tile, as `_segments` wants them."""
    rows = visible.rows(n, i).expand(-1, shape[1], -1, -1).flatten(1, 2)
    return visible.place[max(j.start - 1, 0) : j.stop], rows


class _ContinuumAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, last: Tensor, tile: tuple[int, int]) -> Tensor:
        (N, R, T), (S, V) = q.shape[:3], v.shape[1:]
        visible = Visible(last, N // len(last), S)
        out, level = v.new_zeros(N, R, T, V), q.new_zeros(N, R, T)
        for n, i in query_tiles(q, S, tile):
            shape, rows = q[n, :, i].shape[:3], q[n, :, i].flatten(1, 2)
            total, mass = v.new_zeros(*rows.shape[:2], V), q.new_zeros(*rows.shape[:2], 1)
            largest = torch.full_like(mass, -torch.inf)
            seen_by_all, stop = visible.span(n, i)
            for j in key_tiles(stop, tile[1]):
                keys = slice(max(j.start - 1, 0), j.stop)
                scores = rows @ k[n, keys].mT
                place = last_keys = None
                if j.stop >= seen_by_all:  # the last key of some query is in the tile
                    place, last_keys = _hide(visible, n, i, j, shape)
                    hidden = place > last_keys
                    seen = scores.masked_fill(hidden, -torch.inf)
                new = torch.maximum(largest, (scores if place is None else seen).amax(-1, keepdim=True))
                reference = new.masked_fill(new == -torch.inf, 0)
                scores.sub_(reference)
                if place is not None:
                    scores.masked_fill_(hidden, 0.0)
                weights, _ = _segments(scores, j, place, last_keys)
                shrink = torch.threshold((largest - reference).clamp_min_(LOG2_TINY).exp2_(), TINY, 0.0)
                mass = mass.mul_(shrink).add_(weights.sum(-1, keepdim=True))
                total = total.mul_(shrink).baddbmm_(weights, v[n, keys])
                largest = new
            seen_any = mass > 0
            out[n, :, i] = (total / mass.masked_fill(~seen_any, 1)).view(*shape, V)
            level[n, :, i] = (largest + mass.log2()).masked_fill(~seen_any, 0).view(shape)
        ctx.save_for_backward(q, k, v, out, level)
        ctx.visible, ctx.tile = visible, tile
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, level = ctx.saved_tensors
        return *_backward(q, k, v, out, level, dout, ctx.visible, ctx.tile), None, None


@full_precision
def _backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, level: Tensor, dout: Tensor, visible: Visible, tile: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """With g_j = dO · v_j − Σ_v dO∘O the gradient of a value's weight and w the weights, the scores' gradient is
    g_j w_j − (g_j − g_{j−1}) X_j + (g_{j+1} − g_j) X_{j+1}; divided by LOG2_E, as the scores are not."""
    K = k.shape[-1]
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    # one more channel subtracts the level from the scores, and Σ_v dO∘O from the weights' gradients
    q = torch.cat([q, -level[..., None]], dim=-1)
    scaled = torch.cat([dout, -(dout * out).sum(-1, keepdim=True)], dim=-1) / LOG2_E
    k, v = F.pad(k, (0, 1), value=1.0), F.pad(v, (0, 1), value=1.0)
    for n, i in query_tiles(q, k.shape[1], tile):
        shape, (rows, do, do_scaled) = q[n, :, i].shape[:3], (x[n, :, i].flatten(1, 2) for x in (q, dout, scaled))
        drows = torch.zeros_like(rows[..., :K])
        seen_by_all, stop = visible.span(n, i)
        for j in key_tiles(stop, tile[1]):
            keys = slice(max(j.start - 1, 0), j.stop)
            scores = rows @ k[n, keys].mT
            place = last_keys = None
            if j.stop >= seen_by_all:
                place, last_keys = _hide(visible, n, i, j, shape)
                scores.masked_fill_(place > last_keys, 0.0)
            weights, X = _segments(scores, j, place, last_keys)
            dv[n, keys].baddbmm_(weights.mT, do)
            g = do_scaled @ v[n, keys].mT
            step = (g[..., 1:] - g[..., :-1]).mul_(X)
            grad = g.mul_(weights)
            grad[..., 1:].sub_(step)
            grad[..., :-1].add_(step)
            drows.baddbmm_(grad, k[n, keys, :K])
            dk[n, keys].baddbmm_(grad.mT, rows[..., :K])
        dq[n, :, i] = drows.view(*shape, K)
    return dq, dk, dv
