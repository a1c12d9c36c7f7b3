"""Which function computes dense attention: ours for `eager` and `sdpa`, transformers' own for the rest."""

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .context import SequenceContext
from .ops.backend import TRITON
from .ops.max_logits import max_logits
from .ops.scored_attention import eager_attention, equal_widths, scored_attention


def dense_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, context: SequenceContext, *, scale: float, dropout: float
) -> tuple[Tensor, Tensor | None]:
    """Attention of a whole batch in its native layout, by the backend in force.

    Args:
        module: The mixer, for transformers' functions (`is_causal`, `num_key_value_groups`).
        query: [B, H, T, K].
        key, value: [B, G, S, …].
        context: Visibility.
        scale: Factor on the scores.
        dropout: Probability, already zero outside training.

    Returns:
        Output [B, H, T, V], and the weights [B, H, T, S] if materialised.
    """
    backend, mask = context.backend, context.mask()
    if backend == "eager":
        return eager_attention(query, key, value, mask, is_causal=context.causal_flag, scale=scale, dropout=dropout)
    if backend in ("sdpa", TRITON):
        is_causal = context.causal_flag
        return scored_attention(query, key, value, mask, is_causal=is_causal, scale=scale, dropout=dropout), None
    function = ALL_ATTENTION_FUNCTIONS.get_interface(backend, eager_attention)
    width = value.shape[-1]
    query, key, value = equal_widths(query, key, value)
    output, weights = function(
        module,
        query,
        key,
        value,
        _mask_for(backend, context, query, key),
        scaling=scale,
        dropout=dropout,
        is_causal=context.is_causal,
        **context.kernel_kwargs,
    )
    output = output.transpose(1, 2)
    return output if output.shape[-1] == width else output[..., :width], weights


def dense_max_logits(query: Tensor, key: Tensor, context: SequenceContext, scale: float) -> Tensor | None:
    """[H] largest logits of `dense_attention` between visible real tokens, if asked for."""
    if not context.output_max_logits:
        return None
    mask = context.mask()
    if mask is not None and mask.dtype != torch.bool:
        mask = mask > torch.finfo(mask.dtype).min / 2  # transformers writes the least number for -inf
    places = torch.arange(key.shape[2], device=key.device)

    def visible(queries: slice, keys: slice) -> Tensor | None:
        seen = None if context.all_real else context.keep[:, None, queries, None]
        if mask is not None:
            block = mask[:, :, queries, keys]
            seen = block if seen is None else seen & block
        elif context.causal_flag:
            seen = places[keys] <= places[queries, None]
        return seen

    return max_logits(
        query, key, visible, scale=scale, spans=lambda start, stop: [(0, stop if context.causal_flag else key.shape[2])]
    )


def _mask_for(backend: str, context: SequenceContext, query: Tensor, key: Tensor) -> Any:
    mask = context.mask()
    if "flash" in backend:  # these take the padding mask, and packing from cu_seq_lens or position ids
        if context.custom_mask is not None:
            raise ValueError(f"{backend} cannot honour a 4-D attention_mask; use attn_implementation='sdpa'.")
        if context.all_real and context.past_keep is None:
            return None
        past = context.past_keep
        past = past if past is not None else context.keep.new_ones(len(context.keep), context.past_length)
        return torch.cat([past, context.keep], dim=1)
    if backend == "flex_attention":
        from torch.nn.attention.flex_attention import create_block_mask

        T, S = query.shape[2], key.shape[2]
        if mask is None:
            mask = torch.ones(1, 1, T, S, dtype=torch.bool, device=query.device)
            mask = mask.tril(S - T) if context.is_causal else mask
        if mask.dtype != torch.bool:
            raise ValueError("flex_attention needs a bool attention_mask; an additive one works with 'sdpa'.")
        visible = mask.expand(query.shape[0], mask.shape[1], T, S)

        def is_visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return visible[b, h if visible.shape[1] > 1 else 0, i, j]

        return create_block_mask(is_visible, query.shape[0], None, T, S, device=query.device)
    return mask
