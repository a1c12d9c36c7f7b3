"""`gla`: gated linear attention.

Shapes: R rows, L row length, H heads, K key width, V value width, D model width.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...cache import States
from ...context import Rows
from ...ops.numerics import at_least_fp32, full_precision
from ...ops.short_convolution import Stream
from ..base import SLOW, GatedHeadNorm, Run, convolve_streams, pass_through, qkv_convolution
from ..linear_attention import LinearAttention


@full_precision
def eager_gla(q: Tensor, k: Tensor, v: Tensor, log_α: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """S_t = Diag(α_t) S_{t−1} + k_t v_tᵀ,  o_t = K^−½ q_t S_t, token by token.

    Args:
        q, k, log_α: [R, H, L, K].
        v: [R, H, L, V].
        S: [R, H, K, V].

    Returns:
        o [R, H, L, V] and the last S.
    """
    o = []
    for t in range(q.shape[2]):
        S = log_α[:, :, t, :, None].exp() * S + k[:, :, t, :, None] * v[:, :, t, None, :]
        o.append(q.shape[-1] ** -0.5 * torch.einsum("rhk,rhkv->rhv", q[:, :, t], S))
    return torch.stack(o, dim=2), S


class GatedLinearAttention(LinearAttention):
    """Linear attention whose state decays by a data-dependent factor per key channel (arXiv 2312.06635).

    log α = logsigmoid(W₂ W₁ x) / c; group norm over heads and a SiLU gate on the readout.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        D, H, bias = self.hidden_size, self.num_heads, config.attention_bias
        K, V = self.key_dim, self.value_dim
        self.scale = K**-0.5
        self.q_proj = nn.Linear(D, H * K, bias=bias)
        self.k_proj = nn.Linear(D, H * K, bias=bias)
        self.v_proj = nn.Linear(D, H * V, bias=bias)
        self.g_proj = nn.Linear(D, H * V, bias=bias)
        self.decay_down_proj = nn.Linear(D, self.params.gate_low_rank, bias=False)
        self.decay_up_proj = nn.Linear(self.params.gate_low_rank, H * K, bias=True)
        self.streams = (Stream(H * K), Stream(H * K), Stream(H * V))
        self.conv = qkv_convolution(self.params, self.streams)
        self.norm = GatedHeadNorm(H, V, config.rms_norm_eps, centred=True)
        self.o_proj = nn.Linear(H * V, D, bias=self.output_bias)

    def begin_as_attention(self) -> list[str]:
        """Keys and values of each token as they are, and a slow decay: logsigmoid(b)/c = −`SLOW`."""
        self.decay_up_proj.bias.fill_(-math.log(math.expm1(SLOW * self.params.gate_normalizer)))
        return [*pass_through(self.conv), "decay_up_proj.bias"]

    def project(self, x: Tensor, rows: Rows) -> States:
        decay = at_least_fp32(self.decay_up_proj(self.decay_down_proj(x)))
        return {
            "qkv": self.joint(x, "q_proj", "k_proj", "v_proj"),
            "log_decay": F.logsigmoid(decay) / self.params.gate_normalizer,
        }

    def read(self, inputs: States, states: States, run: Run) -> tuple[Sequence[Tensor], States]:
        return convolve_streams(self.conv, inputs["qkv"], states, run, self.streams, self.params.activation)

    def recurrence(self, q: Tensor, k: Tensor, v: Tensor, log_α: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        return eager_gla(q, k, v, log_α, S)

    def finish(self, readout: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(self.norm(readout.to(x.dtype), self.g_proj(x)))
