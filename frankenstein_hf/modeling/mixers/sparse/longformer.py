"""`longformer`: a window, and a few tokens that see and are seen by all.

Shapes: see `sparse_attention.py`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ...context import SequenceContext
from ...extras import LayerExtras
from ...ops.patterns import Pattern, WindowPattern
from ...ops.scored_attention import eager_attention, scored_attention
from ...positions import apply_rotary
from ..base import split_heads
from ..sparse_attention import Call, PatternAttention, Streams

eager_longformer = eager_attention  # softmax over {|i − j| ≤ w/2 in steps of d + 1} ∪ 𝒢, everything for i ∈ 𝒢


class Longformer(PatternAttention):
    """Attention to the keys at most w/2 steps away, every (d + 1)-th of them, and to global tokens (arXiv 2004.05150).

    A global token sees everything, by the same projections or, with `separate_global`, by three of its own.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        if self.params.separate_global:
            bias, width = config.attention_bias, self.num_key_value_heads * self.head_dim
            self.q_global_proj = nn.Linear(self.hidden_size, self.num_heads * self.head_dim, bias=bias)
            self.k_global_proj = nn.Linear(self.hidden_size, width, bias=bias)
            self.v_global_proj = nn.Linear(self.hidden_size, width, bias=bias)
            self.cached = ("key", "value", "key_global", "value_global")

    @staticmethod
    def patterns(params: Any, layer_idx: int, num_heads: int) -> list[tuple[slice, Pattern]]:
        tokens = tuple(sorted(set(params.global_tokens)))
        pattern = WindowPattern(params.window_size // 2, params.dilation, tokens, not params.separate_global)
        return [(slice(0, num_heads), pattern)]

    def project(self, x: Tensor, context: SequenceContext) -> Streams:
        streams = super().project(x, context)
        if self.params.separate_global:
            q = split_heads(self.q_global_proj(x), self.num_heads)
            k = split_heads(self.k_global_proj(x), self.num_key_value_heads)
            q, k = self.norm_heads(q, k)
            rotary = context.rotary(self.head_dim)
            streams["query_global"], streams["key_global"] = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
            streams["value_global"] = split_heads(self.v_global_proj(x), self.num_key_value_heads)
        return streams

    def attend(self, streams: Streams, call: Call) -> tuple[Tensor, LayerExtras]:
        out, extras = super().attend(streams, call)
        L, S = out.shape[2], streams["key"].shape[2]
        here = [g for g in sorted(set(self.params.global_tokens)) if call.offset <= g < call.offset + L]
        if not self.params.separate_global or not here:
            return out, extras
        i = torch.tensor(here, device=out.device)
        mask = torch.arange(S, device=out.device) <= i[:, None] if call.is_causal else None
        mask = None if mask is None else mask[None, None]
        q = streams["query_global"].index_select(2, i - call.offset)
        keys_values = streams["key_global"], streams["value_global"]
        if call.eager:
            rows, weights = eager_attention(q, *keys_values, mask, dropout=call.dropout)
            assert extras.weights is not None
            extras = LayerExtras(extras.weights.index_copy(2, i - call.offset, weights))
        else:
            rows = scored_attention(q, *keys_values, mask, dropout=call.dropout)
        return out.index_copy(2, i - call.offset, rows), extras
