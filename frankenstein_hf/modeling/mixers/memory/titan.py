"""`titan`: windowed attention beside a neural memory that learns at test time.

Shapes: R rows, L row length, H heads, G key/value heads, W head width, E layers of a memory, D model width.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from ...cache import MixerStateLayer, States
from ...context import Rows
from ...extras import LayerExtras
from ...ops.neural_memory import MemoryState, neural_memory, recall, surprise
from ...ops.numerics import at_least_fp32, full_precision
from ...ops.short_convolution import Stream
from ...ops.tracing import exporting, scan_chunks
from ..base import GatedHeadNorm, Run, ShortConvolution, convolve_streams, last_real, merge_heads, split_heads
from ..sparse.swa import SlidingWindowAttention


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

    With `use_short_conv` all projections pass a short convolution. `persistent_tokens` learned tokens stand in front of
    every document: its tokens see all of them, and its memory has learned them first, in either direction.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        p, D, W, bias = self.params, self.hidden_size, self.head_dim, config.attention_bias
        H, G = self.num_heads, self.num_key_value_heads
        self.persistent = nn.Parameter(torch.empty(p.persistent_tokens, D)) if p.persistent_tokens else None
        self.conv = self.memory_conv = None
        if p.use_short_conv:
            self.conv = ShortConvolution((H + 2 * G) * W, p.conv_kernel, activation="identity")
        if not p.depth:
            return
        width = H * W
        if p.use_short_conv:
            self.memory_conv = ShortConvolution(3 * width, p.conv_kernel)
        self.memory_streams = (Stream(width, W), Stream(width, W), Stream(width))
        self.memory_q_proj = nn.Linear(D, width, bias=bias)
        self.memory_k_proj = nn.Linear(D, width, bias=bias)
        self.memory_v_proj = nn.Linear(D, width, bias=bias)
        self.rates_proj = nn.Linear(D, 3 * self.num_heads)  # keeping, momentum and step, before their sigmoids
        self.memory = nn.Parameter(torch.empty(self.num_heads, p.depth, W, W))
        self.g_proj = nn.Linear(D, width, bias=bias) if p.gate else None
        self.norm = GatedHeadNorm(self.num_heads, W, config.rms_norm_eps, centred=False)

    def init_parameters(self) -> None:
        """Memory normal with deviation W^−½; 1 − α = 0.98, η = 0.88 and a step half its maximum for a zero token."""
        if self.persistent is not None:
            init.normal_(self.persistent, mean=0.0, std=self.config.initializer_range)
        if not self.params.depth:
            return
        init.normal_(self.memory, mean=0.0, std=self.head_dim**-0.5)
        bias = torch.tensor([4.0, 2.0, 0.0], device=self.memory.device).repeat_interleave(self.num_heads)
        init.copy_(self.rates_proj.bias, bias)

    def mix(self, x: Tensor, rows: Rows, layer: MixerStateLayer | None) -> tuple[Tensor, LayerExtras | None]:
        states = (layer.read(self.advance_all) if layer is not None else None) or {}
        inputs, sequential = self.memorable(x), rows.context.backend == "eager"
        qkv = self.joint(x, "q_proj", "k_proj", "v_proj")
        if self.conv is not None:
            inputs["qkv"] = qkv
            qkv = self._convolve(qkv, states, rows.lengths)
        q, k, v = self.heads(qkv, rows)
        inputs |= {"key": k.transpose(1, 2), "value": v.transpose(1, 2)}
        if states:
            output, weights = self.attend_to_past(q, k, v, states, rows)
        else:
            output, weights = self.attend(q, k, v, rows)
        output = merge_heads(output)
        memory: States = {}
        if self.params.depth:
            remember = self.remember_traced if exporting() and rows.size != 1 else self.remember
            readout, memory = remember(inputs, states, Run(rows.lengths, sequential=sequential))
            if not rows.is_causal:
                mirrored = {name: rows.flip(tensor) for name, tensor in inputs.items()}
                reverse, _ = remember(mirrored, {}, Run(rows.lengths, exclude_own=True, sequential=sequential))
                readout = readout + rows.flip(reverse)
            gate = None if self.g_proj is None else self.g_proj(x)
            output = output + self.norm(readout.to(x.dtype), gate)
        if layer is not None:
            states = self.sized(self._advance_ring(inputs, states, rows.lengths), layer) | memory
            layer.write(states, inputs, rows.context.keep)
        return self.o_proj(output), LayerExtras(weights, max_logits=self.max_logits(q, k, rows))

    # ------------------------------------------------------------------ attention

    def _convolve(self, qkv: Tensor, states: States, lengths: Tensor | None) -> Tensor:
        """The attention's projections after their convolution, which goes on from the persistent tokens."""
        assert self.conv is not None
        (qkv,), _ = self.conv(qkv, self._attention_tail(states, len(qkv)), lengths)
        return qkv

    def _attention_tail(self, states: States, R: int) -> Tensor | None:
        """[R, W−1, E] what the convolution has seen last; None: nothing."""
        if "attention_tail" in states or self.persistent is None:
            return states.get("attention_tail")
        raw = self.joint(self.persistent[None], "q_proj", "k_proj", "v_proj")
        return last_real(raw.new_zeros(1, self.params.conv_kernel - 1, raw.shape[-1]), raw, None).expand(R, -1, -1)

    def _persistent_heads(self, R: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [R, ·, N, W] of the N persistent tokens, which all stand at position 0."""
        assert self.persistent is not None
        qkv = self.joint(self.persistent[None], "q_proj", "k_proj", "v_proj")
        if self.conv is not None:
            (qkv,), _ = self.conv(qkv, None, None)
        H, G = self.num_heads, self.num_key_value_heads
        q, k, v = split_heads(qkv, H + 2 * G).expand(R, -1, -1, -1).split([H, G, G], dim=1)
        return *self.norm_heads(q, k), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Attention within the rows, to persistent tokens in front of each too."""
        if (N := self.params.persistent_tokens) == 0:
            return super().attend(q, k, v, rows)
        q, k, v = (torch.cat(pair, dim=2) for pair in zip(self._persistent_heads(len(q)), (q, k, v)))
        rows = replace(rows, size=rows.size + N, lengths=None if rows.lengths is None else rows.lengths + N)
        output, weights = super().attend(q, k, v, rows)
        return output[:, :, N:], None if weights is None else weights[:, :, N:, N:]

    def _advance_ring(self, inputs: States, states: States, lengths: Tensor | None) -> States:
        pairs, kept, R = {name: inputs[name] for name in ("key", "value")}, {}, len(inputs["key"])
        if self.conv is not None:
            raw, tail = inputs["qkv"], self._attention_tail(states, R)
            tail = raw.new_zeros(R, self.params.conv_kernel - 1, raw.shape[-1]) if tail is None else tail.to(raw.dtype)
            kept["attention_tail"] = last_real(tail, raw, lengths).clone()
        if self.persistent is not None and "seen" not in states:
            _, *first = self._persistent_heads(R)
            pairs = {name: torch.cat([y.transpose(1, 2), pairs[name]], dim=1) for name, y in zip(pairs, first)}
            lengths = None if lengths is None else lengths + len(self.persistent)
        return self.advance(pairs, states if "seen" in states else {}, lengths) | kept

    # ------------------------------------------------------------------ memory

    def memorable(self, x: Tensor) -> States:
        """[R, L, D] -> what the memory learns from each token, before its convolution, and how fast."""
        if not self.params.depth:
            return {}
        qkv = self.joint(x, "memory_q_proj", "memory_k_proj", "memory_v_proj")
        keep, momentum, step = at_least_fp32(self.rates_proj(x)).chunk(3, dim=-1)
        return {
            "memory_qkv": qkv,
            "log_keep": F.logsigmoid(keep),
            "log_momentum": F.logsigmoid(momentum),
            "step": self.params.max_step * step.sigmoid() * (-momentum).sigmoid(),
        }

    def remember(self, inputs: States, states: States, run: Run) -> tuple[Tensor, States]:
        """What the memory recalls [R, L, H, W], and its state afterwards."""
        if self.persistent is not None and "memory" not in states and "in_front" not in states:
            states = self._remember_persistent(len(inputs["step"]), run.sequential)
        lengths = run.lengths
        tail = {"tail": states["memory_tail"]} if "memory_tail" in states else {}
        parts, kept = convolve_streams(
            self.memory_conv, inputs["memory_qkv"], tail, run, self.memory_streams, activation="silu"
        )
        kept = {"memory_tail": kept["tail"]} if kept else {}
        q, k, v = (split_heads(at_least_fp32(x), self.num_heads) for x in parts)
        log_keep, log_η, θ = (inputs[name].transpose(1, 2) for name in ("log_keep", "log_momentum", "step"))
        R, L = inputs["step"].shape[:2]
        p, phase = self.params, None
        if "memory" in states:
            state = MemoryState(states["memory_start"], states["memory"], states["momentum"])
            phase = states["seen"] % p.chunk_size
        else:
            initial = at_least_fp32(self.memory).expand(R, -1, -1, -1, -1)
            state = MemoryState(initial, initial, torch.zeros_like(initial))
        options: dict[str, Any] = {
            "chunk_size": p.chunk_size,
            "longest": p.max_gradient,
            "exclude_own": run.exclude_own,
        }
        if run.sequential or L == 1:
            places = torch.arange(L, device=θ.device)
            live = (places < (L if lengths is None else lengths[:, None])).expand(R, L)
            phase = torch.zeros(R, dtype=torch.long, device=live.device) if phase is None else phase
            readout, state = eager_titan(q, k, v, log_keep, log_η, θ, state, phase=phase, live=live, **options)
        else:
            readout, state = neural_memory(q, k, v, log_keep, log_η, θ, state, phase=phase, lengths=lengths, **options)
        kept |= {"memory_start": state.start, "memory": state.now, "momentum": state.momentum}
        return readout.transpose(1, 2), kept

    def remember_traced(self, inputs: States, states: States, run: Run) -> tuple[Tensor, States]:
        """`remember` token by token in a traced graph."""

        def step(inputs: States, states: States, lengths: Tensor) -> tuple[Tensor, States]:
            readout, kept = self.remember(inputs, states, run._replace(lengths=lengths, sequential=True))
            seen = states.get("seen", torch.full_like(lengths, self.params.persistent_tokens))
            return readout, kept | {"seen": seen + lengths}

        memorable = {name: x for name, x in inputs.items() if name not in ("key", "value", "qkv")}
        return scan_chunks(step, memorable, states, run.lengths)

    def _remember_persistent(self, R: int, sequential: bool) -> States:
        """The states after the persistent tokens, where every document begins."""
        assert self.persistent is not None
        inputs = {name: x.expand(R, *x.shape[1:]) for name, x in self.memorable(self.persistent[None]).items()}
        _, states = self.remember(inputs, {"in_front": self.persistent}, Run(sequential=sequential))
        return states | {"seen": torch.full((R,), len(self.persistent), device=self.persistent.device)}

    def advance_all(self, inputs: States, states: States, lengths: Tensor | None) -> States:
        """Ring and memory after `inputs`; replays a call when a cache rolls back."""
        memory = self.remember(inputs, states, Run(lengths))[1] if self.params.depth else {}
        return self._advance_ring(inputs, states, lengths) | memory
