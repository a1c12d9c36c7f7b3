"""`sigmoid`: attention whose weights are sigmoids instead of a softmax.

Shapes: R rows, L row length, S keys, H heads, G key/value heads, W head width, D model width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ...cache import States
from ...context import Rows
from ...norms import RMSNorm
from ...ops.numerics import at_least_fp32
from ...ops.sigmoid_attention import eager_sigmoid_attention, sigmoid_attention
from ..row_attention import RowAttention, visible_keys

eager_sigmoid = eager_sigmoid_attention  # σ(q kᵀ / √W + b − ln n) v, weights materialised; n keys are visible


def attend_by_sigmoid(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, last: Tensor, l1: bool, dropout: float, is_eager: bool
) -> tuple[Tensor, Tensor | None]:
    """q [B, H, T, W] over keys up to `last` [B or 1, T]; `bias` a number or [H, 1] -> output and weights, if eager."""
    level = at_least_fp32(q.new_zeros(*q.shape[:3])) + bias
    if not l1:
        level = level - (last + 1).clamp_min(1).to(level.dtype).log()[:, None]
    if is_eager:
        return eager_sigmoid(q, k, v, level, visible_keys(last, k.shape[2]), l1, dropout)
    return sigmoid_attention(q, k, v, level, last, l1), None


class SigmoidAttention(RowAttention):
    """Σ_j σ(q_i k_j / √W + b − ln n_i) v_j, n_i the number of keys token i sees (arXiv 2409.04431).

    Every key is weighed on its own: the weights of a token need not sum to one. They would grow with the number of keys
    without ln n_i, which counts a token's own keys, so pads, packing and decoding change nothing.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        learned = self.params.bias == "learned"
        self.bias = nn.Parameter(torch.zeros(self.num_heads)) if learned else None
        hybrid = self.params.normalize == "hybrid"
        self.output_norm = RMSNorm(self.hidden_size, config.rms_norm_eps) if hybrid else None

    def init_parameters(self) -> None:
        """No bias."""
        if self.bias is not None:
            init.zeros_(self.bias)

    def attend(self, query: Tensor, seen: States, rows: Rows) -> tuple[Tensor, Tensor | None]:
        q, k, v = (x.transpose(1, 2) for x in (query, *seen.values()))
        bias = self.params.bias if self.bias is None else self.bias[:, None]
        l1 = self.params.normalize == "l1"
        return attend_by_sigmoid(q, k, v, bias, self.last_keys(rows), l1, self.dropout, self.is_eager(rows))

    def gather(self, output: Tensor, x: Tensor) -> Tensor:
        output = super().gather(output, x)
        return output if self.output_norm is None else self.output_norm(output)
