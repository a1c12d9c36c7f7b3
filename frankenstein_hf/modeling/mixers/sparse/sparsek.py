"""`sparsek`: attention to keys that a differentiable top-k selects.

Shapes: R rows, L queries, S keys, G key/value heads, H heads, W head width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from ...context import SequenceContext
from ...extras import LayerExtras
from ...ops.numerics import at_least_fp32
from ...ops.sparsek import eager_sparsek, sparsek_attention, sparsek_threshold
from ...positions import apply_rotary
from ..base import split_heads
from ..sparse_attention import Call, SparseAttention, Streams


class SparseKAttention(SparseAttention):
    """Keys are scored, u_j = w · k_j √W / ‖k_j‖, and weighed by m = clamp(u − τ, 0, 1), Σ m = k (arXiv 2406.16747).

    A query attends to the visible keys with m > 0; m multiplies their values, through which the scorer learns. With
    scorer "key_query", g · (mean query of the group) · k_j / √W with a learned g is added to the score. A query that
    sees no more than k keys weighs all of them by one.
    """

    cached = ("key", "value", "score")

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.scorer = nn.Parameter(torch.empty(self.num_key_value_heads, self.head_dim))
        self.query_weight = None
        if self.params.scorer == "key_query":
            self.query_weight = nn.Parameter(torch.empty(self.num_key_value_heads))

    def init_parameters(self) -> None:
        """Scores of deviation two: apart enough that few keys have weights between zero and one."""
        init.normal_(self.scorer, std=2 * self.head_dim**-0.5)
        if self.query_weight is not None:
            init.ones_(self.query_weight)

    def project(self, x: Tensor, context: SequenceContext) -> Streams:
        q = split_heads(self.q_proj(x), self.num_heads)
        k = split_heads(self.k_proj(x), self.num_key_value_heads)
        v = split_heads(self.v_proj(x), self.num_key_value_heads)
        length = F.rms_norm(at_least_fp32(k), k.shape[-1:], eps=self.config.rms_norm_eps)
        score = (length * at_least_fp32(self.scorer)[:, None]).sum(-1, keepdim=True)
        q, k = self.norm_heads(q, k)
        rotary = context.rotary(self.head_dim)
        return {"query": apply_rotary(q, *rotary), "key": apply_rotary(k, *rotary), "value": v, "score": score}

    def attend(self, streams: Streams, call: Call) -> tuple[Tensor, LayerExtras]:
        q, k, v, score = (streams[name] for name in ("query", "key", "value", "score"))
        (R, H, L, W), (G, S) = q.shape, k.shape[1:3]
        q, k, v = (q * W**-0.5).reshape(R * G, H // G, L, W), k.flatten(0, 1), v.flatten(0, 1)
        score = score.reshape(R * G, S)
        weight = None if self.query_weight is None else self.query_weight.repeat(R)
        if not call.eager and not call.dropout:
            out = sparsek_attention(q, k, v, score, weight, self.params.k, call.offset, call.is_causal)
            return out.reshape(R, H, L, W), LayerExtras()
        u = at_least_fp32(score)[:, None]
        if weight is not None:
            u = u + weight[:, None, None] * at_least_fp32(q.mean(1) @ k.mT)
        i, j = call.offset + torch.arange(L, device=q.device)[:, None], torch.arange(S, device=q.device)
        seen = j <= i if call.is_causal else torch.ones(L, S, dtype=torch.bool, device=q.device)
        out, weights = eager_sparsek(q, k, v, u.expand(-1, L, -1), seen.expand(R * G, -1, -1), self.params.k)
        if call.dropout:
            weights = F.dropout(weights, call.dropout)
            out = weights.to(v.dtype) @ v[:, None]
        return out.reshape(R, H, L, W), LayerExtras(weights.reshape(R, H, L, S) if call.eager else None)

    def weights_of(self, score: Tensor, seen: Tensor) -> Tensor:
        """m [..., S] of key scores [..., S], for reading and tests."""
        return (score - sparsek_threshold(score, seen, self.params.k)).clamp(0, 1) * seen
