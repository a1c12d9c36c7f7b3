"""`memory`: softmax attention whose values are the keys plus a table entry per token id.

Shapes: B batch, T time, G key/value heads, W head width, N vocabulary.
"""

from typing import Any

from torch import Tensor, nn
from transformers import initialization as init

from ...context import SequenceContext
from ...norms import RMSNorm
from ...ops.scored_attention import eager_attention
from ..base import split_heads
from ..dense.standard import StandardAttention


def eager_memory(q: Tensor, k: Tensor, k_rotated: Tensor, m: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q k_rotatedᵀ / √W + C) (k + m): contextual retrieval over keys plus retrieval of token memories m."""
    return eager_attention(q, k_rotated, k + m, mask)[0]


class MemoryAttention(StandardAttention):
    """Attention with V = K + norm(E[ids]); rotary positions act on the scoring pair only.

    The table E [N, G·W] replaces the value projection: capacity by lookup instead of by dense computation.
    """

    vocabulary_tables = ("token_memory",)

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.shared_tables = self.vocabulary_tables if self.params.tie_tables else ()
        del self.v_proj
        width = self.num_key_value_heads * self.head_dim
        self.token_memory = nn.Embedding(config.vocab_size, width)
        self.memory_norm = RMSNorm(width, config.rms_norm_eps)

    def init_parameters(self) -> None:
        init.normal_(self.token_memory.weight, mean=0.0, std=self.config.initializer_range)

    def value(self, hidden_states: Tensor, key: Tensor, context: SequenceContext) -> Tensor:
        if context.input_ids is None:
            raise ValueError(
                f"'memory' (layer {self.layer_idx}) looks values up by token id and needs input_ids; got inputs_embeds "
                "only. Pass input_ids too (generate() drops them where inputs_embeds are given: leave those out), or "
                "choose another mixer."
            )
        memory = self.memory_norm(self.token_memory(context.input_ids))
        return key + split_heads(memory, self.num_key_value_heads).to(key.dtype)
