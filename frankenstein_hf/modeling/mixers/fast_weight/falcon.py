"""The Falcon family: fast weights that learn the pair (x_t, v_t), x_t = φ(k_{t−1}), and are read after the write.

    η_t = β_t / (statistic_t + λ_t + ε),      γ_t = 1 − min(η_t λ_t, 1 − ε_γ),      o_t = S_tᵀ φ(q_t)

`falcon1`, `2`, `3` take a gradient step on the squared error, `1a`, `2a`, `3a` on the negative inner product. In `2`
and `2a` every value channel has its own step; `3` and `3a` learn from the last B pairs at every step.

Shapes: R rows, L row length, H heads, K = V head width, D model width, B window.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from ...cache import States
from ...context import Rows
from ...norms import RMSNorm
from ...ops.banded import banded_product, dominant_combination
from ...ops.decayed_scan import decayed_scan
from ...ops.delta_rule import gated_delta_rule
from ...ops.fast_weights import channelwise_delta_rule
from ...ops.numerics import at_least_fp32, full_precision
from ...ops.rehearsal import rehearsal_delta_rule, rehearsal_scan
from ...ops.short_convolution import Stream
from ..base import (
    GatedHeadNorm,
    RecurrentMixer,
    Run,
    convolve_streams,
    init_step_bias,
    last_real,
    qkv_convolution,
    zero_beyond,
)

Result = tuple[Tensor, Any]  # readout and state
SHORT = 4  # up to here the token loop is cheaper than setting up chunks


@full_precision
def eager_falcon1(q: Tensor, x: Tensor, v: Tensor, η: Tensor, γ: Tensor, S: Tensor) -> Result:
    """S_t = S_{t−1} Diag(γ_t) + x_t (η_t ⊙ (v_t − S_{t−1}ᵀ x_t))ᵀ,  o_t = S_tᵀ q_t, token by token.

    Args:
        q, x: [R, H, L, K].
        v: [R, H, L, V].
        η, γ: [R, H, L, 1], or [R, H, L, V] in `falcon2`.
        S: [R, H, K, V].

    Returns:
        o [R, H, L, V] and the last S.
    """
    o = []
    for q_t, x_t, v_t, η_t, γ_t in zip(*(y.unbind(2) for y in (q, x, v, η, γ))):
        r = v_t - torch.einsum("rhk,rhkv->rhv", x_t, S)
        S = S * γ_t[:, :, None, :] + x_t[..., :, None] * (η_t * r)[..., None, :]
        o.append(torch.einsum("rhk,rhkv->rhv", q_t, S))
    return torch.stack(o, dim=2), S


@full_precision
def eager_falcon1a(q: Tensor, x: Tensor, v: Tensor, η: Tensor, γ: Tensor, S: Tensor) -> Result:
    """S_t = S_{t−1} Diag(γ_t) + x_t (η_t ⊙ v_t)ᵀ,  o_t = S_tᵀ q_t; shapes as in `eager_falcon1`."""
    o = []
    for q_t, x_t, v_t, η_t, γ_t in zip(*(y.unbind(2) for y in (q, x, v, η, γ))):
        S = S * γ_t[:, :, None, :] + x_t[..., :, None] * (η_t * v_t)[..., None, :]
        o.append(torch.einsum("rhk,rhkv->rhv", q_t, S))
    return torch.stack(o, dim=2), S


@full_precision
def eager_falcon3(q: Tensor, x: Tensor, v: Tensor, η: Tensor, γ: Tensor, B: Tensor, S: Tensor) -> Result:
    """S_t = γ_t S_{t−1} + η_t/B_t Σ_{j=t−B+1}^t x_j (v_j − S_{t−1}ᵀ x_j)ᵀ,  o_t = S_tᵀ q_t, token by token.

    Args:
        q, η, γ, S: As in `eager_falcon1`.
        x, v: [R, H, B−1+L, …], zeros before the first pair.
        B: [R, 1, L, 1] pairs there are in each window.
    """
    o, window = [], x.shape[2] - q.shape[2] + 1
    for t in range(q.shape[2]):
        X, V = x[:, :, t : t + window], v[:, :, t : t + window]
        r = V - torch.einsum("rhbk,rhkv->rhbv", X, S)
        step = (η[:, :, t] / B[:, :, t])[..., None]
        S = γ[:, :, t, :, None] * S + step * torch.einsum("rhbk,rhbv->rhkv", X, r)
        o.append(torch.einsum("rhk,rhkv->rhv", q[:, :, t], S))
    return torch.stack(o, dim=2), S


@full_precision
def eager_falcon3a(q: Tensor, x: Tensor, v: Tensor, η: Tensor, γ: Tensor, B: Tensor, S: Tensor) -> Result:
    """S_t = γ_t S_{t−1} + η_t/B_t Σ_{j=t−B+1}^t x_j v_jᵀ,  o_t = S_tᵀ q_t; shapes as in `eager_falcon3`."""
    o, window = [], x.shape[2] - q.shape[2] + 1
    for t in range(q.shape[2]):
        X, V = x[:, :, t : t + window], v[:, :, t : t + window]
        step = (η[:, :, t] / B[:, :, t])[..., None]
        S = γ[:, :, t, :, None] * S + step * torch.einsum("rhbk,rhbv->rhkv", X, V)
        o.append(torch.einsum("rhk,rhkv->rhv", q[:, :, t], S))
    return torch.stack(o, dim=2), S


eager_falcon2 = eager_falcon1  # η_t and γ_t are vectors over the value channels
eager_falcon2a = eager_falcon1a


class Falcon(RecurrentMixer):
    """What the six share: projections, step sizes, the shifted stream and its tail.

    Short convolutions with SiLU on q, k and v; φ normalises queries and keys; RMS norm per head on the readout. With
    `beta_mode` "ctx_beta", β_t = 2σ(W x_t); with "ctx_eta" the token sets a step s_t = softplus(W x_t) that is bent to
    stay in the stable range, η_t = s_t / (1 + s_t (statistic_t + λ_t + ε)/2), so that β_t < 2 again. With `lambda_mode`
    "ctx", λ_t = softplus(W x_t) times the statistic, through which no gradient flows.
    """

    per_channel = False  # a step size per value channel

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        D, width, bias = self.hidden_size, self.num_heads * self.head_dim, config.attention_bias
        steps = self.num_heads * (self.head_dim if self.per_channel else 1)
        self.q_proj = nn.Linear(D, width, bias=bias)
        self.k_proj = nn.Linear(D, width, bias=bias)
        self.v_proj = nn.Linear(D, width, bias=bias)
        rms = self.params.qk_norm == "rms_norm"
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if rms else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if rms else None
        if self.params.beta_mode != "static":
            self.b_proj = nn.Linear(D, steps, bias=False)
            self.beta_bias = nn.Parameter(torch.empty(steps))
        if self.params.lambda_mode != "static":
            self.lambda_proj = nn.Linear(D, self.num_heads, bias=False)
            self.lambda_bias = nn.Parameter(torch.empty(self.num_heads))
        unit = None if rms else self.head_dim
        self.streams = (Stream(width, unit), Stream(width, unit), Stream(width))
        self.conv = qkv_convolution(self.params, self.streams)
        self.norm = GatedHeadNorm(self.num_heads, self.head_dim, config.rms_norm_eps, centred=False)
        self.o_proj = nn.Linear(width, D, bias=self.output_bias)

    def init_parameters(self) -> None:
        """β = 1; λ log-uniform in (0.001, 0.1) of the statistic, so that a step keeps 0.9 to 0.999 of the state."""
        if self.params.beta_mode == "ctx_eta":
            energy = self.head_dim if self.params.qk_norm == "rms_norm" else 1
            init.constant_(self.beta_bias, math.log(math.expm1(2 / energy)))
        elif self.params.beta_mode == "ctx_beta":
            init.zeros_(self.beta_bias)
        if self.params.lambda_mode == "ctx":
            init_step_bias(self.lambda_bias)

    def project(self, x: Tensor, rows: Rows) -> States:
        inputs = {"qkv": self.joint(x, "q_proj", "k_proj", "v_proj")}
        if self.params.beta_mode != "static":
            gate = at_least_fp32(self.b_proj(x)) + at_least_fp32(self.beta_bias)
            gate = F.softplus(gate) if self.params.beta_mode == "ctx_eta" else 2 * gate.sigmoid()
            inputs["step"] = gate.unflatten(-1, (self.num_heads, -1))
        if self.params.lambda_mode != "static":
            inputs["forget"] = F.softplus(at_least_fp32(self.lambda_proj(x)) + at_least_fp32(self.lambda_bias))
        return inputs

    def scan(self, inputs: States, states: States, run: Run) -> tuple[Tensor, States]:
        lengths = run.lengths
        parts, kept = convolve_streams(self.conv, inputs["qkv"], states, run, self.streams, self.params.activation)
        q, k, v = (at_least_fp32(x).unflatten(-1, (self.num_heads, -1)) for x in parts)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        L, W = q.shape[1], self.params.pairs
        x = self._extend(k, "keys", self.params.past_keys, states, kept, lengths)[:, : W - 1 + L]
        v = self._extend(v, "values", W - 1, states, kept, lengths)
        q, x, v = (y.transpose(1, 2) for y in (q, x, v))
        pairs = self._count_pairs(q, states, kept, lengths)
        η, log_γ = (zero_beyond(y, lengths).transpose(1, 2) for y in self._steps(inputs, self.statistic(x, pairs)))

        state = states.get("state")
        if run.sequential or self.params.chunk_size is None or L <= SHORT:
            if state is None:
                state = q.new_zeros(*q.shape[:2], self.head_dim, self.head_dim)
            readout, kept["state"] = self.eager(q, x, v, η, log_γ.exp(), pairs, state)
        else:
            readout, kept["state"] = self.chunked(q, x, v, η, log_γ, pairs, state)
        if run.exclude_own and not self.params.shifted:  # shifted, what is written at t is not the pair of t
            own = (q * x[:, :, W - 1 :]).sum(-1, keepdim=True)
            readout = readout - own * (η / pairs) * v[:, :, W - 1 :]
        return readout.transpose(1, 2), kept

    def _extend(
        self, new: Tensor, name: str, size: int, states: States, kept: States, lengths: Tensor | None
    ) -> Tensor:
        """[R, size + L, H, W]: `new` behind the last `size` entries of earlier calls, zeros at the start."""
        if not size:
            return new
        past = states.get(name)
        past = new.new_zeros(new.shape[0], size, *new.shape[2:]) if past is None else past.to(new.dtype)
        kept[name] = last_real(past, new, lengths)
        return torch.cat([past, new], dim=1)

    def _count_pairs(self, q: Tensor, states: States, kept: States, lengths: Tensor | None) -> Tensor:
        """[R, 1, L, 1] pairs in the window of each step, at least 1."""
        R, L, W = q.shape[0], q.shape[2], self.params.pairs
        if W == 1:
            return q.new_ones(1, 1, L, 1)
        seen = states.get("seen")  # real tokens; more than W make no difference, but are cheaper to count than to clip
        seen = torch.zeros(R, dtype=torch.long, device=q.device) if seen is None else seen
        kept["seen"] = seen + (L if lengths is None else lengths)
        pairs = seen[:, None] + torch.arange(1 - self.params.shifted, L + 1 - self.params.shifted, device=q.device)
        return pairs.clamp(1, W).to(q.dtype)[:, None, :, None]

    def _steps(self, inputs: States, statistic: Tensor) -> tuple[Tensor, Tensor]:
        """η and log γ [R, L, H, 1 or V] from the statistic [R, H, L]."""
        params, statistic = self.params, statistic.transpose(1, 2).unsqueeze(-1)
        λ = inputs["forget"].unsqueeze(-1) * statistic.detach() if "forget" in inputs else params.lambda_
        curvature = statistic + λ + params.eps
        if params.beta_mode == "ctx_eta":
            η = inputs["step"] / (1 + inputs["step"] * curvature / 2)
        else:
            nothing = curvature <= 0  # an empty window and ε = 0
            β = inputs.get("step", params.beta)
            η = (β / curvature.masked_fill(nothing, 1.0)).masked_fill(nothing, 0.0)
        log_γ = torch.log1p(-(η * λ).clamp_max(1 - params.eps_gamma))
        width = self.head_dim if self.per_channel else 1  # a static β is one for all channels
        return η.expand(*η.shape[:-1], width), log_γ.expand(*η.shape[:-1], width)

    def statistic(self, x: Tensor, pairs: Tensor) -> Tensor:
        """[R, H, L]: what the step size is measured in; ‖x_t‖² unless windowed."""
        return x.square().sum(-1)

    def eager(self, q: Tensor, x: Tensor, v: Tensor, η: Tensor, γ: Tensor, pairs: Tensor, S: Tensor) -> Result:
        """The recurrence, token by token: readout [R, H, L, V] and the last state."""
        raise NotImplementedError

    def chunked(
        self, q: Tensor, x: Tensor, v: Tensor, η: Tensor, log_γ: Tensor, pairs: Tensor, S: Tensor | None
    ) -> Result:
        """The same, chunk-parallel; no state at the start of a row."""
        raise NotImplementedError

    def finish(self, readout: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(self.norm(readout.to(x.dtype), None))


class Falcon1(Falcon):
    """One step of normalised least mean squares a token (λ = 0, ε = 0, unshifted: the delta rule)."""

    def eager(self, q: Tensor, x: Tensor, v: Tensor, η: Tensor, γ: Tensor, pairs: Tensor, S: Tensor) -> Result:
        return eager_falcon1(q, x, v, η, γ, S)

    def chunked(
        self, q: Tensor, x: Tensor, v: Tensor, η: Tensor, log_γ: Tensor, pairs: Tensor, S: Tensor | None
    ) -> Result:
        # the core forgets before it erases, Falcon after: hence η/γ
        return gated_delta_rule(
            q, x, v, (η * (-log_γ).exp())[..., 0], η[..., 0], log_γ[..., 0],
            initial_state=S, output_final_state=True, chunk_size=self.params.chunk_size,
        )  # fmt: skip


class Falcon2(Falcon):
    """`Falcon1` with a step size, and so a decay, per value channel."""

    needs_kernel = False
    traces_chunks = False
    per_channel = True

    def eager(self, q: Tensor, x: Tensor, v: Tensor, η: Tensor, γ: Tensor, pairs: Tensor, S: Tensor) -> Result:
        return eager_falcon2(q, x, v, η, γ, S)

    def chunked(
        self, q: Tensor, x: Tensor, v: Tensor, η: Tensor, log_γ: Tensor, pairs: Tensor, S: Tensor | None
    ) -> Result:
        return channelwise_delta_rule(
            q, x, v, η, log_γ, initial_state=S, output_final_state=True, chunk_size=self.params.chunk_size
        )


class Falcon3(Falcon):
    """`Falcon1` on the mean loss of the last B pairs; the statistic is its curvature, λ_max(XᵀX)/B."""

    needs_kernel = False
    traces_chunks = False

    def statistic(self, x: Tensor, pairs: Tensor) -> Tensor:
        u = dominant_combination(x, self.params.pairs)
        return banded_product(u, x).square().sum(-1) / pairs[..., 0]

    def eager(self, q: Tensor, x: Tensor, v: Tensor, η: Tensor, γ: Tensor, pairs: Tensor, S: Tensor) -> Result:
        return eager_falcon3(q, x, v, η, γ, pairs, S)

    def chunked(
        self, q: Tensor, x: Tensor, v: Tensor, η: Tensor, log_γ: Tensor, pairs: Tensor, S: Tensor | None
    ) -> Result:
        return rehearsal_delta_rule(
            q, x, v, (η / pairs)[..., 0], log_γ[..., 0],
            initial_state=S, output_final_state=True, chunk_size=self.params.chunk_size,
        )  # fmt: skip


class Falcon1A(Falcon):
    """One additive write a token (λ = 0, β = 1, unshifted, unit keys: linear attention)."""

    def eager(self, q: Tensor, x: Tensor, v: Tensor, η: Tensor, γ: Tensor, pairs: Tensor, S: Tensor) -> Result:
        return eager_falcon1a(q, x, v, η, γ, S)

    def chunked(
        self, q: Tensor, x: Tensor, v: Tensor, η: Tensor, log_γ: Tensor, pairs: Tensor, S: Tensor | None
    ) -> Result:
        decay = log_γ if self.per_channel else log_γ[..., 0]
        return decayed_scan(
            q, x, η * v, decay, decay_axis="value",
            initial_state=S, output_final_state=True, chunk_size=self.params.chunk_size,
        )  # fmt: skip


class Falcon2A(Falcon1A):
    """`Falcon1A` with a step size, and so a decay, per value channel."""

    per_channel = True


class Falcon3A(Falcon):
    """`Falcon1A` on the mean of the last B pairs; the statistic is their mean energy."""

    def statistic(self, x: Tensor, pairs: Tensor) -> Tensor:
        return x.square().sum(-1).unfold(-1, self.params.pairs, 1).sum(-1) / pairs[..., 0]

    def eager(self, q: Tensor, x: Tensor, v: Tensor, η: Tensor, γ: Tensor, pairs: Tensor, S: Tensor) -> Result:
        return eager_falcon3a(q, x, v, η, γ, pairs, S)

    def chunked(
        self, q: Tensor, x: Tensor, v: Tensor, η: Tensor, log_γ: Tensor, pairs: Tensor, S: Tensor | None
    ) -> Result:
        return rehearsal_scan(
            q, x, v, (η / pairs)[..., 0], log_γ[..., 0],
            initial_state=S, output_final_state=True, chunk_size=self.params.chunk_size,
        )  # fmt: skip
