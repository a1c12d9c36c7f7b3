"""`conformer`: attention and a convolution behind a feed-forward block.

Shapes: R rows, L row length, S keys, H heads, G key/value heads, W head width, D model width, K taps.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from ...cache import States
from ...context import Rows
from ...extras import LayerExtras
from ...norms import LayerNorm
from ...ops.biased_attention import Bias, biased_attention
from ...ops.numerics import at_least_fp32
from ...ops.scored_attention import eager_attention
from ...ops.short_convolution import short_convolution
from ..base import last_real
from ..row_attention import RowAttention, remember, visible_keys

MOMENTUM = 0.1  # of the running statistics of a batch norm


def eager_conformer(
    q: Tensor, k: Tensor, value: Tensor, v: Tensor, i: Tensor, mask: Tensor, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """softmax(e_ij / √W) value with e_ij = q_i · k_j + (q_i + v) · R_{i−j}, R_{δ,2m} = sin(δ / 10000^{2m/W}),
    R_{δ,2m+1} = cos(…).

    Args:
        q: [R, H, L, W].
        k, value: [R, G, S, W].
        v: [H, W] learned.
        i: [R or 1, L] place of each query among the keys.
        mask: [R or 1, 1, L, S] True = visible.

    Returns:
        Output [R, H, L, W] and weights [R, H, L, S].
    """
    W = q.shape[-1]
    δ = (i[..., None] - torch.arange(k.shape[2], device=q.device)).to(torch.promote_types(q.dtype, torch.float32))
    angle = δ[..., None] * frequencies(W, δ)
    relative = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)[..., :W]  # [R or 1, L, S, W]
    bias = torch.einsum("rhlw,rlsw->rhls", at_least_fp32(q + v[:, None]), relative.expand(len(q), -1, -1, -1))
    return eager_attention(q, k, value, mask, bias=bias * W**-0.5, dropout=dropout)


def frequencies(width: int, like: Tensor) -> Tensor:
    """10000^{−2m/W} for m = 0 … ⌈W/2⌉ − 1."""
    return 10000.0 ** (-torch.arange(0, width, 2, device=like.device, dtype=like.dtype) / width)


class ConformerMixer(RowAttention):
    """½ FFN, attention and convolution module of a Conformer block (arXiv 2005.08100), each added to the stream.

    The layer's feed-forward block is the block's second one. The feed-forward part reads the layer's norm, attention
    and convolution have their own. A decoder convolves the past; the cache keeps what the convolution looks back at.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        params, D = self.params, self.hidden_size
        self.rotates = params.position == "rope"
        self.position_bias = nn.Parameter(torch.zeros(self.num_heads, self.head_dim)) if self.is_relative else None
        if params.macaron:
            self.ffn_up_proj, self.ffn_down_proj = nn.Linear(D, params.ffn_size), nn.Linear(params.ffn_size, D)
        self.attention_norm = LayerNorm(D, config.rms_norm_eps) if params.macaron else None
        self.convolution_norm = LayerNorm(D, config.rms_norm_eps)
        self.conv_in_proj, self.conv_out_proj = nn.Linear(D, 2 * D), nn.Linear(D, D)
        self.conv_weight = nn.Parameter(torch.empty(D, params.kernel_size))
        self.conv_bias = nn.Parameter(torch.zeros(D))
        self.channel_norm = ChannelNorm(D, config.rms_norm_eps, params.conv_norm, self.num_heads)
        self.dropped = nn.Dropout(config.hidden_dropout)

    @property
    def is_relative(self) -> bool:
        """Whether distances enter the scores as sinusoids."""
        return self.params.position == "relative"

    def init_parameters(self) -> None:
        """Taps as PyTorch initialises a depthwise convolution; no position is preferred."""
        bound = self.params.kernel_size**-0.5
        init.uniform_(self.conv_weight, -bound, bound)
        init.uniform_(self.conv_bias, -bound, bound)
        if self.position_bias is not None:
            init.zeros_(self.position_bias)

    def input_norm(self, x: Tensor) -> Tensor:
        """The stream comes as it is: every part norms its own state."""
        return x

    def mix(self, x: Tensor, rows: Rows, layer: Any) -> tuple[Tensor, LayerExtras | None]:
        """Residual stream [R, L, D] -> its change."""
        if self.params.conv_norm == "batch" and rows.is_causal:
            raise ValueError(
                "conv_norm='batch' takes statistics over later tokens and cannot be causal; use conv_norm='layer' or "
                "'group'."
            )
        x, first = rows.zero_pads(x), torch.zeros_like(x)
        if self.params.macaron:
            first = self.ffn_down_proj(self.dropped(F.silu(self.ffn_up_proj(self.normed(x)))))
            first = first / 2 if self.params.half_step else first
        read = self.normed(x) if self.attention_norm is None else self.attention_norm(x + first)
        query, new = self.project(read, rows)
        seen = remember(new, rows, layer)
        heads, weights = self.attend(query, seen, rows)
        attended = first + self.dropped(self.gather(heads, read))
        convolved = self.convolve(x + attended, rows, None if layer is None else layer.tail)
        # a pad's stream is zero, where a norm is steep
        return rows.zero_pads(attended + self.dropped(convolved)), LayerExtras(weights)

    # ------------------------------------------------------------------ attention

    def attend(self, query: Tensor, seen: States, rows: Rows) -> tuple[Tensor, Tensor | None]:
        own, last = rows.positions, self.last_keys(rows)
        q, k, v = (x.transpose(1, 2) for x in (query, *seen.values()))
        if self.is_eager(rows):
            mask = visible_keys(last, k.shape[2])
            if self.position_bias is None:
                return eager_attention(q, k, v, mask, dropout=self.dropout)
            return eager_conformer(q, k, v, self.position_bias, own, mask, self.dropout)
        if self.position_bias is not None:
            q, k = self.widen(q, k, own)
        return biased_attention(q, k, v, last, Bias(), scale=self.scaling)[0], None

    def widen(self, q: Tensor, k: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Channels whose products are (q_i + v) · R_{i−j}: the sine of a difference is one of products."""
        assert self.position_bias is not None
        turned = at_least_fp32(q + self.position_bias[:, None].to(q.dtype))
        θ = frequencies(q.shape[-1], turned)
        sine, cosine = F.pad(turned, (0, q.shape[-1] % 2)).unflatten(-1, (-1, 2)).unbind(-1)
        i = own.to(θ.dtype)[:, None, :, None] * θ
        j = torch.arange(k.shape[2], device=k.device, dtype=θ.dtype)[:, None] * θ
        left = [sine * i.sin() + cosine * i.cos(), cosine * i.sin() - sine * i.cos()]
        right = torch.cat([j.cos(), j.sin()], dim=-1).expand(*k.shape[:3], -1)
        return torch.cat([at_least_fp32(q), *left], dim=-1), torch.cat([at_least_fp32(k), right], dim=-1)

    def gather(self, output: Tensor, x: Tensor) -> Tensor:
        return super().gather(output.to(x.dtype), x)

    # ------------------------------------------------------------------ convolution

    def convolve(self, x: Tensor, rows: Rows, tail: Any) -> Tensor:
        """The convolution module of the stream [R, L, D] -> [R, L, D]."""
        h = rows.zero_pads(F.glu(self.conv_in_proj(self.convolution_norm(x)), dim=-1))
        states = (None if tail is None else tail.read(self.advance)) or {}
        ahead = 0 if rows.is_causal else self.params.ahead
        before = states.get("conv")
        before = None if before is None else before.to(h.dtype)
        z = short_convolution(F.pad(h, (0, 0, 0, ahead)), self.conv_weight, self.conv_bias, before)[:, ahead:]
        if tail is not None:
            inputs = {"conv": h}
            context = rows.context
            tail.write(self.advance(inputs, states, rows.lengths), inputs, context.keep)
        return self.conv_out_proj(F.silu(self.channel_norm(z, rows.keep)))

    def advance(self, inputs: States, states: States, lengths: Tensor | None) -> States:
        """The last K − 1 inputs of the convolution [R, K−1, D]."""
        h = inputs["conv"]
        past = states.get("conv", h.new_zeros(len(h), self.params.kernel_size - 1, h.shape[2]))
        return {"conv": last_real(past.to(h.dtype), h, lengths)}


class ChannelNorm(nn.Module):
    """Norm of [R, L, D]: "layer" over a token's channels, "group" over each group of them, "batch" over real tokens.

    Args:
        channels: D.
        eps: Of the norm.
        kind: See above.
        num_groups: Groups of "group".
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float, kind: str, num_groups: int) -> None:
        super().__init__()
        self.eps, self.kind, self.num_groups = eps, kind, num_groups
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        if kind == "batch":
            self.register_buffer("running_mean", torch.zeros(channels))
            self.register_buffer("running_var", torch.ones(channels))

    def init_parameters(self) -> None:
        """The identity after normalising."""
        init.ones_(self.weight)
        init.zeros_(self.bias)
        if self.kind == "batch":
            init.zeros_(self.running_mean)
            init.ones_(self.running_var)

    def forward(self, x: Tensor, keep: Tensor | None) -> Tensor:
        """[R, L, D], real tokens [R, L] or None when all are -> [R, L, D] in the dtype of `x`."""
        y = at_least_fp32(x)
        if self.kind == "batch":
            mean, variance = self.statistics(y, keep) if self.training else (self.running_mean, self.running_var)
            y = (y - mean) * torch.rsqrt(variance + self.eps)
        else:
            groups = 1 if self.kind == "layer" else self.num_groups
            y = y.unflatten(-1, (groups, -1))
            y = F.layer_norm(y, y.shape[-1:], eps=self.eps).flatten(-2)
        return (y * self.weight + self.bias).to(x.dtype)

    def statistics(self, x: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean and variance [D] over the real tokens; the running ones follow."""
        real = x.flatten(0, 1) if keep is None else x[keep]
        count = max(len(real), 1)
        mean = real.sum(0) / count
        variance = (real - mean).square().sum(0) / count
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), MOMENTUM)
            self.running_var.lerp_((variance * count / max(count - 1, 1)).to(self.running_var.dtype), MOMENTUM)
        return mean, variance
