"""`titan`: windowed attention beside a neural memory that learns at test time.

Shapes: R rows, L row length, H heads, G key/value heads, W head width, E layers of a memory, D model width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from ..cache import MixerStateLayer, States
from ..context import Rows
from ..extras import LayerExtras
from ..norms import l2_normalize
from ..ops.neural_memory import MemoryState, neural_memory, recall, surprise
from ..ops.numerics import at_least_fp32, full_precision
from ..ops.tracing import exporting, scan_chunks
from .base import GatedHeadNorm, merge_heads
from .swa import SlidingWindowAttention


@full_precision
def eager_titan(
    q: Tensor, k: Tensor, v: Tensor, log_keep: Tensor, log_η: Tensor, θ: Tensor, state: MemoryState,
    *, chunk_size: int, longest: float, phase: Tensor, live: Tensor, exclude_own: bool,
) -> tuple[Tensor, MemoryState]:  # fmt: skip
    """S_t = η_t S_{t−1} − θ_t ∇ℓ(P; k_t, v_t),  M_t = (1 − α_t) M_{t−1} + S_t,  y_t = M_t(q_t), token by token.

    ℓ(P; k, v) = ‖P(k) − v‖², P the memory at the chunk's start. Arguments and results as of `neural_memory`.
    """
    (P, M, S), y = state, []
    for t in range(q.shape[2]):
        P = torch.where(((phase + t) % chunk_size == 0).view(-1, 1, 1, 1, 1), M, P)
        a, δ = surprise(P, k[:, :, t, None], v[:, :, t, None], longest)
        η_t, θ_t, keep_t = (x[:, :, t, None, None, None] for x in (log_η.exp(), θ, log_keep.exp()))
        own = -θ_t * (a.mT @ δ)
        real = live[:, t].view(-1, 1, 1, 1, 1)
        S = torch.where(real, η_t * S + own, S)
        M = torch.where(real, keep_t * M + S, M)
        y.append(recall(M - own if exclude_own else M, q[:, :, t, None]))
    return torch.cat(y, dim=2), MemoryState(P, M, S)


class Titan(SlidingWindowAttention):
    """Attention to a window plus a memory of the whole past, added up (arXiv 2501.00663).

    The memory is a network per head with weights of its own initial value, learned; at test time it is trained to map
    keys to values by gradient descent with momentum η and forgetting α, all from the token: 1 − α = σ(W_α x),
    η = σ(W_η x) and θ = max_step · σ(W_θ x) (1 − η). Queries, keys and values pass a SiLU; queries and keys have
    length one. Chunk borders count the row's real tokens. What is recalled is normalised per head and gated.

    An encoder reads the row backwards too, with the same initial memory and with chunks counted from the row's end.
    There a token reads the memory after its forgetting but without its own gradient: (1 − α_t) M_{t−1} + η_t S_{t−1}.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        p, D, W, bias = self.params, self.hidden_size, self.head_dim, config.attention_bias
        if not p.depth:
            return
        width = self.num_heads * W
        self.memory_q_proj = nn.Linear(D, width, bias=bias)
        self.memory_k_proj = nn.Linear(D, width, bias=bias)
        self.memory_v_proj = nn.Linear(D, width, bias=bias)
        self.rates_proj = nn.Linear(D, 3 * self.num_heads)  # keeping, momentum and step, before their sigmoids
        self.memory = nn.Parameter(torch.empty(self.num_heads, p.depth, W, W))
        self.g_proj = nn.Linear(D, width, bias=bias) if p.gate else None
        self.norm = GatedHeadNorm(self.num_heads, W, config.rms_norm_eps, centred=False)

    def init_parameters(self) -> None:
        """Memory normal with deviation W^−½; 1 − α = 0.98, η = 0.88 and a step half its maximum for a zero token."""
        if not self.params.depth:
            return
        init.normal_(self.memory, mean=0.0, std=self.head_dim**-0.5)
        bias = torch.tensor([4.0, 2.0, 0.0], device=self.memory.device).repeat_interleave(self.num_heads)
        init.copy_(self.rates_proj.bias, bias)

    def mix(self, x: Tensor, rows: Rows, layer: MixerStateLayer | None) -> tuple[Tensor, LayerExtras | None]:
        q, k, v = self.heads(x, rows)
        inputs = self.memorable(x) | {"key": k.transpose(1, 2), "value": v.transpose(1, 2)}
        states = (layer.read(self.advance_all) if layer is not None else None) or {}
        if states:
            output, weights = self.attend_to_past(q, k, v, states, rows)
        else:
            output, weights = self.attend(q, k, v, rows)
        output = merge_heads(output)
        memory: States = {}
        if self.params.depth:
            sequential = rows.context.backend == "eager"
            remember = self.remember_traced if exporting() and rows.size != 1 else self.remember
            readout, memory = remember(inputs, states, rows.lengths, sequential=sequential)
            if not rows.is_causal:
                mirrored = {name: rows.flip(tensor) for name, tensor in inputs.items()}
                reverse, _ = remember(mirrored, {}, rows.lengths, exclude_own=True, sequential=sequential)
                readout = readout + rows.flip(reverse)
            gate = None if self.g_proj is None else self.g_proj(x)
            output = output + self.norm(readout.to(x.dtype), gate)
        if layer is not None:
            states = self.sized(self._advance_ring(inputs, states, rows.lengths), layer) | memory
            layer.write(states, inputs, rows.context.keep, rows.context.all_real)
        return self.o_proj(output), LayerExtras(weights, max_logits=self.max_logits(q, k, rows))

    def memorable(self, x: Tensor) -> States:
        """[R, L, D] -> what the memory learns from each token and how fast."""
        if not self.params.depth:
            return {}
        heads = (-1, (self.num_heads, self.head_dim))
        q, k, v = (F.silu(at_least_fp32(proj(x))).unflatten(*heads) for proj in (
            self.memory_q_proj, self.memory_k_proj, self.memory_v_proj))  # fmt: skip
        keep, momentum, step = at_least_fp32(self.rates_proj(x)).chunk(3, dim=-1)
        return {
            "memory_query": l2_normalize(q),
            "memory_key": l2_normalize(k),
            "memory_value": v,
            "log_keep": F.logsigmoid(keep),
            "log_momentum": F.logsigmoid(momentum),
            "step": self.params.max_step * step.sigmoid() * (-momentum).sigmoid(),
        }

    def remember(
        self,
        inputs: States,
        states: States,
        lengths: Tensor | None,
        *,
        exclude_own: bool = False,
        sequential: bool = False,
    ) -> tuple[Tensor, States]:
        """What the memory recalls [R, L, H, W], and its state afterwards."""
        names = ("memory_query", "memory_key", "memory_value", "log_keep", "log_momentum", "step")
        q, k, v, log_keep, log_η, θ = (inputs[name].transpose(1, 2) for name in names)
        R, L = inputs["step"].shape[:2]
        p, phase = self.params, None
        if "memory" in states:
            state = MemoryState(states["memory_start"], states["memory"], states["momentum"])
            phase = states["seen"] % p.chunk_size
        else:
            initial = at_least_fp32(self.memory).expand(R, -1, -1, -1, -1)
            state = MemoryState(initial, initial, torch.zeros_like(initial))
        options: dict[str, Any] = {"chunk_size": p.chunk_size, "longest": p.max_gradient, "exclude_own": exclude_own}
        if sequential or L == 1:
            places = torch.arange(L, device=θ.device)
            live = (places < (L if lengths is None else lengths[:, None])).expand(R, L)
            phase = torch.zeros(R, dtype=torch.long, device=live.device) if phase is None else phase
            readout, state = eager_titan(q, k, v, log_keep, log_η, θ, state, phase=phase, live=live, **options)
        else:
            readout, state = neural_memory(q, k, v, log_keep, log_η, θ, state, phase=phase, lengths=lengths, **options)
        kept = {"memory_start": state.start, "memory": state.now, "momentum": state.momentum}
        return readout.transpose(1, 2), kept

    def remember_traced(
        self, inputs: States, states: States, lengths: Tensor | None, **options: bool
    ) -> tuple[Tensor, States]:
        """`remember` token by token in a traced graph."""

        def step(inputs: States, states: States, lengths: Tensor) -> tuple[Tensor, States]:
            readout, kept = self.remember(inputs, states, lengths, **(options | {"sequential": True}))
            return readout, kept | {"seen": states.get("seen", torch.zeros_like(lengths)) + lengths}

        memorable = {name: x for name, x in inputs.items() if name not in ("key", "value")}
        return scan_chunks(step, memorable, states, lengths)

    def _advance_ring(self, inputs: States, states: States, lengths: Tensor | None) -> States:
        return self.advance({name: inputs[name] for name in ("key", "value")}, states, lengths)

    def advance_all(self, inputs: States, states: States, lengths: Tensor | None) -> States:
        """Ring and memory after `inputs`; replays a call when a cache rolls back."""
        memory = self.remember(inputs, states, lengths)[1] if self.params.depth else {}
        return self._advance_ring(inputs, states, lengths) | memory
