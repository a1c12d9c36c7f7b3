"""`deltanet`: error-correcting fast weights. The other mixers of the delta rule differ from it only in their gates.

Shapes: R rows, L row length, H heads, K key width, V value width, D model width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ...cache import States
from ...context import Rows
from ...ops.delta_rule import gated_delta_rule
from ...ops.numerics import at_least_fp32, full_precision
from ...ops.short_convolution import Stream
from ..base import (
    GatedHeadNorm,
    RecurrentMixer,
    Run,
    convolve_streams,
    pass_through,
    qkv_convolution,
    split_heads,
    zero_beyond,
)


@full_precision
def eager_deltanet(q: Tensor, k: Tensor, v: Tensor, β: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """S_t = (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ,  o_t = K^−½ q_t S_t, token by token.

    Args:
        q, k: [R, H, L, K], k of unit length.
        v: [R, H, L, V].
        β: [R, H, L].
        S: [R, H, K, V].

    Returns:
        o [R, H, L, V] and the last S.
    """
    o = []
    for t in range(q.shape[2]):
        v_old = torch.einsum("rhk,rhkv->rhv", k[:, :, t], S)
        S = S + k[:, :, t, :, None] * (β[:, :, t, None] * (v[:, :, t] - v_old))[:, :, None, :]
        o.append(q.shape[-1] ** -0.5 * torch.einsum("rhk,rhkv->rhv", q[:, :, t], S))
    return torch.stack(o, dim=2), S


class DeltaNet(RecurrentMixer):
    """The delta rule (arXiv 2406.06484), β = σ(b).

    Short convolutions with SiLU on q, k and v; unit-length q and k; RMS norm per head on the readout. A variant says
    which gates it has (`gate_widths`, `gates`), what they erase and write (`erase_and_write`) and its recurrence.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        D, H, bias = self.hidden_size, self.num_heads, config.attention_bias
        self.key_dim, self.value_dim = self.params.key_dim(config), self.params.value_dim(config)
        K, V = self.key_dim, self.value_dim
        self.q_proj = nn.Linear(D, H * K, bias=bias)
        self.k_proj = nn.Linear(D, H * K, bias=bias)
        self.v_proj = nn.Linear(D, H * V, bias=bias)
        self.b_proj = nn.Linear(D, H, bias=False)
        self.gate_widths = {"b_proj": H}  # projections behind the gates, which are computed together
        self.streams = (Stream(H * K, K), Stream(H * K, K), Stream(H * V))
        self.conv = qkv_convolution(self.params, self.streams)
        self.norm = GatedHeadNorm(H, V, config.rms_norm_eps, centred=False, activation=self.gate_activation)
        self.o_proj = nn.Linear(H * V, D, bias=self.output_bias)

    @property
    def gate_activation(self) -> str:
        """Of the output gate."""
        return "silu"

    def gates(self, *projected: Tensor) -> States:
        """What the projections of `gate_widths` made of the tokens -> gates [R, L, H, …] in at least fp32.

        "log_decay", if any, is [R, L, H] or [R, L, H, K].
        """
        return {"beta": self.beta(projected[0])}

    def beta(self, b: Tensor) -> Tensor:
        """β, or what erases in `gated_deltanet2`, before its sigmoid -> after it."""
        β = at_least_fp32(b).sigmoid()
        return 2.0 * β if self.params.allow_negative_eigenvalues else β

    def begin_as_attention(self) -> list[str]:
        """Keys and values of each token as they are."""
        return pass_through(self.conv)

    def erase_and_write(self, gates: States) -> tuple[Tensor, Tensor | None]:
        """b, w of the step S_t = (I − k_t (b_t ⊙ k_t)ᵀ) Diag(α_t) S_{t−1} + k_t (w_t ⊙ v_t)ᵀ; w is b if None."""
        return gates["beta"], None

    def recurrence(self, q: Tensor, k: Tensor, v: Tensor, gates: States, S: Tensor) -> tuple[Tensor, Tensor]:
        """The same step as the paper writes it."""
        return eager_deltanet(q, k, v, gates["beta"], S)

    def project(self, x: Tensor, rows: Rows) -> States:
        gates = self.joint(x, *self.gate_widths).split(list(self.gate_widths.values()), dim=-1)
        return {"qkv": self.joint(x, "q_proj", "k_proj", "v_proj"), **self.gates(*gates)}

    def scan(self, inputs: States, states: States, run: Run) -> tuple[Tensor, States]:
        parts, kept = convolve_streams(self.conv, inputs["qkv"], states, run, self.streams, self.params.activation)
        q, k, v = (split_heads(x, self.num_heads) for x in parts)
        gates = {name: zero_beyond(x, run.lengths).transpose(1, 2) for name, x in inputs.items() if name != "qkv"}
        scale, state = self.key_dim**-0.5, states.get("state")
        if run.sequential:
            v = at_least_fp32(v)
            if state is None:
                state = q.new_zeros(*q.shape[:2], self.key_dim, self.value_dim)
            readout, kept["state"] = self.recurrence(q, k, v, gates, state)
        else:
            readout, last = gated_delta_rule(
                q, k, v, *self.erase_and_write(gates), gates.get("log_decay"),
                scale=scale, initial_state=state, output_final_state=True,
            )  # fmt: skip
            assert last is not None
            kept["state"] = last
        if run.exclude_own:
            erase, write = self.erase_and_write(gates)
            gate = erase if write is None else write
            written = at_least_fp32(v) * (gate if gate.dim() == 4 else gate.unsqueeze(-1))
            readout = readout - scale * (q * k).sum(-1, keepdim=True) * written
        return readout.transpose(1, 2), kept

    def finish(self, readout: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(self.norm(readout.to(x.dtype), None))
