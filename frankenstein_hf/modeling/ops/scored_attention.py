"""Softmax attention over scores, with visibility masks and biases; materialised for reading, fused for speed.

Shapes: B batch, H query heads, G key/value heads (G divides H), T queries, S keys, K key width, V value width.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from .numerics import at_least_fp32


def eager_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    bias: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """softmax(scale · q kᵀ + bias, over the visible keys) v with the scores materialised: the readable reference.

    Args:
        query: [B, H, T, K].
        key, value: [B, G, S, K] and [B, G, S, V]; each serves H/G consecutive query heads.
        mask: Broadcastable to [B, H, T, S]; bool with True = visible, or additive.
        is_causal: Query i (the last T of S positions) sees keys j ≤ S − T + i, besides `mask`.
        bias: Broadcastable to [B, H, T, S], added to the scores.
        scale: K^−½ by default.
        dropout: Probability of dropping a weight.

    Returns:
        Output [B, H, T, V] and weights [B, H, T, S], in the dtype of `query`. A row that sees nothing gives zeros.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = at_least_fp32(query * scale @ key.mT)
    weights = masked_softmax(scores if bias is None else scores + bias, mask, is_causal=is_causal)
    weights = F.dropout(weights, dropout, training=dropout > 0).to(query.dtype)
    return weights @ value, weights


def masked_softmax(scores: Tensor, mask: Tensor | None = None, *, is_causal: bool = False) -> Tensor:
    """Softmax of scores [B, H, T, S] over the visible keys; a row that sees nothing gives zeros.

    Args:
        scores: In at least fp32.
        mask, is_causal: As in `eager_attention`.
    """
    T, S = scores.shape[-2:]
    visible = None
    if is_causal:
        visible = torch.ones(T, S, dtype=torch.bool, device=scores.device).tril(S - T)
    if mask is not None and mask.dtype != torch.bool:
        scores, mask = scores + mask, mask > -torch.inf
    if mask is not None:
        visible = mask if visible is None else visible & mask
    if visible is not None:
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1)
    if mask is not None and visible is not None:  # a row that sees nothing has come out uniform
        weights = weights.masked_fill(~visible.any(-1, keepdim=True), 0.0)
    return weights


def dense_rows(
    query: Tensor, key: Tensor, value: Tensor, offset: int, is_causal: bool, eager: bool = False,
    scale: float | None = None, dropout: float = 0.0,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention of the queries at the positions offset … offset + T − 1 to all keys [B, G, S, K], or to those before.

    Returns:
        Output [B, H, T, V], and the weights if `eager`.
    """
    T, S = query.shape[2], key.shape[2]
    mask = None
    if is_causal and not (offset == 0 and T == S) and (T > 1 or offset + 1 < S):
        mask = torch.ones(T, S, dtype=torch.bool, device=query.device).tril(offset)
    flag = is_causal and mask is None and T > 1
    if eager:
        return eager_attention(query, key, value, mask, is_causal=flag, scale=scale, dropout=dropout)
    return scored_attention(query, key, value, mask, is_causal=flag, scale=scale, dropout=dropout), None


def scored_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    bias: Tensor | None = None,
    low_rank_bias: tuple[Tensor, Tensor] | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """The same as `eager_attention` through PyTorch's fused kernel; keys and values are never expanded over heads.

    Args:
        query, key, value, mask, is_causal, bias, scale, dropout: As in `eager_attention`. `is_causal` cannot be
            combined with a mask or bias.
        low_rank_bias: (left [B, H, T, R], right [B, G, S, R]); left · rightᵀ is added to the scores by widening
            queries and keys, so that no T×S tensor arises.

    Returns:
        Output [B, H, T, V].
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if low_rank_bias is not None:
        left, right = low_rank_bias
        query = torch.cat([query * scale, left.to(query.dtype)], dim=-1)
        key, scale = torch.cat([key, right.to(key.dtype)], dim=-1), 1.0
    if bias is not None:
        if mask is not None and mask.dtype == torch.bool:
            bias = bias.masked_fill(~mask, -torch.inf)
        mask = bias if mask is None or mask.dtype == torch.bool else bias + mask
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(query.dtype)
    if is_causal and mask is not None:
        raise ValueError("is_causal cannot be combined with a mask or bias; put the triangle into the mask.")
    width = value.shape[-1]
    if query.shape[2] > 1:
        query, key, value = equal_widths(query, key, value)
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output if output.shape[-1] == width else output[..., :width]


def equal_widths(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values padded with zeros to one width, which fused kernels need; cut the output to V.

    Without it PyTorch's CPU kernel is left for one several times slower.
    """
    missing = value.shape[-1] - query.shape[-1]
    if missing > 0:
        return F.pad(query, (0, missing)), F.pad(key, (0, missing)), value
    return query, key, F.pad(value, (0, -missing)) if missing else value
