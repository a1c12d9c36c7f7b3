"""`probsparse`: full attention for the queries whose distribution is far from uniform.

Shapes: R rows, L queries, S keys, G key/value heads, H heads, W head width, D model width, u selected queries.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from ...context import SequenceContext
from ...extras import LayerExtras
from ...ops.numerics import at_least_fp32, full_precision
from ...ops.scored_attention import dense_rows
from ..base import split_heads
from ..sparse_attention import Call, SparseAttention, Streams


def eager_probsparse(q: Tensor, k: Tensor, v: Tensor, selected: Tensor, scale: float, dropout: float = 0.0) -> Tensor:
    """Y[𝒯] = softmax(q kᵀ scale) v and Y elsewhere the mean of v; 𝒯 = `selected` [R, H, L, 1], no mask (an encoder)."""
    attended, _ = dense_rows(q, k, v, 0, False, True, scale, dropout)
    mean = v.mean(2, keepdim=True).repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return torch.where(selected, attended, mean)


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """[..., width]: sines in the first half, cosines in the second, wavelengths from 2π to 10000 · 2π."""
    half = -(-width // 2)
    frequency = 10000.0 ** (-torch.arange(half, device=positions.device) / half)
    angle = positions[..., None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1)[..., :width]


class ProbSparseAttention(SparseAttention):
    """ProbSparse attention with relative positions (arXiv 2012.07436, 2209.00260).

    Scores are ((q + U₁) k + (q + U₂) p) / √W, p = W_P · sinusoid of the key's position; they are one product with
    k + p plus a number a key, U₁ k + U₂ p, which is what the cache keeps. An encoder measures each query by the
    largest less the mean of its scores on a sample of the keys, and lets the best attend; the sample depends on layer
    and length only. A decoder cannot know who will be among the best, so there all attend.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.rotated = not self.params.relative
        if self.params.relative:
            width = self.num_key_value_heads * self.head_dim
            self.p_proj = nn.Linear(self.hidden_size, width, bias=False)
            self.content_bias = nn.Parameter(torch.empty(self.num_heads, self.head_dim))
            self.position_bias = nn.Parameter(torch.empty(self.num_heads, self.head_dim))
            self.cached = ("key", "value", "bias")

    def init_parameters(self) -> None:
        """U₁ and U₂ as the projections are."""
        if self.params.relative:
            init.normal_(self.content_bias, std=self.config.initializer_range)
            init.normal_(self.position_bias, std=self.config.initializer_range)

    def project(self, x: Tensor, context: SequenceContext) -> Streams:
        streams = super().project(x, context)
        if not self.params.relative:
            return streams
        k, share = streams["key"], self.num_heads // self.num_key_value_heads
        encoded = sinusoids(context.positions, self.hidden_size).to(x.dtype)
        p = split_heads(self.p_proj(encoded), self.num_key_value_heads).expand_as(k)
        bias = (self.content_bias[:, None] * k.repeat_interleave(share, dim=1)).sum(-1, keepdim=True)
        bias = bias + (self.position_bias[:, None] * p.repeat_interleave(share, dim=1)).sum(-1, keepdim=True)
        return streams | {"bare_key": k, "key": k + p, "bias": bias}

    def attend(self, streams: Streams, call: Call) -> tuple[Tensor, LayerExtras]:
        q, k, v, bias = streams["query"], streams["key"], streams["value"], streams.get("bias")
        W, H = q.shape[-1], q.shape[1]
        query, key, value = q, k, v
        if bias is not None:  # as one more channel; all three are widened, or the kernels would be slow
            extra = 8
            query = torch.cat(
                [q, torch.ones_like(q[..., :1]), torch.zeros_like(q[..., :1]).expand(-1, -1, -1, extra - 1)], -1
            )
            key, value = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (k, v))
            key = F.pad(torch.cat([key, bias.to(key.dtype)], -1), (0, extra - 1))
            value = F.pad(value, (0, extra))
        if call.is_causal:
            out, weights = dense_rows(query, key, value, call.offset, True, call.eager, W**-0.5, call.dropout)
            return out[..., :W], LayerExtras(weights)
        selected = self.select(q, streams.get("bare_key", k), call)
        if call.eager:
            out = eager_probsparse(query, key, value, selected, W**-0.5, call.dropout)
            return out[..., :W], LayerExtras()
        index = selected.nonzero()[:, 2].view(*selected.shape[:2], -1, 1)  # as many in every head
        some = query.gather(2, index.expand(-1, -1, -1, query.shape[-1]))
        attended, _ = dense_rows(some, key, value, 0, False, False, W**-0.5, call.dropout)
        mean = v.mean(2, keepdim=True).repeat_interleave(H // v.shape[1], dim=1)
        out = mean.expand_as(q).scatter(2, index.expand(-1, -1, -1, W), attended[..., :W].to(mean.dtype))
        return out, LayerExtras()

    @torch.no_grad()
    @full_precision
    def select(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        """𝒯: the c₂⌈ln L⌉ queries of each head with the largest max − mean, ties to the first; [R, H, L, 1] bool."""
        L, S = q.shape[2], k.shape[2]
        keys, queries = (
            min(n, max(1, int(factor * math.ceil(math.log(n)))))
            for factor, n in ((self.params.factor_keys, S), (self.params.factor_queries, L))
        )
        generator = torch.Generator().manual_seed(1_000_003 * self.layer_idx + S)
        sample = torch.randperm(S, generator=generator)[:keys].to(k.device)
        q, k = at_least_fp32(q), at_least_fp32(k).index_select(2, sample)
        if self.params.relative:
            q = q + at_least_fp32(self.content_bias)[:, None]
        scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT
        measure = scores.amax(-1) - scores.sum(-1) / S
        best = measure.sort(dim=-1, descending=True, stable=True).indices[..., :queries]
        return torch.zeros_like(measure, dtype=torch.bool).scatter_(2, best, True)[..., None]
