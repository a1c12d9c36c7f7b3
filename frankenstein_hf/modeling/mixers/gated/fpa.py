"""`fpa`: softmax attention that forgets a key by the deepest dip of a learned field since it was written.

Shapes: R rows, L row length, S keys, H heads, G key/value heads, W head width, D model width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from ...cache import States
from ...context import Rows
from ...ops.first_passage_attention import first_passage_attention, first_passage_bias
from ...ops.lse_merge import merge_partial_softmax
from ...ops.numerics import at_least_fp32
from ...ops.scored_attention import eager_attention
from ..row_attention import RowAttention, visible_keys


def eager_fpa(
    q: Tensor, k: Tensor, v: Tensor, φ: Tensor, ψ: Tensor, β: Tensor, own: Tensor, mask: Tensor, τ: float = 1.0
) -> tuple[Tensor, Tensor]:
    """softmax(q_t k_s / √W + b_ts) v with b_ts = β min(0, min_{s<u≤t} φ_u − ψ_s) and b_tt = 0.

    Args:
        q: [R, H, L, W].
        k, v: [R, G, S, W].
        φ, ψ: [R, H, S] field and levels.
        β: [H].
        own: [R or 1, L] place of each query among the keys.
        mask: [R or 1, 1, L, S] True = visible.
        τ: Temperature of the soft minimum that gradients see.

    Returns:
        Output [R, H, L, W] and weights [R, H, L, S].
    """
    return eager_attention(q, k, v, mask, bias=first_passage_bias(φ, ψ, β, own, τ, None).to(at_least_fp32(q).dtype))


class FirstPassageAttention(RowAttention):
    """Softmax attention whose logits fall by how far a field has dipped below a key's level (First Passage Attention).

    (δ, g, h) = W_f x + b_f a head; the walk W_t = Σ_{u≤t} δ_u, the field φ = W + g, the levels ψ = W + h. A key once
    dead stays dead. The inner minimum is hard, its gradient that of a soft one. The cache keeps δ, g and h beside keys
    and values. For an encoder the keys behind a token are those before it in the mirrored row, with W'_u = Σ_{l>u} δ_l.
    """

    rotates = False

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.f_proj = nn.Linear(self.hidden_size, 3 * self.num_heads)
        self.log_strength = nn.Parameter(torch.zeros(self.num_heads))

    def init_parameters(self) -> None:
        """β = 1."""
        init.zeros_(self.log_strength)

    def project(self, x: Tensor, rows: Rows) -> tuple[Tensor, States]:
        query, new = super().project(x, rows)
        return query, {**new, "field": at_least_fp32(self.f_proj(x)).unflatten(-1, (3, -1))}

    @property
    def threshold(self) -> float | None:
        """Where keys are left out, None in training."""
        return None if self.training else self.params.eviction_threshold

    @staticmethod
    def field_and_level(parts: Tensor, mirrored: bool = False) -> tuple[Tensor, Tensor]:
        """δ, g, h [R, S, 3, H] -> φ and ψ [R, H, S] in fp64."""
        δ, g, h = parts.double().permute(2, 0, 3, 1)
        walk = δ.cumsum(-1)
        walk = F.pad(walk, (1, -1)) if mirrored else walk
        return walk + g, walk + h

    def attend(self, query: Tensor, seen: States, rows: Rows) -> tuple[Tensor, Tensor | None]:
        own, last, β = rows.positions, self.last_keys(rows), at_least_fp32(self.log_strength).exp()
        q, k, v = (x.transpose(1, 2) for x in (query, seen["key"], seen["value"]))
        φ, ψ = self.field_and_level(seen["field"])
        common: dict[str, Any] = dict(temperature=self.params.temperature, threshold=self.threshold)
        if self.is_eager(rows) or rows.num_past is not None:
            bias = first_passage_bias(φ, ψ, β, own, **common)
            if not rows.is_causal:
                reverse = first_passage_bias(*self.field_and_level(rows.flip(seen["field"]), True), β, own, **common)
                reverse = rows.flip(reverse.transpose(1, 2)).transpose(1, 2)  # queries
                reverse = rows.flip(reverse.movedim(3, 1)).movedim(1, 3)  # keys
                bias = torch.where(visible_keys(own, k.shape[2]), bias, reverse)
            mask = visible_keys(last, k.shape[2])
            return eager_attention(q, k, v, mask, bias=bias.to(at_least_fp32(q).dtype), dropout=self.dropout)
        output, lse = first_passage_attention(q, k, v, φ, ψ, β, **common)
        if not rows.is_causal:
            q, k, v = (rows.flip(x).transpose(1, 2) for x in (query, seen["key"], seen["value"]))
            φ, ψ = self.field_and_level(rows.flip(seen["field"]), True)
            parts = first_passage_attention(q, k, v, φ, ψ, β, exclude_own=True, **common)
            flipped = [rows.flip(x.transpose(1, 2)).transpose(1, 2) for x in parts]
            output, _ = merge_partial_softmax([output, flipped[0]], [lse, flipped[1]])
        return output, None
