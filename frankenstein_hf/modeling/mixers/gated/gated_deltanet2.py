"""`gated_deltanet2`: the delta rule with a decay and an erase gate per key channel and a write gate per value channel.

Shapes: R rows, L row length, H heads, K key width, V value width, D model width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ...cache import States
from ...ops.numerics import at_least_fp32, full_precision
from .kda import KimiDeltaAttention


@full_precision
def eager_gated_deltanet2(
    q: Tensor, k: Tensor, v: Tensor, log_α: Tensor, b: Tensor, w: Tensor, S: Tensor
) -> tuple[Tensor, Tensor]:
    """S_t = (I − k_t (b_t ⊙ k_t)ᵀ) Diag(α_t) S_{t−1} + k_t (w_t ⊙ v_t)ᵀ,  o_t = K^−½ q_t S_t, token by token.

    Args:
        q, k, log_α, b: [R, H, L, K], k of unit length.
        v, w: [R, H, L, V].
        S: [R, H, K, V].

    Returns:
        o [R, H, L, V] and the last S.
    """
    o = []
    for t in range(q.shape[2]):
        S = log_α[:, :, t, :, None].exp() * S
        r = torch.einsum("rhk,rhkv->rhv", b[:, :, t] * k[:, :, t], S)
        S = S + k[:, :, t, :, None] * (w[:, :, t] * v[:, :, t] - r)[:, :, None, :]
        o.append(q.shape[-1] ** -0.5 * torch.einsum("rhk,rhkv->rhv", q[:, :, t], S))
    return torch.stack(o, dim=2), S


class GatedDeltaNet2(KimiDeltaAttention):
    """KDA with β split in two (arXiv 2605.22791): what is erased, b = σ(W_b x) per key channel, and what is written,
    w = σ(W_w x) per value channel."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        D, H = self.hidden_size, self.num_heads
        K, V, rank = self.key_dim, self.value_dim, self.params.gate_low_rank
        self.gate_widths = {"b_proj": H * K, "w_proj": H * V, "decay_down_proj": rank}
        self.b_proj = nn.Linear(D, H * K, bias=False)
        self.w_proj = nn.Linear(D, H * V, bias=False)

    def gates(self, *projected: Tensor) -> States:
        b, w, low = projected
        b, w = (x.unflatten(-1, (self.num_heads, -1)) for x in (self.beta(b), at_least_fp32(w).sigmoid()))
        return {"log_decay": self.log_decay(low), "erase": b, "write": w}

    def erase_and_write(self, gates: States) -> tuple[Tensor, Tensor | None]:
        return gates["erase"], gates["write"]

    def recurrence(self, q: Tensor, k: Tensor, v: Tensor, gates: States, S: Tensor) -> tuple[Tensor, Tensor]:
        return eager_gated_deltanet2(q, k, v, gates["log_decay"], gates["erase"], gates["write"], S)
