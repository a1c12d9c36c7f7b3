"""`gated_deltanet`: error-correcting fast weights with a scalar decay per head.

Shapes: R rows, L row length, H heads, K = V head width, D model width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from ..cache import States
from ..context import Rows
from ..norms import l2_normalize
from ..ops.delta_rule import delta_rule
from ..ops.numerics import at_least_fp32, full_precision
from .base import GatedHeadNorm, RecurrentMixer, ShortConvolution, split_heads, zero_beyond


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


class GatedDeltaNet(RecurrentMixer):
    """The gated delta rule (arXiv 2412.06464): α = exp(−exp(A_log)·softplus(a + dt_bias)), β = σ(b).

    Short convolutions with SiLU on q, k and v; unit-length q and k; RMS norm per head and a SiLU gate on the readout.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        D, width, bias = self.hidden_size, self.num_heads * self.head_dim, config.attention_bias
        self.q_proj = nn.Linear(D, width, bias=bias)
        self.k_proj = nn.Linear(D, width, bias=bias)
        self.v_proj = nn.Linear(D, width, bias=bias)
        self.a_proj = nn.Linear(D, self.num_heads, bias=False)
        self.b_proj = nn.Linear(D, self.num_heads, bias=False)
        self.g_proj = nn.Linear(D, width, bias=bias) if self.params.gate else None
        self.A_log = nn.Parameter(torch.empty(self.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads))
        self.conv = ShortConvolution(3 * width, self.params.conv_kernel) if self.params.use_short_conv else None
        self.norm = GatedHeadNorm(self.num_heads, self.head_dim, config.rms_norm_eps, centred=False)
        self.o_proj = nn.Linear(width, D, bias=bias)

    def init_parameters(self) -> None:
        """A uniform in (1, 16), softplus(dt_bias) log-uniform in (0.001, 0.1): decays from 0.2 to 0.999 a step."""
        init.copy_(self.A_log, torch.empty_like(self.A_log).uniform_(1.0, 16.0).log())
        dt = torch.empty_like(self.dt_bias).uniform_(-6.907755, -2.302585).exp()
        init.copy_(self.dt_bias, dt + torch.log(-torch.expm1(-dt)))

    def project(self, x: Tensor, rows: Rows) -> States:
        rate = at_least_fp32(self.A_log).exp()
        beta = at_least_fp32(self.b_proj(x)).sigmoid()
        return {
            "qkv": torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1),
            "log_decay": -rate * F.softplus(at_least_fp32(self.a_proj(x)) + at_least_fp32(self.dt_bias)),
            "beta": 2.0 * beta if self.params.allow_negative_eigenvalues else beta,
        }

    def scan(
        self,
        inputs: States,
        states: States,
        lengths: Tensor | None,
        *,
        exclude_own: bool = False,
        sequential: bool = False,
    ) -> tuple[Tensor, States]:
        qkv, kept = inputs["qkv"], {}
        if self.conv is not None:
            qkv, kept["tail"] = self.conv(qkv, states.get("tail"), lengths)
        q, k, v = (split_heads(x, self.num_heads) for x in qkv.chunk(3, dim=-1))
        q, k, v = l2_normalize(q), l2_normalize(k), at_least_fp32(v)
        log_decay = zero_beyond(inputs["log_decay"], lengths).transpose(1, 2)
        beta = zero_beyond(inputs["beta"], lengths).transpose(1, 2)
        scale, state = self.head_dim**-0.5, states.get("state")
        if sequential:
            if state is None:
                state = q.new_zeros(*q.shape[:2], self.head_dim, self.head_dim)
            readout, kept["state"] = eager_gated_deltanet(q, k, v, log_decay, beta, state)
        else:
            β = beta[..., None]
            readout, kept["state"] = delta_rule(
                q, k, β * k, β * v, log_decay, scale=scale, initial_state=state, output_final_state=True
            )
        if exclude_own:
            readout = readout - scale * (q * k).sum(-1, keepdim=True) * beta[..., None] * v
        return readout.transpose(1, 2), kept

    def finish(self, readout: Tensor, x: Tensor) -> Tensor:
        gate = self.g_proj(x) if self.g_proj is not None else None
        return self.o_proj(self.norm(readout.to(x.dtype), gate))
