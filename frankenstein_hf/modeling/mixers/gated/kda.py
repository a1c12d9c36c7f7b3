"""`kda`: Kimi Delta Attention, error-correcting fast weights with a decay per key channel.

Shapes: R rows, L row length, H heads, K key width, V value width, D model width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...cache import States
from ...ops.numerics import at_least_fp32, full_precision
from .deltanet import DeltaNet
from .gated_deltanet import init_decay, slow_decay


@full_precision
def eager_kda(q: Tensor, k: Tensor, v: Tensor, log_α: Tensor, β: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """S_t = (I − β_t k_t k_tᵀ) Diag(α_t) S_{t−1} + β_t k_t v_tᵀ,  o_t = K^−½ q_t S_t, token by token.

    Args:
        q, k, log_α: [R, H, L, K], k of unit length.
        v: [R, H, L, V].
        β: [R, H, L].
        S: [R, H, K, V].

    Returns:
        o [R, H, L, V] and the last S.
    """
    o = []
    for t in range(q.shape[2]):
        S = log_α[:, :, t, :, None].exp() * S
        v_old = torch.einsum("rhk,rhkv->rhv", k[:, :, t], S)
        S = S + k[:, :, t, :, None] * (β[:, :, t, None] * (v[:, :, t] - v_old))[:, :, None, :]
        o.append(q.shape[-1] ** -0.5 * torch.einsum("rhk,rhkv->rhv", q[:, :, t], S))
    return torch.stack(o, dim=2), S


class KimiDeltaAttention(DeltaNet):
    """The delta rule with α = exp(−exp(A_log)·softplus(W↑W↓x + dt_bias)) per key channel, β = σ(b) (arXiv 2510.26692).

    Short convolutions with SiLU on q, k and v; unit-length q and k; RMS norm per head and a low-rank sigmoid gate on
    the readout.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        D, H, rank = self.hidden_size, self.num_heads, self.params.gate_low_rank
        self.gate_widths = {"b_proj": H, "decay_down_proj": rank}
        self.decay_down_proj = nn.Linear(D, rank, bias=False)
        self.decay_up_proj = nn.Linear(rank, H * self.key_dim, bias=False)
        self.A_log = nn.Parameter(torch.empty(H))
        self.dt_bias = nn.Parameter(torch.empty(H, self.key_dim))
        if self.params.gate:
            self.g_down_proj = nn.Linear(D, rank, bias=False)
            self.g_up_proj = nn.Linear(rank, H * self.value_dim, bias=False)

    @property
    def gate_activation(self) -> str:
        return self.params.gate_activation

    def init_parameters(self) -> None:
        """See `init_decay`."""
        init_decay(self.A_log, self.dt_bias)

    def begin_as_attention(self) -> list[str]:
        """A slow decay besides."""
        return [*super().begin_as_attention(), *slow_decay(self.A_log, self.dt_bias)]

    def log_decay(self, low: Tensor) -> Tensor:
        """[R, L, rank] -> log α [R, L, H, K] in at least fp32."""
        rate = at_least_fp32(self.A_log).exp()[:, None]
        a = at_least_fp32(self.decay_up_proj(low)).unflatten(-1, (self.num_heads, -1))
        return -rate * F.softplus(a + at_least_fp32(self.dt_bias))

    def gates(self, *projected: Tensor) -> States:
        b, low = projected
        return {"log_decay": self.log_decay(low), "beta": self.beta(b)}

    def recurrence(self, q: Tensor, k: Tensor, v: Tensor, gates: States, S: Tensor) -> tuple[Tensor, Tensor]:
        return eager_kda(q, k, v, gates["log_decay"], gates["beta"], S)

    def finish(self, readout: Tensor, x: Tensor) -> Tensor:
        gate = self.g_up_proj(self.g_down_proj(x)) if self.params.gate else None
        return self.o_proj(self.norm(readout.to(x.dtype), gate))
