"""`mfa`: many wide query heads over one shared key/value head.

Shapes: B batch, T queries, S keys, H heads, C factor rank, which is the width of every head, D model width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ...cache import States
from ...context import SequenceContext
from ...ops.scored_attention import eager_attention
from ...positions import apply_rotary
from ..base import split_heads
from .compressed import CompressedAttention

# O_i = Σ_c softmax_j(x_i S_q Q_c (x_j S_k)ᵀ / √C) x_j S_v O_cᵀ: one key and value head, rotated queries and keys
eager_mfa = eager_attention


class MultiMatrixFactorizationAttention(CompressedAttention):
    """Query heads Q_c of a shared S_q x over one key and one value head (arXiv 2412.19255).

    With `key_reuse` the values are k + α ⊙ N k, of the keys before their rotation, and only those keys are cached.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        C, bias = self.params.factor_rank, config.attention_bias
        self.rank = C
        self.num_key_value_groups = self.num_heads  # read by transformers' functions
        self.scaling = C**-0.5
        self.q_shared_proj = nn.Linear(self.hidden_size, C, bias=bias)  # S_q
        self.q_proj = nn.Linear(C, self.num_heads * C, bias=bias)  # Q_1 … Q_H
        self.k_proj = nn.Linear(self.hidden_size, C, bias=bias)  # S_k
        if self.params.key_reuse:
            self.value_mix_proj = nn.Linear(C, C, bias=False)  # N
            self.value_gate = nn.Parameter(torch.zeros(C))  # α
        else:
            self.v_proj = nn.Linear(self.hidden_size, C, bias=bias)  # S_v
        self.o_proj = nn.Linear(self.num_heads * C, self.hidden_size, bias=self.output_bias)  # O_1 … O_H

    def init_parameters(self) -> None:
        """Values equal keys at first."""
        if self.params.key_reuse:
            init.zeros_(self.value_gate)

    def queries(self, x: Tensor, context: SequenceContext) -> Tensor:
        query = split_heads(self.q_proj(self.q_shared_proj(x)), self.num_heads)
        return apply_rotary(query, *context.rotary(self.rank))

    def compress(self, x: Tensor, context: SequenceContext, cached: bool) -> States:
        key = self.k_proj(x)[:, None]
        if self.params.key_reuse:
            return {"key": key}
        return {"key": apply_rotary(key, *context.rotary(self.rank)), "value": self.v_proj(x)[:, None]}

    def expand(self, kept: States, context: SequenceContext, cached: bool) -> tuple[Tensor, Tensor]:
        key = kept["key"]
        if not self.params.key_reuse:
            return key, kept["value"]
        value = key + self.value_gate.to(key.dtype) * self.value_mix_proj(key)
        return apply_rotary(key, *context.key_rotary(self.rank, cached)), value
