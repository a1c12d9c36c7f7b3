"""`deltanet`: error-correcting fast weights. The other mixers of the delta rule differ from it only in their gates.

Shapes: R rows, L row length, H heads, K = V head width, D model width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..cache import States
from ..context import Rows
from ..norms import l2_normalize
from ..ops.delta_rule import delta_rule
from ..ops.numerics import at_least_fp32, full_precision
from .base import GatedHeadNorm, RecurrentMixer, ShortConvolution, split_heads, zero_beyond


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
    which gates it has (`gates`), what they erase and write (`erase_and_write`) and its recurrence (`recurrence`).
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        D, width, bias = self.hidden_size, self.num_heads * self.head_dim, config.attention_bias
        self.q_proj = nn.Linear(D, width, bias=bias)
        self.k_proj = nn.Linear(D, width, bias=bias)
        self.v_proj = nn.Linear(D, width, bias=bias)
        self.b_proj = nn.Linear(D, self.num_heads, bias=False)
        self.conv = ShortConvolution(3 * width, self.params.conv_kernel) if self.params.use_short_conv else None
        self.norm = GatedHeadNorm(self.num_heads, self.head_dim, config.rms_norm_eps, centred=False)
        self.o_proj = nn.Linear(width, D, bias=bias)

    def gates(self, x: Tensor) -> States:
        """[R, L, D] -> gates [R, L, H, …] in at least fp32; "log_decay", if any, is [R, L, H] or [R, L, H, K]."""
        β = at_least_fp32(self.b_proj(x)).sigmoid()
        return {"beta": 2.0 * β if self.params.allow_negative_eigenvalues else β}

    def erase_and_write(self, k: Tensor, v: Tensor, gates: States) -> tuple[Tensor, Tensor]:
        """k, v, gates [R, H, L, …] -> e, z of the step S_t = (I − k_t e_tᵀ) Diag(α_t) S_{t−1} + k_t z_tᵀ."""
        β = gates["beta"][..., None]
        return β * k, β * v

    def recurrence(self, q: Tensor, k: Tensor, v: Tensor, gates: States, S: Tensor) -> tuple[Tensor, Tensor]:
        """The same step as the paper writes it."""
        return eager_deltanet(q, k, v, gates["beta"], S)

    def project(self, x: Tensor, rows: Rows) -> States:
        return {"qkv": torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1), **self.gates(x)}

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
        gates = {name: zero_beyond(x, lengths).transpose(1, 2) for name, x in inputs.items() if name != "qkv"}
        e, z = self.erase_and_write(k, v, gates)
        scale, state = self.head_dim**-0.5, states.get("state")
        if sequential:
            if state is None:
                state = q.new_zeros(*q.shape[:2], self.head_dim, self.head_dim)
            readout, kept["state"] = self.recurrence(q, k, v, gates, state)
        else:
            readout, kept["state"] = delta_rule(
                q, k, e, z, gates.get("log_decay"), scale=scale, initial_state=state, output_final_state=True
            )
        if exclude_own:
            readout = readout - scale * (q * k).sum(-1, keepdim=True) * z
        return readout.transpose(1, 2), kept

    def finish(self, readout: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(self.norm(readout.to(x.dtype), None))
