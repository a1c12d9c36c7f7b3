"""`rglru`: the recurrent block of Griffin, a gated linear recurrence with a diagonal state.

Shapes: R rows, L row length, D model width, E channels of the recurrence, H blocks of the gates.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from ...cache import States
from ...context import Rows
from ...ops.diagonal_scan import diagonal_scan
from ...ops.numerics import at_least_fp32, full_precision
from ..base import RecurrentMixer, Run, ShortConvolution, zero_beyond

SMALLEST_VARIANCE = 1e-12  # of 1 − a²: keeps the slope of its square root finite


@full_precision
def eager_rglru(x: Tensor, r: Tensor, i: Tensor, log_a: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """a_t = a^(c r_t),  h_t = a_t ⊙ h_{t−1} + √(1 − a_t²) ⊙ (i_t ⊙ x_t), token by token.

    Args:
        x, r, i: [R, L, E], gates between 0 and 1.
        log_a: [E], c log a.
        h: [R, E].

    Returns:
        All h_t [R, L, E] and the last.
    """
    states = []
    for t in range(x.shape[1]):
        log_a_t = log_a * r[:, t]
        h = log_a_t.exp() * h + root_variance(log_a_t) * i[:, t] * x[:, t]
        states.append(h)
    return torch.stack(states, dim=1), h


def root_variance(log_a: Tensor) -> Tensor:
    """√(1 − a²)."""
    return (-torch.expm1(2.0 * log_a)).clamp_min(SMALLEST_VARIANCE).sqrt()


class BlockDiagonal(nn.Module):
    """A linear map with one block a head: [..., E] -> [..., E] in at least fp32."""

    def __init__(self, channels: int, blocks: int) -> None:
        super().__init__()
        width = channels // blocks
        self.weight = nn.Parameter(torch.empty(blocks, width, width))
        self.bias = nn.Parameter(torch.empty(blocks, width))

    def init_parameters(self) -> None:
        """Variance 1/width, as the released code."""
        init.normal_(self.weight, mean=0.0, std=self.weight.shape[-1] ** -0.5)
        init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        blocks = x.unflatten(-1, (len(self.bias), -1))
        return at_least_fp32(torch.einsum("...hi,hij->...hj", blocks, self.weight) + self.bias).flatten(-2)


class RGLRU(RecurrentMixer):
    """Griffin's recurrent block (arXiv 2402.19427): a GeLU branch times a branch of convolution and RG-LRU.

    r = σ(W_a x + b_a), i = σ(W_x x + b_x), log a = −softplus(Λ), with c = `decay_scale`. The gates see the convolved
    input and have a block a head. An encoder's reverse direction reads a_t ⊙ h, without the token's own write.
    """

    needs_kernel = False
    traces_chunks = False

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        D, E, bias = self.hidden_size, self.params.lru_width, config.attention_bias
        self.in_proj = nn.Linear(D, E, bias=bias)
        self.g_proj = nn.Linear(D, E, bias=bias)
        self.conv = ShortConvolution(E, self.params.conv_kernel, bias=True, activation="identity")
        self.recurrence_gate = BlockDiagonal(E, self.num_heads)
        self.input_gate = BlockDiagonal(E, self.num_heads)
        self.decay = nn.Parameter(torch.empty(E))  # Λ
        self.out_proj = nn.Linear(E, D, bias=self.output_bias)

    def init_parameters(self) -> None:
        """a^c uniform in (0.9, 0.999)."""
        kept = torch.empty_like(self.decay).uniform_(0.9, 0.999)
        init.copy_(self.decay, torch.log(torch.expm1(-kept.log() / self.params.decay_scale)))

    def project(self, x: Tensor, rows: Rows) -> States:
        return {"x": self.in_proj(x)}

    def scan(self, inputs: States, states: States, run: Run) -> tuple[Tensor, States]:
        (x,), tail = self.conv(inputs["x"], states.get("tail"), run.lengths)
        r, i = self.recurrence_gate(x).sigmoid(), self.input_gate(x).sigmoid()
        log_a = -self.params.decay_scale * F.softplus(at_least_fp32(self.decay))
        x, state = at_least_fp32(x), states.get("state")
        first = state is None and self.params.full_first_write
        if run.sequential and run.lengths is None and not first and not run.exclude_own:
            state = x.new_zeros(len(x), x.shape[2]) if state is None else state
            readout, state = eager_rglru(x, r, i, log_a, state)
            return readout, {"tail": tail, "state": state}
        log_a_t = log_a * r
        write = root_variance(log_a_t) * i * x
        if first:
            write = torch.cat([(i * x)[:, :1], write[:, 1:]], dim=1)
        log_a_t, write = (zero_beyond(y, run.lengths) for y in (log_a_t, write))
        readout, state = diagonal_scan(log_a_t, write, initial_state=state, sequential=run.sequential)
        return readout - write if run.exclude_own else readout, {"tail": tail, "state": state}

    def finish(self, readout: Tensor, x: Tensor) -> Tensor:
        return self.out_proj(readout.to(x.dtype) * F.gelu(self.g_proj(x), approximate="tanh"))
