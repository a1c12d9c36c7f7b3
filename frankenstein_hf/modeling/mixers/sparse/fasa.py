"""`fasa`: attention to the tokens that a few rotary frequencies point to.

Shapes: R rows, L queries, S keys, G key/value heads, H heads, W head width, F of W/2 frequency chunks.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...ops.block_selection import top_blocks
from ...ops.numerics import at_least_fp32, full_precision
from ...ops.scored_attention import dense_rows, eager_attention, scored_attention
from ..sparse_attention import Call, SparseAttention

QUERIES = 64  # at a time


@full_precision
def eager_tip(q: Tensor, k: Tensor, seen: Tensor, chunks: Tensor, importance: str, scale: float) -> Tensor:
    """S_t = Σ_{i∈ℐ_dom} α^i(q_t, K): what each token seems to matter, by the chunks ℐ_dom alone.

    Args:
        q, k: [R, H, L, W] and [R, H, S, W], rotated; chunk i is the channels i and i + W/2 (W even).
        seen: [L, S] bool.
        chunks: [H, F].
        importance: α^i is the chunk's "softmax" over what is seen, or its "logits".
        scale: Factor of the logits.

    Returns:
        [R, H, L, S], at least fp32; meaningless where nothing is seen.
    """
    half = q.shape[-1] // 2
    channels = torch.stack([chunks, chunks + half], dim=-1)  # [H, F, 2]

    def pick(x: Tensor) -> Tensor:
        index = channels.flatten(1)[None, :, None].expand(len(x), -1, x.shape[2], -1)
        return at_least_fp32(x).gather(3, index)

    q, k = pick(q) * scale, pick(k)
    if importance == "logits":
        return q @ k.mT
    total = q.new_zeros(*q.shape[:3], k.shape[2])
    for part in range(0, q.shape[-1], 2):
        logits = q[..., part : part + 2] @ k[..., part : part + 2].mT
        total += logits.masked_fill_(~seen, -torch.inf).softmax(-1)
    return total


class FrequencyAwareAttention(SparseAttention):
    """Dense attention while training, with the same weights as `standard`; sparse in evaluation (arXiv 2602.03152).

    In evaluation each query ranks the tokens it sees by its dominant chunks (see `eager_tip`) and attends to the best
    `num_fac`, ties to the earliest. Which chunks dominate is found once (`calibrate_fasa`) and kept in the config.
    """

    def core(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, params: Any, layer_idx: int
    ) -> tuple[Tensor, Tensor | None]:
        """Attention [R, H, L, W] without the projections, and the weights if materialised."""
        L, S = q.shape[2], k.shape[2]
        if call.training or params.num_fac >= S:
            return dense_rows(q, k, v, call.offset, call.is_causal, call.eager, call.scale, call.dropout)
        if call.eager:
            mask = self.select(q, k, slice(0, L), call, params, layer_idx)
            return eager_attention(q, k, v, mask, scale=call.scale, dropout=call.dropout)
        attend = partial(_part, k=k, v=v, call=call, params=params, layer_idx=layer_idx, select=self.select)
        parts = []
        for start in range(0, L, QUERIES):
            queries = slice(start, min(start + QUERIES, L))
            if torch.is_grad_enabled() and L > QUERIES:
                parts.append(checkpoint(attend, q, queries, use_reentrant=False))
            else:
                parts.append(attend(q, queries))
        return torch.cat(parts, dim=2), None

    @staticmethod
    @torch.no_grad()
    def select(q: Tensor, k: Tensor, queries: slice, call: Call, params: Any, layer_idx: int) -> Tensor:
        """Tokens that the queries attend to, [R, H, queries, S] bool."""
        H, S, W, device = q.shape[1], k.shape[2], q.shape[3], q.device
        i = (call.offset + torch.arange(queries.start, queries.stop, device=device))[:, None]
        j = torch.arange(S, device=device)
        seen = j <= i if call.is_causal else torch.ones(len(i), S, dtype=torch.bool, device=device)
        if params.chunks is None:
            chunks = torch.arange(W // 2 - params.num_tip, W // 2, device=device).expand(H, -1)
        else:
            chunks = torch.tensor(params.chunks[layer_idx], device=device)
        even = W // 2 * 2
        key = k[..., :even].repeat_interleave(H // k.shape[1], dim=1)
        scale = W**-0.5 if call.scale is None else call.scale
        importance = eager_tip(q[:, :, queries, :even], key, seen, chunks, params.importance, scale)
        return top_blocks(importance, params.num_fac, seen)


def _part(
    q: Tensor, queries: slice, *, k: Tensor, v: Tensor, call: Call, params: Any, layer_idx: int, select: Any
) -> Tensor:
    """Attention of some of the queries."""
    chosen = select(q, k, queries, call, params, layer_idx)
    q = q[:, :, queries]
    if q.shape[2] > 1:
        return scored_attention(q, k, v, chosen, scale=call.scale, dropout=call.dropout)
    chosen = chosen[:, :, 0]
    order = chosen.to(torch.uint8).topk(min(params.num_fac, k.shape[2]), dim=-1).indices  # [R, H, num_fac]
    keep = chosen.gather(2, order)[:, :, None]
    group = q.shape[1] // k.shape[1]
    k, v = (
        x.gather(2, order.unflatten(1, (-1, group)).flatten(2)[..., None].expand(-1, -1, -1, x.shape[-1]))
        .unflatten(2, (group, -1))
        .flatten(1, 2)
        for x in (k, v)
    )
    return scored_attention(q, k, v, keep, scale=call.scale, dropout=call.dropout)
