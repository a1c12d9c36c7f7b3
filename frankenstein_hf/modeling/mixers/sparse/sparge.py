"""`sparge`: attention that skips blocks of keys it predicts to matter little. Shapes: see `msa.py`."""

from typing import Any

import torch
from torch import Tensor

from ...ops.block_selection import block_scores, eager_selected_blocks
from ...ops.scored_attention import dense_rows
from ...ops.tiled_attention import selected_block_attention
from ..sparse_attention import Call, SparseAttention

eager_sparge = eager_selected_blocks  # softmax over the keys of the blocks that are not skipped


class SpargeAttention(SparseAttention):
    """Dense attention while training, with the same weights as `standard`; sparse in evaluation (arXiv 2502.18137).

    A query predicts what part of its softmax a block would get from the block's mean key, q · k̄ / √W + ln(keys), and
    skips those below the threshold. The prediction knows complete blocks before the query and of the own block what
    stands up to it; the own block is never skipped. It is made for every query, not for blocks of queries, whose
    later ones would tell earlier ones of the future.
    """

    def core(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, params: Any, layer_idx: int
    ) -> tuple[Tensor, Tensor | None]:
        """Attention [R, H, L, W] without the projections, and the weights if materialised."""
        if call.training:
            return dense_rows(q, k, v, call.offset, call.is_causal, call.eager, call.scale, call.dropout)
        chosen = self.select(q, k, call, params)
        C, place = params.block_size, (call.offset, call.is_causal)
        if call.eager:
            return eager_sparge(q, k, v, chosen, C, *place, dropout=call.dropout, scale=call.scale)
        return selected_block_attention(
            q, k, v, chosen, C, offset=call.offset, is_causal=call.is_causal, scale=call.scale, dropout=call.dropout
        )

    @staticmethod
    @torch.no_grad()
    def select(q: Tensor, k: Tensor, call: Call, params: Any) -> Tensor:
        """Blocks that are not skipped, [R, H, L, N] bool."""
        C, L, S = params.block_size, q.shape[2], k.shape[2]
        scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
        scores = scale * block_scores(q, k, C, call.offset, call.is_causal)
        b = torch.arange(scores.shape[-1], device=q.device)
        i = (call.offset + torch.arange(L, device=q.device))[:, None]
        size = (S - b * C).clamp_max(C).expand(L, -1)
        allowed = torch.ones_like(size, dtype=torch.bool)
        if call.is_causal:
            size = torch.where(b == i // C, i % C + 1, size)
            allowed = b <= i // C
        part = (scores + size.to(scores.dtype).log()).masked_fill(~allowed, -torch.inf).softmax(-1)
        return (part >= params.threshold) & allowed | (b == i // C)
