"""Sliding-window attention with sinks: softmax over a band of keys, at a cost proportional to the band.

Shapes: B batch, H query heads, K key/value heads (G = H/K queries share one), T queries, S keys, D head width,
        N blocks of C queries, L keys a block sees (C + left + right), Z sinks.

Queries are cut into blocks; a block attends to the L keys its band can touch, gathered as overlapping windows, with the
sinks in front of them, so that one ordinary softmax covers both. Nothing of size T x S is ever made.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .tracing import exporting


def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    left: int,
    right: int,
    num_sinks: int = 0,
    is_causal: bool | None = None,
    lengths: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention in which query i sees the keys i-left … i+right and the first `num_sinks` ones.

    A causal one is so bit for bit, sinks included: later tokens change nothing before them.

    Args:
        query: [B, H, T, D]; without `lengths` the queries are the last T of the S positions.
        key, value: [B, K, S, D] with K dividing H and S ≥ T; never expanded to H heads.
        left, right: how far a query looks back and ahead, ≥ 0 (the own token always counts besides).
        num_sinks: number of leading positions every query sees, ≥ 0.
        is_causal: whether sinks behind a query are invisible to it; by default whether `right` is 0, which it needs.
        lengths: [B] integers or None. Only the positions before `lengths[b]` of row b are real; needs T == S. What
            stands behind them, NaN included, influences no output and no gradient, and its own output is zero.
        scale: factor of the scores, 1/√D when None.
        dropout: probability of dropping an attention weight.

    Returns:
        [B, H, T, D] in the dtype of `query`.

    Raises:
        ValueError: if shapes or ranges do not fit.
    """
    is_causal = right == 0 if is_causal is None else is_causal
    _check(query, key, value, left, right, num_sinks, is_causal, lengths)
    T, S = query.shape[2], key.shape[2]
    num_sinks = num_sinks if exporting() else min(num_sinks, S)
    garbage = None
    if lengths is not None:
        garbage = (torch.arange(S, device=key.device) >= lengths.to(key.device)[:, None])[:, None, :, None]
        # Masking alone would not do: a weight of zero times NaN is NaN.
        query, key, value = (x.masked_fill(garbage, 0) for x in (query, key, value))

    real = None if is_causal else lengths  # a causal real query meets real keys only
    reached = S - max(0, S - T - left)
    block = min(512, max(64, -(-(left + right) // 128) * 64))  # half the band, the measured optimum
    if exporting() and not isinstance(T, int):  # by blocks at any length
        block = max(block, num_sinks)
        out = _blocked(query, key, value, left, right, num_sinks, is_causal, real, scale, dropout, block)
    elif block >= T or block + left + right + num_sinks >= reached:
        out = _dense(query, key, value, left, right, num_sinks, is_causal, real, scale, dropout)
    else:
        out = _blocked(query, key, value, left, right, num_sinks, is_causal, real, scale, dropout, block)
    return out if garbage is None else out.masked_fill(garbage, 0)


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    left: int,
    right: int,
    num_sinks: int,
    is_causal: bool,
    lengths: Tensor | None,
    scale: float | None,
    dropout: float,
) -> Tensor:
    """One masked attention over all keys in reach; for rows no longer than a window, and for decoding."""
    (B, H, T, D), (K, S) = query.shape, key.shape[1:3]
    if is_causal and left >= S - 1 and T in (1, S) and H == K:
        return F.scaled_dot_product_attention(query, key, value, None, dropout, is_causal=T > 1, scale=scale)
    j = torch.arange(S, device=query.device)
    i = j[S - T :]
    first = S - T - left
    if first > num_sinks:
        j = torch.cat([j[:num_sinks], j[first:]])
        key, value = (torch.cat([x[:, :, :num_sinks], x[:, :, first:]], dim=2) for x in (key, value))
    visible = _in_band(i[:, None], j, left, right) | _sees_sink(i[:, None], j, is_causal, num_sinks)
    if lengths is not None:
        visible = visible & (j < lengths.to(j.device)[:, None, None, None])
    visible = _never_empty(visible).repeat(*[1] * (visible.dim() - 2), H // K, 1)
    query = query.reshape(B, K, -1, D)  # the G queries of a key head as further rows
    return F.scaled_dot_product_attention(query, key, value, visible, dropout, scale=scale).view(B, H, T, D)


def _blocked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    left: int,
    right: int,
    num_sinks: int,
    is_causal: bool,
    lengths: Tensor | None,
    scale: float | None,
    dropout: float,
    C: int,
) -> Tensor:
    (B, H, T, D), (K, S) = query.shape, key.shape[1:3]
    N, L, G = -(-T // C), C + left + right, H // K
    before = S - T  # keys older than the first query
    if exporting():  # a block more than needed: a graph traced for one would be right for short rows only
        N = (T - 1) // C + 2

    def windows(x: Tensor) -> Tensor:
        reach = F.pad(x[:, :, max(0, before - left) :], (0, 0, max(0, left - before), N * C - T + right))
        sinks = reach[:, :, left : left + num_sinks] if exporting() else x[:, :, :num_sinks]  # rows may be shorter
        return overlapping_windows(reach, sinks, C, L)

    start = before + C * torch.arange(N, device=query.device)[:, None, None]
    i = start + torch.arange(C, device=query.device)[:, None]  # [N, C, 1]
    j = start - left + torch.arange(L, device=query.device)  # [N, 1, L]
    sink = torch.arange(num_sinks, device=query.device).expand(N, 1, num_sinks)
    # The bounds also leave out the sinks, which have columns of their own, and let the rows that fill up the last block
    # see something, so that they stay finite.
    low = (i - left).clamp_min(num_sinks).masked_fill(i >= S, -left)
    in_window = (j >= low) & (j <= (i + right).clamp_max(S - 1))
    in_sinks = _in_band(i, sink, left, right) | _sees_sink(i, sink, is_causal, num_sinks)
    if exporting():  # where rows may be shorter than the sinks, and blocks may lie behind the row
        in_sinks = in_sinks & (sink < S)
    visible = torch.cat([in_sinks, in_window], dim=2)[:, None]  # [N, 1, C, Z + L]
    if exporting():
        visible = _never_empty(visible)
    heads = (N, B * K)  # as batch and heads of one attention; the mask is shared by all of the second
    if lengths is not None:
        is_real = torch.cat([sink, j], dim=2)[:, None] < lengths.to(j.device)[:, None, None]
        visible = _never_empty(visible & is_real).flatten(0, 1)[:, None]
        heads = (N * B, K)
    visible = visible.repeat(1, 1, G, 1) if G > 1 else visible

    rows = F.pad(query, (0, 0, 0, N * C - T)).view(B, K, G, N, C, D).permute(3, 0, 1, 2, 4, 5)
    q, k, v = (x.reshape(*heads, -1, D) for x in (rows, windows(key), windows(value)))
    out = F.scaled_dot_product_attention(q, k, v, visible, dropout, scale=scale)
    out = out.view(N, B, K, G, C, D).permute(1, 2, 3, 0, 4, 5).reshape(B, H, N * C, D)
    return out[:, :, :T]


def overlapping_windows(x: Tensor, sinks: Tensor, C: int, L: int) -> Tensor:
    """Rows of `x` as windows of length L that begin C apart, `sinks` in front of each.

    Args:
        x: [B, K, (N-1)·C + L, D].
        sinks: [B, K, Z, D], Z ≥ 0.
        C, L: step and length.

    Returns:
        [N, B, K, Z + L, D]. Its backward is a handful of shifted sums.
    """
    if exporting():  # ONNX has no overlapping views
        N = (x.shape[2] - L) // C + 1
        index = C * torch.arange(N, device=x.device)[:, None] + torch.arange(L, device=x.device)
        window = x.index_select(2, index.flatten()).unflatten(2, (N, L)).permute(2, 0, 1, 3, 4)
        return torch.cat([sinks.expand(N, *sinks.shape), window], dim=3)
    return _Windows.apply(x, sinks, C, L)


class _Windows(torch.autograd.Function):
    """x [B, K, (N-1)·C + L, D], sinks [B, K, Z, D] -> [N, B, K, Z + L, D]: the sinks, then rows n·C … n·C+L-1 of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sinks: Tensor, C: int, L: int) -> Tensor:
        ctx.C, ctx.num_rows, ctx.num_sinks = C, x.shape[2], sinks.shape[2]
        window = x.unfold(2, L, C).permute(2, 0, 1, 4, 3)
        return torch.cat([sinks.expand(window.shape[0], *sinks.shape), window], dim=3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Windows overlap in whole blocks of C rows: a handful of shifted sums, several times as fast as unfold's own.
        dsinks, grad = grad[:, :, :, : ctx.num_sinks].sum(0), grad[:, :, :, ctx.num_sinks :]
        (N, B, K, L, D), C = grad.shape, ctx.C
        dx = grad.new_zeros(B, K, N - 1 - (-L // C), C, D)
        for index, start in enumerate(range(0, L, C)):
            part = grad[:, :, :, start : start + C].permute(1, 2, 0, 3, 4)
            dx[:, :, index : index + N, : part.shape[3]] += part
        return dx.view(B, K, -1, D)[:, :, : ctx.num_rows], dsinks, None, None


def _in_band(i: Tensor, j: Tensor, left: int, right: int) -> Tensor:
    return (j >= i - left) & (j <= i + right)


def _sees_sink(i: Tensor, j: Tensor, is_causal: bool, num_sinks: int) -> Tensor:
    sink = (j < num_sinks).expand(torch.broadcast_shapes(i.shape, j.shape))
    return sink & (j <= i) if is_causal else sink


def _never_empty(visible: Tensor) -> Tensor:
    """Rows that see nothing belong to filling and are discarded; they see everything, so that they stay finite."""
    return visible | ~visible.any(-1, keepdim=True)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    left: int,
    right: int,
    num_sinks: int,
    is_causal: bool,
    lengths: Tensor | None,
) -> None:
    if query.dim() != 4 or key.dim() != 4 or key.shape != value.shape:
        raise ValueError(
            "window_attention wants query [B, H, T, D] and key, value [B, K, S, D]; got "
            f"{list(query.shape)}, {list(key.shape)}, {list(value.shape)}"
        )
    (B, H, T, D), (K, S) = query.shape, key.shape[1:3]
    if key.shape[0] != B or key.shape[3] != D or H % K or S < T or T < 1:
        raise ValueError(
            "window_attention needs equal B and D, K dividing H, and 1 ≤ T ≤ S; got "
            f"query {list(query.shape)}, key {list(key.shape)}"
        )
    if min(left, right, num_sinks) < 0:
        raise ValueError(f"window_attention: left, right, num_sinks must be ≥ 0, got {left}, {right}, {num_sinks}")
    if is_causal and right > 0:
        raise ValueError(f"window_attention: a causal window cannot look ahead, got right = {right}")
    if lengths is not None and (lengths.shape != (B,) or T != S):
        raise ValueError(
            f"window_attention: lengths must be [B] = [{B}] and T == S, got {list(lengths.shape)}, {T}, {S}"
        )
