"""`tucker`: softmax attention whose projections are factorised; the cache holds the factors of keys and values.

Shapes: B batch, T queries, S keys, H heads, W head width, D model width, r ranks.
"""

from typing import Any

from torch import Tensor, nn

from ...cache import States
from ...context import SequenceContext
from ...ops.few_queries import attention_weights, grouped_product
from ...ops.scored_attention import eager_attention
from ...positions import apply_rotary
from ..base import linear_matrix, split_heads
from .compressed import CompressedAttention

# softmax(Q Kᵀ / √W) V with Q = W_Q,core W_Q,factor x, K = W_K,core W_K,factor x, V = W_V,core W_V,factor x
eager_tucker = eager_attention


class TuckerAttention(CompressedAttention):
    """Multi-head attention under a Tucker factorisation of its weights (arXiv 2603.30033), one rank a projection.

    Rotary positions turn the whole keys, which decoding therefore makes anew of their factors; the values' core is
    applied to the weighted sum of factors instead.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        p, width, bias = self.params, self.num_heads * self.head_dim, config.attention_bias
        self.num_key_value_groups = 1  # read by transformers' functions
        self.scaling = self.head_dim**-0.5
        self.q_factor_proj = nn.Linear(self.hidden_size, p.query_rank, bias=bias)
        self.q_core_proj = nn.Linear(p.query_rank, width, bias=False)
        self.k_factor_proj = nn.Linear(self.hidden_size, p.key_rank, bias=bias)
        self.k_core_proj = nn.Linear(p.key_rank, width, bias=False)
        self.v_factor_proj = nn.Linear(self.hidden_size, p.value_rank, bias=bias)
        self.v_core_proj = nn.Linear(p.value_rank, width, bias=False)
        self.o_proj = nn.Linear(width, self.hidden_size, bias=self.output_bias)

    def queries(self, x: Tensor, context: SequenceContext) -> Tensor:
        query = split_heads(self.q_core_proj(self.q_factor_proj(x)), self.num_heads)
        return apply_rotary(query, *context.rotary(self.head_dim))

    def compress(self, x: Tensor, context: SequenceContext, cached: bool) -> States:
        return {"key_factor": self.k_factor_proj(x), "value_factor": self.v_factor_proj(x)}

    def keys(self, kept: States, context: SequenceContext, cached: bool) -> Tensor:
        """[B, H, S, W], rotated."""
        key = split_heads(self.k_core_proj(kept["key_factor"]), self.num_heads)
        return apply_rotary(key, *context.key_rotary(self.head_dim, cached))

    def expand(self, kept: States, context: SequenceContext, cached: bool) -> tuple[Tensor, Tensor]:
        value = split_heads(self.v_core_proj(kept["value_factor"]), self.num_heads)
        return self.keys(kept, context, cached), value

    def attend_as_kept(self, query: Tensor, kept: States, context: SequenceContext) -> Tensor | None:
        if not getattr(self.v_core_proj, "is_linear", True):
            return None
        factor = kept["value_factor"]
        core = split_heads(linear_matrix(self.v_core_proj, factor)[None], self.num_heads)  # [1, H, r, W]
        scores = query @ self.keys(kept, context, True).mT * self.scaling
        weights = attention_weights(scores, context, self.dropout)
        return grouped_product(grouped_product(weights, factor[:, None]), core)
