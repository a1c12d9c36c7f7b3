"""`mla`, `gqla`, `mlra`: keys and values are expanded from a latent, which is cached beside one small rotated key.

Shapes: B batch, T queries, S keys, D model width, H heads, G key/value heads, L latent heads, r latent rank, W head
width, R rotated width. G divides H, L divides G.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...attention_backends import dense_attention
from ...cache import States
from ...context import SequenceContext
from ...norms import RMSNorm
from ...ops.few_queries import attention_weights, grouped_product
from ...ops.numerics import at_least_fp32
from ...ops.scored_attention import masked_softmax
from ...positions import apply_rotary
from ..base import linear_matrix, split_heads
from .compressed import CompressedAttention


def eager_mla(
    q_C: Tensor,
    q_R: Tensor,
    k_C: Tensor,
    k_R: Tensor,
    v_C: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """o_t = Σ_j softmax_j((q^C_t · k^C_j + q^R_t · k^R_j) / √(W + R)) v^C_j, where [k^C_j; v^C_j] = W_UKV c^KV_j.

    Args:
        q_C, q_R: [B, H, T, W] and rotated [B, H, T, R].
        k_C, v_C: [B, G, S, W]; each serves H/G consecutive heads.
        k_R: Rotated, shared by the heads, [B, S, R].
        mask, is_causal, dropout: As in `eager_attention`.

    Returns:
        Output [B, H, T, W] and weights [B, H, T, S].
    """
    heads_a_group = q_C.shape[1] // k_C.shape[1]
    k_C, v_C = (x.repeat_interleave(heads_a_group, dim=1) for x in (k_C, v_C))
    scores = q_C @ k_C.mT + q_R @ k_R[:, None].mT
    scores = at_least_fp32(scores) * (q_C.shape[-1] + q_R.shape[-1]) ** -0.5
    weights = masked_softmax(scores, mask, is_causal=is_causal)
    weights = F.dropout(weights, dropout, training=dropout > 0).to(v_C.dtype)
    return weights @ v_C, weights


class LatentAttention(CompressedAttention):
    """Multi-head latent attention (arXiv 2405.04434), grouped heads and partitioned latents included.

    Training expands keys and values; decoding reads the latent itself, the expansion being absorbed into the queries
    and the outputs. A norm of the keys survives that: its gain goes to the query, and the inverse root mean square of
    each token's key is one number a head, which is cached. The names of the projections are those of DeepSeek.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        p, H, W, bias = self.params, self.num_heads, self.head_dim, config.attention_bias
        self.rank, self.rope_dim, self.parts = p.latent_rank, p.rope_head_dim, p.num_latent_heads
        self.groups = p.key_value_heads(config)
        self.num_key_value_groups = H // self.groups  # read by transformers' functions
        self.caches_heads = getattr(p, "decode_path", None) == "gqa"
        self.scaling = (W + self.rope_dim) ** -0.5
        width = H * (W + self.rope_dim)
        if p.query_rank is None:
            self.q_proj = nn.Linear(self.hidden_size, width, bias=False)
        else:
            self.q_a_proj = nn.Linear(self.hidden_size, p.query_rank, bias=bias)
            self.q_a_layernorm = self._latent_norm(p.query_rank)
            self.q_b_proj = nn.Linear(p.query_rank, width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(self.hidden_size, self.rank + self.rope_dim, bias=bias)
        self.kv_a_layernorm = self._latent_norm(self.rank)
        part, heads = self.rank // self.parts, self.groups // self.parts
        if self.parts == 1:
            self.kv_b_proj = nn.Linear(part, heads * 2 * W, bias=False)
        else:  # called otherwise, so that adapters for the one do not take the other for a layer
            self.kv_b_projs = nn.ModuleList([nn.Linear(part, heads * 2 * W, bias=False) for _ in range(self.parts)])
        self.o_proj = nn.Linear(H * W, self.hidden_size, bias=self.output_bias)
        normed = p.qk_norm != "none"
        self.q_norm = RMSNorm(W, config.rms_norm_eps) if normed else None
        self.k_norm = RMSNorm(W, config.rms_norm_eps) if normed else None
        self.q_rope_norm = RMSNorm(self.rope_dim, config.rms_norm_eps) if normed and self.rope_dim else None
        self.k_rope_norm = RMSNorm(self.rope_dim, config.rms_norm_eps) if normed and self.rope_dim else None

    def _latent_norm(self, rank: int) -> nn.Module:
        if self.params.latent_norm == "none":
            return nn.Identity()
        return RMSNorm(rank, self.config.rms_norm_eps)

    # ------------------------------------------------------------------ what the tokens say

    def queries(self, x: Tensor, context: SequenceContext) -> tuple[Tensor, Tensor]:
        """Content [B, H, T, W] and rotated [B, H, T, R] parts of the queries."""
        if self.params.query_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q_C, q_R = split_heads(q, self.num_heads).split([self.head_dim, self.rope_dim], dim=-1)
        if self.q_norm is not None:
            q_C = self.q_norm(q_C)
        if self.q_rope_norm is not None:
            q_R = self.q_rope_norm(q_R)
        if self.rope_dim == 0:
            return apply_rotary(q_C, *context.rotary(self.head_dim)), q_R
        return q_C, apply_rotary(q_R, *context.rotary(self.rope_dim))

    def compress(self, x: Tensor, context: SequenceContext, cached: bool) -> States:
        """What is kept of the tokens, [B, …, T, …] each."""
        c, k_R = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope_dim], dim=-1)
        kept = {"latent": self.kv_a_layernorm(c)}
        if self.rope_dim:
            k_R = k_R if self.k_rope_norm is None else self.k_rope_norm(k_R)
            kept["rotated_key"] = apply_rotary(k_R[:, None], *context.rotary(self.rope_dim))[:, 0]
        if self.caches_heads:
            key, kept["value"] = self.heads(kept.pop("latent"))
            kept["key"] = self.scored_key(key, context, False)
        elif self.k_norm is not None and self.rope_dim and cached:
            key = at_least_fp32(self.heads(kept["latent"])[0])
            scalars = torch.rsqrt(key.square().mean(-1) + self.k_norm.eps)  # [B, G, T]
            kept["inverse_rms"] = scalars.transpose(1, 2).to(x.dtype)
        return kept

    def heads(self, c: Tensor) -> tuple[Tensor, Tensor]:
        """Latents [B, S, r] -> keys, before their norm and rotation, and values [B, G, S, W]."""
        expanded = [up(part) for up, part in zip(self.expansions, c.chunk(self.parts, dim=-1))]
        whole = expanded[0] if self.parts == 1 else torch.cat(expanded, dim=-1)
        key, value = split_heads(whole, self.groups).chunk(2, dim=-1)
        return key, value

    def scored_key(self, key: Tensor, context: SequenceContext, cached: bool) -> Tensor:
        """Keys [B, G, S, W] of this call, or all, as they enter the scores; rotated unless a part of its own is."""
        key = key if self.k_norm is None else self.k_norm(key)
        return key if self.rope_dim else apply_rotary(key, *context.key_rotary(self.head_dim, cached))

    # ------------------------------------------------------------------ attention

    @property
    def is_linear(self) -> bool:
        """Whether the expansion is a linear map; one that quantises its input is not, and cannot be absorbed."""
        return all(getattr(up, "is_linear", True) for up in self.expansions)

    @property
    def expansions(self) -> list[nn.Module]:
        """The L modules [r/L -> G/L · 2W] that expand the parts of the latent."""
        return [self.kv_b_proj] if self.parts == 1 else list(self.kv_b_projs)

    def attend(
        self, query: tuple[Tensor, Tensor], kept: States, context: SequenceContext, cached: bool
    ) -> tuple[Tensor, Tensor | None]:
        q_C, q_R = query
        if self.caches_heads:
            key, value = kept["key"], kept["value"]
        else:
            key, value = self.heads(kept["latent"])
            key = self.scored_key(key, context, cached)
        k_R = kept["rotated_key"] if self.rope_dim else key[:, 0, :, :0]
        dropout = self.dropout
        if context.backend == "eager":
            return eager_mla(q_C, q_R, key, k_R, value, context.mask(), is_causal=context.causal_flag, dropout=dropout)
        if self.rope_dim:
            q_C = torch.cat([q_C, q_R], dim=-1)
            key = torch.cat([key, k_R[:, None].expand(-1, self.groups, -1, -1)], dim=-1)
        return dense_attention(self, q_C, key, value, context, scale=self.scaling, dropout=dropout)

    def attend_as_kept(self, query: tuple[Tensor, Tensor], kept: States, context: SequenceContext) -> Tensor | None:
        """From the latent: q · (W_UK c) = (W_UKᵀ q) · c, the values likewise.

        A norm of the keys is a gain, which the query takes, and a number a token and key/value head.
        """
        if not (self.rope_dim and self.is_linear):
            return None
        if self.k_norm is not None and self.k_norm.weight.is_meta:
            return None  # offloaded: its gain is here only while the norm is called
        q_C, q_R = query
        if self.caches_heads:
            scores = grouped_product(q_C, kept["key"].mT)
        else:
            maps = [linear_matrix(up, kept["latent"][..., : self.rank // self.parts]) for up in self.expansions]
            # [L, r/L, G/L · 2W] -> [1, G, r/L, 2W]
            expansion = torch.stack(maps).unflatten(-1, (-1, 2 * self.head_dim)).transpose(1, 2).flatten(0, 1)[None]
            W_UK, W_UV = expansion.chunk(2, dim=-1)
            latent = split_heads(kept["latent"], self.parts)  # [B, L, S, r/L]
            q_C = q_C if self.k_norm is None else q_C * self.k_norm.weight.to(q_C.dtype)
            scores = grouped_product(grouped_product(q_C, W_UK.mT), latent.mT)
            if self.k_norm is not None:
                scalars = kept["inverse_rms"].transpose(1, 2)  # [B, G, S]
                scores = (scores.unflatten(1, (self.groups, -1)) * scalars[:, :, None, None]).flatten(1, 2)
        scores = (scores + grouped_product(q_R, kept["rotated_key"][:, None].mT)) * self.scaling
        weights = attention_weights(scores, context, self.dropout)
        if self.caches_heads:
            return grouped_product(weights, kept["value"])
        return grouped_product(grouped_product(weights, latent), W_UV)
