"""`mamba`: the selective state-space model.

Shapes: R rows, L row length, D model width, E inner width, N state channels, P rank of the step size.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from ...cache import States
from ...context import Rows
from ...ops.numerics import at_least_fp32, full_precision
from ...ops.selective_scan import selective_scan
from ..base import RecurrentMixer, Run, ShortConvolution, init_step_bias, zero_beyond


@full_precision
def eager_mamba(
    x: Tensor, Δ: Tensor, A: Tensor, B: Tensor, C: Tensor, h: Tensor, zoh: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """h_t = exp(Δ_t A) h_{t−1} + B̄_t x_t,  y_t = C_tᵀ h_t, token by token; B̄ = Δ B, or (exp(ΔA) − 1)/A · B.

    Args:
        x, Δ: [R, L, E].
        A: [E, N], negative.
        B, C: [R, L, N].
        h: [R, E, N].

    Returns:
        y [R, L, E], each token's own contribution to its y [R, L, E], and the last h.
    """
    y, own = [], []
    for t in range(x.shape[1]):
        ΔA = Δ[:, t, :, None] * A
        B̄ = (torch.expm1(ΔA) / A if zoh else Δ[:, t, :, None]) * B[:, t, None, :]
        write = B̄ * x[:, t, :, None]
        h = ΔA.exp() * h + write
        y.append(torch.einsum("ren,rn->re", h, C[:, t]))
        own.append(torch.einsum("ren,rn->re", write, C[:, t]))
    return torch.stack(y, dim=1), torch.stack(own, dim=1), h


class Mamba(RecurrentMixer):
    """The selective scan (arXiv 2312.00752): Δ, B and C depend on the input, A does not."""

    needs_kernel = False

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        p = self.params
        self.inner_size = p.expand * self.hidden_size
        self.in_proj = nn.Linear(self.hidden_size, self.inner_size, bias=False)
        self.g_proj = nn.Linear(self.hidden_size, self.inner_size, bias=False)
        self.conv = ShortConvolution(self.inner_size, p.conv_kernel, bias=True)
        self.x_proj = nn.Linear(self.inner_size, p.time_step_rank + 2 * p.state_size, bias=False)
        self.dt_proj = nn.Linear(p.time_step_rank, self.inner_size, bias=True)
        self.A_log = nn.Parameter(torch.empty(self.inner_size, p.state_size))
        self.D = nn.Parameter(torch.empty(self.inner_size))
        self.out_proj = nn.Linear(self.inner_size, self.hidden_size, bias=False)

    def init_parameters(self) -> None:
        """A_n = −n, D = 1, softplus(dt bias) log-uniform between time_step_min and time_step_max."""
        p = self.params
        rates = torch.arange(1, p.state_size + 1, dtype=torch.float32, device=self.A_log.device)
        init.copy_(self.A_log, rates.log().expand_as(self.A_log))
        init.ones_(self.D)
        bound = p.time_step_rank**-0.5
        init.uniform_(self.dt_proj.weight, -bound, bound)
        init_step_bias(self.dt_proj.bias, p.time_step_min, p.time_step_max)

    def project(self, x: Tensor, rows: Rows) -> States:
        return {"x": self.in_proj(x)}

    def scan(self, inputs: States, states: States, run: Run) -> tuple[Tensor, States]:
        lengths = run.lengths
        p, kept = self.params, {}
        (x,), kept["tail"] = self.conv(inputs["x"], states.get("tail"), lengths)
        rank, B, C = self.x_proj(x).split([p.time_step_rank, p.state_size, p.state_size], dim=-1)
        delta = zero_beyond(F.softplus(at_least_fp32(self.dt_proj(rank))), lengths)
        A, state = -at_least_fp32(self.A_log).exp(), states.get("state")
        D = None if run.exclude_own else self.D  # the skip applies once, forwards
        if run.sequential:
            x, B, C = (at_least_fp32(y) for y in (x, B, C))
            if state is None:
                state = delta.new_zeros(x.shape[0], self.inner_size, p.state_size)
            y, own, kept["state"] = eager_mamba(x, delta, A, B, C, state, p.discretization == "zoh")
            return y - own if run.exclude_own else y + self.D * x, kept
        y, kept["state"] = selective_scan(
            x,
            delta,
            A,
            B,
            C,
            D,
            initial_state=state,
            output_final_state=True,
            discretization=p.discretization,
            exclude_own=run.exclude_own,
        )
        return y, kept

    def finish(self, readout: Tensor, x: Tensor) -> Tensor:
        return self.out_proj(readout.to(x.dtype) * F.silu(self.g_proj(x)))
