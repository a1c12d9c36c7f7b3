"""`retnet`: retention, linear attention with a fixed decay per head.

Shapes: R rows, L row length, H heads, K key width, V value width, D model width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ...cache import States
from ...context import Rows
from ...ops.numerics import at_least_fp32, full_precision
from ...positions import apply_rotary
from ..base import GatedHeadNorm, merge_heads, split_heads, zero_beyond
from ..linear_attention import LinearAttention


@full_precision
def eager_retnet(q: Tensor, k: Tensor, v: Tensor, log_γ: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """s_t = γ s_{t−1} + k_t v_tᵀ,  y_t = K^−½ q_t s_t, token by token.

    Args:
        q, k: [R, H, L, K], rotated.
        v: [R, H, L, V].
        log_γ: [H], or [R, H, L] where rows end in pads, which do not decay the state.
        s: [R, H, K, V].

    Returns:
        y [R, H, L, V] and the last s.
    """
    y, γ = [], (log_γ[:, None] if log_γ.dim() == 1 else log_γ).exp().expand(q.shape[:3])
    for t in range(q.shape[2]):
        s = γ[:, :, t, None, None] * s + k[:, :, t, :, None] * v[:, :, t, None, :]
        y.append(q.shape[-1] ** -0.5 * torch.einsum("rhk,rhkv->rhv", q[:, :, t], s))
    return torch.stack(y, dim=2), s


class Retention(LinearAttention):
    """Multi-scale retention (arXiv 2307.08621): head h, counted from 0, forgets by γ_h = 1 − 2^(−5−h) a token.

    Rotated q and k; group norm over heads and a SiLU gate on the readout.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        D, H, bias = self.hidden_size, self.num_heads, config.attention_bias
        K, V = self.key_dim, self.value_dim
        self.scale = K**-0.5
        self.q_proj = nn.Linear(D, H * K, bias=bias)
        self.k_proj = nn.Linear(D, H * K, bias=bias)
        self.v_proj = nn.Linear(D, H * V, bias=bias)
        self.g_proj = nn.Linear(D, H * V, bias=bias) if self.params.gate else None
        self.norm = GatedHeadNorm(H, V, config.rms_norm_eps, centred=True)
        self.o_proj = nn.Linear(H * V, D, bias=self.output_bias)

    def project(self, x: Tensor, rows: Rows) -> States:
        qk = self.joint(x, "q_proj", "k_proj")
        if self.params.rotary:
            qk = merge_heads(apply_rotary(split_heads(qk, 2 * self.num_heads), *rows.rotary(self.key_dim)))
        q, k = qk.chunk(2, dim=-1)
        return {"q": q, "k": k, "v": self.v_proj(x)}

    def log_decay(self, inputs: States, lengths: Tensor | None) -> Tensor:
        q = at_least_fp32(inputs["q"][:, :, :1])
        log_γ = torch.log1p(-torch.exp2(-5.0 - torch.arange(self.num_heads, device=q.device, dtype=q.dtype)))
        if lengths is None:
            return log_γ
        return zero_beyond(log_γ.expand(*q.shape[:2], -1), lengths).transpose(1, 2)

    def recurrence(self, q: Tensor, k: Tensor, v: Tensor, log_α: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        return eager_retnet(q, k, v, log_α, S)

    def finish(self, readout: Tensor, x: Tensor) -> Tensor:
        gate = self.g_proj(x) if self.g_proj is not None else None
        return self.o_proj(self.norm(readout.to(x.dtype), gate))
