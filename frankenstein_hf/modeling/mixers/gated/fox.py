"""`fox`: softmax attention with a forget gate.

Shapes: R rows, L row length, S keys, H heads, G key/value heads, W head width, D model width.
"""

import math
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from ...cache import States
from ...context import Rows
from ...norms import RMSNorm
from ...ops.forgetting_attention import forgetting_attention
from ...ops.lse_merge import merge_partial_softmax
from ...ops.numerics import at_least_fp32
from ...ops.scored_attention import eager_attention
from ..base import SLOW, split_heads
from ..row_attention import RowAttention, visible_keys


def eager_fox(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, own: Tensor, mask: Tensor, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """softmax(q_i k_j / √W + d_ij) v with d_ij = Σ_{l=j+1}^{i} log f_l; later keys forget as much, −|c_i − c_j|.

    Args:
        q: [R, H, L, W].
        k, v: [R, G, S, W].
        log_f: [R, H, S].
        own: [R or 1, L] place of each query among the keys.
        mask: [R or 1, 1, L, S].

    Returns:
        Output [R, H, L, W] and weights [R, H, L, S].
    """
    c = log_f.double().cumsum(-1)
    c_i = c.gather(2, own[:, None].expand(*c.shape[:2], -1))
    d = -(c_i[..., None] - c[:, :, None]).abs()
    return eager_attention(q, k, v, mask, bias=d.to(log_f.dtype), dropout=dropout)


class ForgettingAttention(RowAttention):
    """Softmax attention with a data-dependent, learned decay of its logits in place of positions (arXiv 2503.02130).

    f_t = σ(w_f x_t + b_f) a head; the cache keeps log f beside keys and values. An encoder forgets to either side.
    """

    rotates = False

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.f_proj = nn.Linear(self.hidden_size, self.num_heads)
        width = self.num_heads * self.head_dim
        self.g_proj = nn.Linear(self.hidden_size, width, bias=False) if self.params.output_gate else None
        if self.params.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(self.head_dim, config.rms_norm_eps) for _ in "qk")

    def begin_as_attention(self) -> list[str]:
        """Nothing is forgotten faster than by `SLOW` a token, −log σ(b); the output gate stays as it is."""
        self.f_proj.weight.zero_()
        self.f_proj.bias.fill_(-math.log(math.expm1(SLOW)))
        return ["f_proj.weight", "f_proj.bias"]

    def project(self, x: Tensor, rows: Rows) -> tuple[Tensor, States]:
        query, new = super().project(x, rows)
        return query, {**new, "log_forget": F.logsigmoid(at_least_fp32(self.f_proj(x)))}

    def attend(self, query: Tensor, seen: States, rows: Rows) -> tuple[Tensor, Tensor | None]:
        own, last = rows.positions, self.last_keys(rows)
        q, k, v, log_f = (x.transpose(1, 2) for x in (query, *seen.values()))
        if self.is_eager(rows):
            return eager_fox(q, k, v, log_f, own, visible_keys(last, k.shape[2]), self.dropout)
        output, lse = forgetting_attention(q, k, v, log_f.double().cumsum(-1), own, own)
        if not rows.is_causal:  # the keys behind a token: those before it in the mirrored row, its own gate included
            q, k, v, log_f = (rows.flip(x).transpose(1, 2) for x in (query, *seen.values()))
            memory = F.pad(log_f.double().cumsum(-1), (1, -1))
            reverse = forgetting_attention(q, k, v, memory, own, own - 1)
            flipped = [rows.flip(x.transpose(1, 2)).transpose(1, 2) for x in reverse]
            output, _ = merge_partial_softmax([output, flipped[0]], [lse, flipped[1]])
        return output, None

    def gather(self, output: Tensor, x: Tensor) -> Tensor:
        if self.g_proj is not None:
            output = output * split_heads(self.g_proj(x), self.num_heads).sigmoid()
        return super().gather(output, x)
