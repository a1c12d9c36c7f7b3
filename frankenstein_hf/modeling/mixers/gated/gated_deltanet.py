"""`gated_deltanet`: error-correcting fast weights with a scalar decay per head.

Shapes: R rows, L row length, H heads, K key width, V value width, D model width.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from ...cache import States
from ...ops.numerics import at_least_fp32, full_precision
from ..base import SLOW, init_step_bias
from .deltanet import DeltaNet


@full_precision
def eager_gated_deltanet(q: Tensor, k: Tensor, v: Tensor, log_α: Tensor, β: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """S_t = (I − β_t k_t k_tᵀ) α_t S_{t−1} + β_t k_t v_tᵀ,  o_t = K^−½ q_t S_t, token by token.

    Args:
        q, k: [R, H, L, K], k of unit length.
        v: [R, H, L, V].
        log_α, β: [R, H, L].
        S: [R, H, K, V].

    Returns:
        o [R, H, L, V] and the last S.
    """
    o = []
    for t in range(q.shape[2]):
        S = log_α[:, :, t, None, None].exp() * S
        v_old = torch.einsum("rhk,rhkv->rhv", k[:, :, t], S)
        S = S + k[:, :, t, :, None] * (β[:, :, t, None] * (v[:, :, t] - v_old))[:, :, None, :]
        o.append(q.shape[-1] ** -0.5 * torch.einsum("rhk,rhkv->rhv", q[:, :, t], S))
    return torch.stack(o, dim=2), S


def init_decay(A_log: Tensor, dt_bias: Tensor) -> None:
    """A uniform in (1, 16), softplus(dt_bias) log-uniform in (0.001, 0.1): decays from 0.2 to 0.999 a step."""
    init.copy_(A_log, torch.empty_like(A_log).uniform_(1.0, 16.0).log())
    init_step_bias(dt_bias)


def slow_decay(A_log: Tensor, dt_bias: Tensor) -> list[str]:
    """A = 1 and softplus(dt_bias) = `SLOW`: a state that keeps nearly everything; the names of both."""
    A_log.zero_()
    dt_bias.fill_(math.log(math.expm1(SLOW)))
    return ["A_log", "dt_bias"]


class GatedDeltaNet(DeltaNet):
    """The gated delta rule (arXiv 2412.06464): α = exp(−exp(A_log)·softplus(a + dt_bias)), β = σ(b).

    Short convolutions with SiLU on q, k and v; unit-length q and k; RMS norm per head and a SiLU gate on the readout.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        D, H = self.hidden_size, self.num_heads
        self.gate_widths = {"b_proj": H, "a_proj": H}
        self.a_proj = nn.Linear(D, H, bias=False)
        self.g_proj = nn.Linear(D, H * self.value_dim, bias=config.attention_bias) if self.params.gate else None
        self.A_log = nn.Parameter(torch.empty(H))
        self.dt_bias = nn.Parameter(torch.empty(H))

    def init_parameters(self) -> None:
        """See `init_decay`."""
        init_decay(self.A_log, self.dt_bias)

    def begin_as_attention(self) -> list[str]:
        """A slow decay besides."""
        return [*super().begin_as_attention(), *slow_decay(self.A_log, self.dt_bias)]

    def gates(self, *projected: Tensor) -> States:
        b, a = projected
        rate = at_least_fp32(self.A_log).exp()
        return {"log_decay": -rate * F.softplus(at_least_fp32(a) + at_least_fp32(self.dt_bias)), "beta": self.beta(b)}

    def recurrence(self, q: Tensor, k: Tensor, v: Tensor, gates: States, S: Tensor) -> tuple[Tensor, Tensor]:
        return eager_gated_deltanet(q, k, v, gates["log_decay"], gates["beta"], S)

    def finish(self, readout: Tensor, x: Tensor) -> Tensor:
        gate = self.g_proj(x) if self.g_proj is not None else None
        return self.o_proj(self.norm(readout.to(x.dtype), gate))
