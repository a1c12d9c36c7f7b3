"""`standard` and `gqa`: softmax attention over all visible tokens.

Shapes: B batch, T queries, S keys, H heads, G key/value heads, W head width, D model width.
"""

from typing import Any

from torch import Tensor, nn

from ...attention_backends import dense_attention, dense_max_logits
from ...context import SequenceContext
from ...extras import LayerExtras
from ...ops.scored_attention import eager_attention
from ...positions import apply_rotary
from ..base import Mixer, merge_heads, split_heads

eager_standard = eager_attention  # softmax(q kᵀ / √W) v, scores materialised


class StandardAttention(Mixer):
    """softmax(q kᵀ / √W) v with rotary positions (arXiv 1706.03762); key/value heads from the config."""

    plain_cache = True

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.num_key_value_heads = self.key_value_heads()
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads  # read by transformers' functions
        self.scaling = self.head_dim**-0.5
        bias, width = config.attention_bias, self.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(self.hidden_size, self.num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(self.hidden_size, width, bias=bias)
        self.v_proj = nn.Linear(self.hidden_size, width, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, self.hidden_size, bias=self.output_bias)
        self.add_qk_norm(self.num_key_value_heads)

    def key_value_heads(self) -> int:
        """Number of key/value heads G."""
        return self.config.num_key_value_heads

    def value(self, hidden_states: Tensor, key: Tensor, context: SequenceContext) -> Tensor:
        """Values [B, G, T, W]; `key` [B, G, T, W] is not rotated yet."""
        return split_heads(self.v_proj(hidden_states), self.num_key_value_heads)

    def readout(self, output: Tensor, value: Tensor, hidden_states: Tensor) -> Tensor:
        """What becomes of the attention output [B, H, T, W]; `value` [B, G, T, W] is that of these tokens alone."""
        return output

    def forward(
        self, hidden_states: Tensor, context: SequenceContext, cache: Any = None
    ) -> tuple[Tensor, LayerExtras | None]:
        query = split_heads(self.q_proj(hidden_states), self.num_heads)
        key = split_heads(self.k_proj(hidden_states), self.num_key_value_heads)
        value = self.value(hidden_states, key, context)
        query, key = self.norm_heads(query, key)
        rotary = context.rotary(self.head_dim)
        query, key = apply_rotary(query, *rotary), apply_rotary(key, *rotary)
        own_value = value
        if cache is not None:
            key, value = cache.layers[self.layer_idx].append(key, value, context.keep, context.all_real)
        dropout = self.config.attention_dropout if self.training else 0.0
        output, weights = dense_attention(self, query, key, value, context, scale=self.scaling, dropout=dropout)
        output = self.readout(output, own_value, hidden_states)
        return self.o_proj(merge_heads(output)), LayerExtras(
            weights if context.output_attentions else None,
            max_logits=dense_max_logits(query, key, context, self.scaling),
        )


class GroupedQueryAttention(StandardAttention):
    """`standard` with its own number of key/value heads (arXiv 2305.13245); one head is multi-query attention."""

    def key_value_heads(self) -> int:
        return self.params.num_key_value_heads
