"""`iha`: every head attends by P pseudo-heads, each a learned mixture of all heads, and averages what they read.

Shapes: B batch, T queries, S keys, H heads, P pseudo-heads a head, G key/value heads, W head width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ...attention_backends import dense_attention
from ...cache import States
from ...context import SequenceContext
from ...ops.few_queries import attention_weights
from ...ops.scored_attention import eager_attention
from ...positions import apply_rotary
from ..base import split_heads
from .compressed import CompressedAttention


def eager_iha(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mix_q: Tensor,
    mix_k: Tensor,
    mix_v: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """q[h, p] = Σ_m mix_q[h, p, m] q[m], k and v likewise; Y[h] = 1/P Σ_p softmax(q[h, p] k[h, p]ᵀ / √W) v[h, p].

    Args:
        q: Rotated, [B, H, T, W].
        k, v: [B, G, S, W], the keys rotated.
        mix_q, mix_k, mix_v: [H, P, H], [H, P, G], [H, P, G].
        mask, is_causal, dropout: As in `eager_attention`.

    Returns:
        Output [B, H, T, W] and the mean weights [B, H, T, S].
    """
    P = mix_q.shape[1]
    outputs, maps = [], []
    for p in range(P):
        q_p, k_p, v_p = (torch.einsum("hm,bmtw->bhtw", mix[:, p], x) for mix, x in ((mix_q, q), (mix_k, k), (mix_v, v)))
        output, weights = eager_attention(q_p, k_p, v_p, mask, is_causal=is_causal, dropout=dropout)
        outputs.append(output)
        maps.append(weights)
    return torch.stack(outputs).mean(0), torch.stack(maps).mean(0)


class InterleavedHeadAttention(CompressedAttention):
    """H·P attention maps from H heads (arXiv 2602.21371).

    Mixtures of heads commute with rotary positions, so the cache holds ordinary rotated keys and values. At first each
    pseudo-head is its own head, give or take `init_noise`.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        H, P, G = self.num_heads, self.params.num_pseudo_heads, config.num_key_value_heads
        bias = config.attention_bias
        self.num_key_value_heads, self.num_key_value_groups = G, 1  # the second is read by transformers' functions
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(self.hidden_size, H * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(self.hidden_size, G * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(self.hidden_size, G * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(H * self.head_dim, self.hidden_size, bias=self.output_bias)
        self.query_mix = nn.Parameter(torch.empty(H, P, H))
        self.key_mix = nn.Parameter(torch.empty(H, P, G))
        self.value_mix = nn.Parameter(torch.empty(H, P, G))

    def init_parameters(self) -> None:
        """Every pseudo-head is its own head, plus noise."""
        for mix in (self.query_mix, self.key_mix, self.value_mix):
            own = torch.eye(mix.shape[2], device=mix.device).repeat_interleave(len(mix) // mix.shape[2], dim=0)
            init.normal_(mix, mean=0.0, std=self.params.init_noise)
            init.copy_(mix, mix.detach() + own[:, None].to(mix.dtype))

    def queries(self, x: Tensor, context: SequenceContext) -> Tensor:
        return apply_rotary(split_heads(self.q_proj(x), self.num_heads), *context.rotary(self.head_dim))

    def compress(self, x: Tensor, context: SequenceContext, cached: bool) -> States:
        key = split_heads(self.k_proj(x), self.num_key_value_heads)
        value = split_heads(self.v_proj(x), self.num_key_value_heads)
        return {"key": apply_rotary(key, *context.rotary(self.head_dim)), "value": value}

    def attend(
        self, query: Tensor, kept: States, context: SequenceContext, cached: bool
    ) -> tuple[Tensor, Tensor | None]:
        mixes = [mix.to(query.dtype) for mix in (self.query_mix, self.key_mix, self.value_mix)]
        if context.backend == "eager":
            return eager_iha(
                query, kept["key"], kept["value"], *mixes,  # type: ignore[misc]
                mask=context.mask(), is_causal=context.causal_flag, dropout=self.dropout,
            )  # fmt: skip
        total, P = torch.zeros_like(query), self.params.num_pseudo_heads
        for p in range(P):  # one at a time, so that the backward pass holds the gradients of one
            q, k, v = (mixed(x, mix[:, p : p + 1]) for x, mix in zip((query, kept["key"], kept["value"]), mixes))
            total = total + dense_attention(self, q, k, v, context, scale=self.scaling, dropout=self.dropout)[0]
        return total / P, None

    def attend_as_kept(self, query: Tensor, kept: States, context: SequenceContext) -> Tensor:
        """The mixtures of keys and values are folded into queries and outputs."""
        q = mixed(query, self.query_mix.to(query.dtype))
        P = self.params.num_pseudo_heads
        key_mix, value_mix = (mix.to(q.dtype).flatten(0, 1) for mix in (self.key_mix, self.value_mix))  # [H·P, G]
        scores = torch.einsum("bxtw,xg,bgsw->bxts", q, key_mix, kept["key"]) * self.scaling
        weights = attention_weights(scores, context, self.dropout)
        output = torch.einsum("bxts,bgsw,xg->bxtw", weights, kept["value"], value_mix)
        return output.unflatten(1, (-1, P)).mean(2)


def mixed(heads: Tensor, mix: Tensor) -> Tensor:
    """Heads [B, M, T, W], mix [H, P, M] -> pseudo-heads [B, H·P, T, W]."""
    return (mix.flatten(0, 1) @ heads.flatten(2)).unflatten(-1, heads.shape[2:])
