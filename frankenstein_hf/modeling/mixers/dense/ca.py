"""`ca`: attention as an integral over a continuous line of keys and values.

Shapes: R rows, L row length, S keys, H heads, W head width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ...cache import States
from ...context import Rows
from ...ops.continuum_attention import continuum_attention, eager_continuum_attention
from ..row_attention import RowAttention

eager_ca = eager_continuum_attention  # ∫ p_i(t) v(t) dt by exponential moments, weights materialised


class ContinuumAttention(RowAttention):
    """Keys and values of neighbours joined by straight lines; a query reads the whole line (Continuum Attention).

    Its density is the exponential of the score γ q k(t) / √W. The integrals have closed forms, so the output is still a
    weighted mean of the values; equal scores give the plain mean. An encoder reads the line to the end.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        learned = self.params.gain == "learned"
        self.log_gain = nn.Parameter(torch.zeros(self.num_heads)) if learned else None

    def init_parameters(self) -> None:
        """γ = 1."""
        if self.log_gain is not None:
            init.zeros_(self.log_gain)

    def attend(self, query: Tensor, seen: States, rows: Rows) -> tuple[Tensor, Tensor | None]:
        last = self.last_keys(rows)
        q, k, v = (x.transpose(1, 2) for x in (query, *seen.values()))
        q = q * (self.params.gain if self.log_gain is None else self.log_gain.exp()[:, None, None].to(q.dtype))
        if self.is_eager(rows):
            return eager_ca(q, k, v, last, self.dropout)
        return continuum_attention(q, k, v, last), None
