"""What linear attention with decay shares: the scan over q, k, v and log decays, token by token or by chunks.

Shapes: R rows, L row length, H heads, K key width, V value width.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..cache import States
from ..ops.decayed_scan import decayed_scan
from ..ops.numerics import at_least_fp32
from .base import RecurrentMixer, Run, split_heads, zero_beyond


class LinearAttention(RecurrentMixer):
    """S_t = Diag(α_t) S_{t−1} + k_t v_tᵀ,  o_t = scale · q_t S_t, for `project` that returns q, k, v [R, L, H·W]."""

    scale: float = 1.0

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.key_dim, self.value_dim = self.params.key_dim(config), self.params.value_dim(config)

    def read(self, inputs: States, states: States, run: Run) -> tuple[Sequence[Tensor], States]:
        """q, k and v [R, L, H·W] from the projections, and what of the states this took (a convolution's tail)."""
        return [inputs[name] for name in "qkv"], {}

    def log_decay(self, inputs: States, lengths: Tensor | None) -> Tensor:
        """log α: [H], [R, H, L] or [R, H, L, K] in at least fp32, zero behind the real tokens."""
        return split_heads(zero_beyond(inputs["log_decay"], lengths), self.num_heads)

    def recurrence(self, q: Tensor, k: Tensor, v: Tensor, log_α: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        """The same step as the paper writes it."""
        raise NotImplementedError

    def scan(self, inputs: States, states: States, run: Run) -> tuple[Tensor, States]:
        qkv, kept = self.read(inputs, states, run)
        q, k, v = (split_heads(zero_beyond(x, run.lengths), self.num_heads) for x in qkv)
        log_α, dtype, state = self.log_decay(inputs, run.lengths), q.dtype, states.get("state")
        if run.sequential:
            q, k, v = (at_least_fp32(x) for x in (q, k, v))
            if state is None:
                state = q.new_zeros(*q.shape[:2], self.key_dim, self.value_dim)
            readout, kept["state"] = self.recurrence(q, k, v, log_α, state)
            readout = readout.to(dtype)
        else:
            readout, last = decayed_scan(q, k, v, log_α, scale=self.scale, initial_state=state, output_final_state=True)
            assert last is not None
            kept["state"] = last
        if run.exclude_own:
            readout = readout - self.scale * (at_least_fp32(q) * k).sum(-1, keepdim=True) * v
        return readout.transpose(1, 2), kept
