"""Which blocks of keys a query selects: scores by block means, the best of them, and the readable attention to them.

Shapes: R rows, L queries, S keys, H heads, G key/value heads, N blocks of C keys, I width of what is compared.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from .numerics import at_least_fp32, full_precision
from .scored_attention import eager_attention


@full_precision
def eager_selected_blocks(
    q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, C: int, offset: int, is_causal: bool, dropout: float = 0.0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o_t = softmax(q_t K_ℐᵀ / √W) V_ℐ over the blocks ℐ_t = `chosen` [R, G or H, L, N]; and the weights."""
    L, S = q.shape[2], k.shape[2]
    mask = chosen.repeat_interleave(C, dim=-1)[..., :S].repeat_interleave(q.shape[1] // chosen.shape[1], dim=1)
    if is_causal:
        mask = mask & torch.ones(L, S, dtype=torch.bool, device=q.device).tril(offset)
    return eager_attention(q, k, v, mask, dropout=dropout, scale=scale)


@full_precision
def block_scores(index_query: Tensor, index_key: Tensor, C: int, offset: int, is_causal: bool) -> Tensor:
    """s_{t,b} = q_t · r_b, r_b the mean of the block's index keys; of a decoder's own block, of those up to t.

    Args:
        index_query: [R, H, L, I].
        index_key: [R, G, S, I], G dividing H.
        C: Keys of a block.
        offset: Position of query 0.
        is_causal: Whether later keys of the own block are invisible.

    Returns:
        [R, H, L, N], at least fp32. What stands behind a decoder's own block is meaningless.
    """
    q, k = at_least_fp32(index_query), at_least_fp32(index_key)
    (R, G, S, I), L = k.shape, q.shape[2]
    N, share = -(-S // C), q.shape[1] // G
    blocks = F.pad(k, (0, 0, 0, N * C - S)).view(R, G, N, C, I)
    size = (S - C * torch.arange(N, device=k.device)).clamp_max(C).to(k.dtype)
    scores = q @ (blocks.sum(-2) / size[:, None]).repeat_interleave(share, dim=1).mT
    if is_causal:
        so_far = blocks.cumsum(-2) / torch.arange(1, C + 1, device=k.device, dtype=k.dtype)[:, None]
        so_far = so_far.view(R, G, N * C, I)[:, :, offset : offset + L].repeat_interleave(share, dim=1)
        own = (offset + torch.arange(L, device=k.device)) // C
        is_own = torch.arange(N, device=k.device) == own[:, None]
        scores = torch.where(is_own, (q * so_far).sum(-1, keepdim=True), scores)
    return scores


def choose_blocks(scores: Tensor, number: int, C: int, offset: int, is_causal: bool) -> Tensor:
    """ℐ_t: the own block and the `number` − 1 best others; in a decoder among those complete before it.

    Scores [R, G, L, N] -> bool of the same shape.
    """
    L, N = scores.shape[-2:]
    own = ((offset + torch.arange(L, device=scores.device)) // C)[:, None]
    b = torch.arange(N, device=scores.device)
    return top_blocks(scores, number - 1, b < own if is_causal else b != own) | (b == own)


@torch.no_grad()
def top_blocks(scores: Tensor, number: int, allowed: Tensor) -> Tensor:
    """The `number` best of the allowed blocks, ties to the lowest index.

    Args:
        scores: [..., blocks].
        number: How many at most, ≥ 0.
        allowed: Bool, broadcastable to `scores`.

    Returns:
        [..., blocks] bool.
    """
    scores = at_least_fp32(scores).masked_fill(~allowed, -torch.inf)
    if not (number := min(number, scores.shape[-1])):
        return torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    last = scores.topk(number, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    chosen = (scores >= last) & allowed
    if bool((chosen.sum(-1) > number).any()):  # more of the last value than there is room for
        above = scores > last
        equal = chosen & ~above
        chosen = above | (equal & (equal.cumsum(-1) <= number - above.sum(-1, keepdim=True)))
    return chosen
