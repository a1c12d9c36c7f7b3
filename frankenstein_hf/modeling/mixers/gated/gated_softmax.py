"""`gated_softmax`: softmax attention with a sigmoid gate on its output.

Shapes: B batch, H heads, T time, W head width, D model width.
"""

from typing import Any

from torch import Tensor, nn

from ...ops.scored_attention import eager_attention
from ..base import split_heads
from ..dense.standard import StandardAttention


def eager_gated_softmax(q: Tensor, k: Tensor, v: Tensor, g: Tensor, mask: Tensor | None = None) -> Tensor:
    """σ(g) ⊙ softmax(q kᵀ / √W) v; g = X W_g is [B, H, T, W], or [B, H, T, 1] with one gate a head."""
    return g.sigmoid() * eager_attention(q, k, v, mask)[0]


class GatedSoftmaxAttention(StandardAttention):
    """`standard` whose heads are gated, after the attention, by σ(W_g x) of the token (arXiv 2505.06708)."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        width = self.head_dim if self.params.gate == "elementwise" else 1
        self.g_proj = nn.Linear(self.hidden_size, self.num_heads * width, bias=False)

    def begin_as_attention(self) -> list[str]:
        """Gates of exactly one half, and twice the output: the same function."""
        self.g_proj.weight.zero_()
        self.o_proj.weight.mul_(2.0)
        return ["g_proj.weight", "o_proj.weight"]

    def readout(self, output: Tensor, value: Tensor, hidden_states: Tensor) -> Tensor:
        return output * split_heads(self.g_proj(hidden_states), self.num_heads).sigmoid()
