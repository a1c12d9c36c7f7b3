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
        last, l1 = self.last_keys(rows), self.params.normalize == "l1"
        q, k, v = (x.transpose(1, 2) for x in (query, *seen.values()))
        level = at_least_fp32(q.new_zeros(*q.shape[:3]))
        level = level + (self.params.bias if self.bias is None else self.bias[:, None])
        if not l1:
            level = level - (last + 1).clamp_min(1).to(level.dtype).log()[:, None]
        if self.is_eager(rows):
            return eager_sigmoid(q, k, v, level, visible_keys(last, k.shape[2]), l1, self.dropout)
        return sigmoid_attention(q, k, v, level, last, l1), None

    def gather(self, output: Tensor, x: Tensor) -> Tensor:
        output = super().gather(output, x)
        return output if self.output_norm is None else self.output_norm(output)
