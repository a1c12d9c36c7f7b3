"""`gated_deltanet2`: the delta rule with a decay and an erase gate per key channel and a write gate per value channel.

Shapes: R rows, L row length, H heads, K = V head width, D model width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..cache import States
from ..ops.numerics import at_least_fp32, full_precision
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
        D, width = self.hidden_size, self.num_heads * self.head_dim
        self.b_proj = nn.Linear(D, width, bias=False)
        self.w_proj = nn.Linear(D, width, bias=False)

    def gates(self, x: Tensor) -> States:
        b, w = (
            at_least_fp32(proj(x)).sigmoid().unflatten(-1, (self.num_heads, -1)) for proj in (self.b_proj, self.w_proj)
        )
        b = 2.0 * b if self.params.allow_negative_eigenvalues else b
        return {"log_decay": self.log_decay(x), "erase": b, "write": w}

    def erase_and_write(self, k: Tensor, v: Tensor, gates: States) -> tuple[Tensor, Tensor]:
        return gates["erase"] * k, gates["write"] * v

    def recurrence(self, q: Tensor, k: Tensor, v: Tensor, gates: States, S: Tensor) -> tuple[Tensor, Tensor]:
        return eager_gated_deltanet2(q, k, v, gates["log_decay"], gates["erase"], gates["write"], S)
