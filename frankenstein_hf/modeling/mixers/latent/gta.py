"""`gta`: one attention map a group of heads, and values that SiLU decodes from a latent.

Shapes: B batch, T queries, S keys, H heads, G groups (G divides H), W head width, r rank of the values' latent.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from ...attention_backends import dense_attention
from ...cache import States
from ...context import SequenceContext
from ...ops.scored_attention import eager_attention
from ...positions import apply_rotary
from ..base import split_heads
from .compressed import CompressedAttention

# attn_g = softmax(q_g k_gᵀ / √W) with q_g, k_g means over the heads of group g; Y[g] = attn_g · SiLU(W_UV W_DV x)[g],
# the values of a group's heads side by side, [B, G, S, H/G · W]
eager_gta = eager_attention


class GroupedHeadLatentAttention(CompressedAttention):
    """Heads in groups that share one attention map (arXiv 2506.17286); each head has values of its own.

    The mean over a group's heads commutes with their rotation, so what is cached of the keys is one rotated mean a
    group. The values' decoder is not linear: decoding runs it over all cached latents.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        p, width, bias = self.params, self.num_heads * self.head_dim, config.attention_bias
        self.groups = p.num_shared_groups
        self.num_key_value_groups = 1  # read by transformers' functions
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(self.hidden_size, width, bias=bias)
        self.k_proj = nn.Linear(self.hidden_size, width, bias=bias)
        self.v_down_proj = nn.Linear(self.hidden_size, p.value_latent_rank, bias=bias)
        self.v_up_proj = nn.Linear(p.value_latent_rank, width, bias=bias)
        self.o_proj = nn.Linear(width, self.hidden_size, bias=self.output_bias)

    def _rotated_mean(self, x: Tensor, context: SequenceContext) -> Tensor:
        """Heads [B, T, H·W] -> means over each group [B, G, T, W], rotated."""
        mean = x.unflatten(-1, (self.groups, -1, self.head_dim)).mean(3).transpose(1, 2)
        return apply_rotary(mean, *context.rotary(self.head_dim))

    def queries(self, x: Tensor, context: SequenceContext) -> Tensor:
        return self._rotated_mean(self.q_proj(x), context)

    def compress(self, x: Tensor, context: SequenceContext, cached: bool) -> States:
        return {"key": self._rotated_mean(self.k_proj(x), context), "value_latent": self.v_down_proj(x)}

    def attend(
        self, query: Tensor, kept: States, context: SequenceContext, cached: bool
    ) -> tuple[Tensor, Tensor | None]:
        value = split_heads(F.silu(self.v_up_proj(kept["value_latent"])), self.groups)  # [B, G, S, H/G · W]
        output, weights = dense_attention(
            self, query, kept["key"], value, context, scale=self.scaling, dropout=self.dropout
        )
        return output.unflatten(-1, (-1, self.head_dim)).transpose(2, 3).flatten(1, 2), weights
