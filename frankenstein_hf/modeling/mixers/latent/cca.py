"""`cca` and `ccgqa`: attention inside a compressed latent, with convolved queries and keys and shifted values.

Shapes: B batch, T tokens, R rows, L row length, H query heads, G key/value heads (G divides H), W width of all heads, C
channels of queries and keys, P tokens the convolutions look back.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from ...cache import States
from ...context import SequenceContext
from ...ops.numerics import at_least_fp32
from ...ops.scored_attention import eager_attention
from ...ops.short_convolution import short_convolution
from ...positions import apply_rotary
from ..base import last_real
from .compressed import CompressedAttention

EPS = 1e-12  # under the root of a head's mean square

# softmax(RoPE(q̂) RoPE(k̂)ᵀ / √W) ṽ, where q̂ = √W q̃/‖q̃‖, k̂ = e^β √W k̃/‖k̃‖,
# q̃ = Conv(q) + ½(q + k), k̃ = Conv(k) + ½(q + k), ṽ_t = [W_V1 x_t ‖ W_V2 x_{t−1}], all of them inside the latent
eager_cca = eager_attention


class CompressedConvolutionalAttention(CompressedAttention):
    """Queries, keys and values live in a latent from the start; nothing is expanded but the output (arXiv 2510.04476).

    The convolutions and the shift of the values look back, in an encoder too. Decoding keeps keys and values of the
    latent's width, and a tail of what the convolutions read.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        p, H, bias = self.params, self.num_heads, config.attention_bias
        self.groups, self.width = p.sizes(config)
        self.num_key_value_groups = H // self.groups  # read by transformers' functions
        self.scaling = self.width**-0.5
        self.q_proj = nn.Linear(self.hidden_size, H * self.width, bias=bias)
        self.k_proj = nn.Linear(self.hidden_size, self.groups * self.width, bias=bias)
        delayed = self.width // 2 if p.value_shift else 0
        self.v_proj = nn.Linear(self.hidden_size, self.groups * (self.width - delayed), bias=bias)
        self.v_shift_proj = nn.Linear(self.hidden_size, self.groups * delayed, bias=bias) if delayed else None
        self.o_proj = nn.Linear(H * self.width, self.hidden_size, bias=self.output_bias)
        self.log_temperature = nn.Parameter(torch.zeros(self.groups))  # β
        heads = H + self.groups
        if p.num_conv_layers > 0:
            self.conv_seq_weight = nn.Parameter(torch.empty(heads * self.width, p.conv_kernel_seq))
            self.conv_seq_bias = nn.Parameter(torch.empty(heads * self.width))
        if p.num_conv_layers > 1:  # [head, tap · channel in, channel out]
            self.conv_ch_weight = nn.Parameter(torch.empty(heads, p.conv_kernel_ch * self.width, self.width))
            self.conv_ch_bias = nn.Parameter(torch.empty(heads * self.width))

    def init_parameters(self) -> None:
        """Convolutions as PyTorch initialises them, uniform in ±1/√inputs; temperature one."""
        init.zeros_(self.log_temperature)
        for name, inputs in (("seq", self.params.conv_kernel_seq), ("ch", self.params.conv_kernel_ch * self.width)):
            for parameter in (getattr(self, f"conv_{name}_{kind}", None) for kind in ("weight", "bias")):
                if parameter is not None:
                    init.uniform_(parameter, -(inputs**-0.5), inputs**-0.5)

    # ------------------------------------------------------------------ what looks back, in rows

    def convolve(self, qk: Tensor, tail: Tensor) -> Tensor:
        """Queries and keys [R, L, C] and the P tokens before, through both convolutions."""
        p, L = self.params, qk.shape[1]
        if p.num_conv_layers == 0:
            return qk
        seq = p.conv_kernel_seq - 1
        before = torch.cat([tail[:, seq:], qk], dim=1) if p.num_conv_layers > 1 else qk
        y = short_convolution(before, self.conv_seq_weight, self.conv_seq_bias, tail[:, :seq].contiguous())
        if p.num_conv_layers == 1:
            return y
        y = y.unflatten(-1, (-1, self.width))
        taps = torch.cat([y[:, i : i + L] for i in range(p.conv_kernel_ch)], dim=-1)
        y = torch.einsum("rlhi,hio->rlho", taps, self.conv_ch_weight.to(taps.dtype)).flatten(2)
        return y + self.conv_ch_bias.to(y.dtype)

    def advance(self, inputs: States, states: States, lengths: Tensor | None) -> States:
        """The last P queries and keys [R, P, C], and the last token's part of the next value [R, 1, …]."""
        states = states or self.empty_tail(inputs)
        return {name: last_real(states[name], inputs[name], lengths) for name in inputs}

    def empty_tail(self, inputs: States) -> States:
        """Nothing has been seen: zeros."""
        sizes = {"qk": self.params.reach, "value": 1}
        return {name: x.new_zeros(len(x), sizes[name], x.shape[2]) for name, x in inputs.items()}

    def look_back(self, now: States, context: SequenceContext, layer: Any) -> States:
        """Convolved queries and keys, and the part of each value that comes from the token before, [B, T, …] each."""
        parts: dict[str, list[Tensor]] = {name: [] for name in now}
        for rows in context.rows:
            inputs = {name: rows.compact(x) for name, x in now.items()}
            states = (layer.tail.read(self.advance) if layer is not None else None) or self.empty_tail(inputs)
            states = {name: x.to(inputs[name].dtype) for name, x in states.items()}
            if "qk" in inputs:
                parts["qk"].append(self.convolve(inputs["qk"], states["qk"]))
            if "value" in inputs:
                parts["value"].append(torch.cat([states["value"], inputs["value"][:, :-1]], dim=1))
            if layer is not None:
                after = self.advance(inputs, states, rows.lengths)
                layer.tail.write(after, inputs, context.keep)
        return {name: context.restore(part) for name, part in parts.items()}

    # ------------------------------------------------------------------ queries, keys and values

    def project(self, x: Tensor, context: SequenceContext, layer: Any) -> tuple[Tensor, States]:
        H, G, W = self.num_heads, self.groups, self.width
        qk, now = torch.cat([self.q_proj(x), self.k_proj(x)], dim=-1), {}
        if self.params.num_conv_layers:
            now["qk"] = qk
        if self.v_shift_proj is not None:
            now["value"] = self.v_shift_proj(x)
        back = self.look_back(now, context, layer) if now else {}
        heads = back.get("qk", qk).unflatten(-1, (-1, W))  # [B, T, H + G, W]: those of queries, then those of keys
        if self.params.qk_mean:
            q, k = qk.unflatten(-1, (-1, W)).split([H, G], dim=2)
            means = (q.unflatten(2, (G, -1)) + k[:, :, :, None]) * 0.5  # [B, T, G, H/G, W]
            heads = heads + torch.cat([means.flatten(2, 3), means.mean(3)], dim=2)
        value = self.v_proj(x).unflatten(-1, (G, -1))
        if "value" in back:
            value = torch.cat([value, back["value"].unflatten(-1, (G, -1))], dim=-1)
        query, key = self.scored(heads, context).split([H, G], dim=1)
        kept = {"key": key, "value": value.transpose(1, 2)}
        if layer is not None:  # a view of both would keep the queries in the cache
            kept = {name: heads.contiguous() for name, heads in kept.items()}
        return query, kept

    def scored(self, heads: Tensor, context: SequenceContext) -> Tensor:
        """Heads [B, T, H + G, W] at length √W, those of keys times their temperature, rotated: [B, H + G, T, W]."""
        unit = F.rms_norm(at_least_fp32(heads), heads.shape[-1:], eps=EPS)
        temperature = F.pad(at_least_fp32(self.log_temperature), (self.num_heads, 0)).exp()[:, None]
        unit = (unit * temperature).to(heads.dtype).transpose(1, 2)
        return apply_rotary(unit, *context.rotary(self.width))

    def expand(self, kept: States, context: SequenceContext, cached: bool) -> tuple[Tensor, Tensor]:
        return kept["key"], kept["value"]
