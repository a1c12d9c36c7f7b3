"""The largest attention logit of every head, for optimizers that bound it; block by block, so no T×S tensor arises.

Shapes: B batch, H query heads, G key heads (G divides H), T queries, S keys, K head width.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise

import torch
from torch import Tensor

from .numerics import at_least_fp32, full_precision

QUERIES, KEYS = 256, 512  # of a block


@torch.no_grad()
@full_precision
def max_logits(
    query: Tensor,
    key: Tensor,
    visible: Callable[[slice, slice], Tensor | None],
    *,
    scale: float | None = None,
    spans: Callable[[int, int], Iterable[tuple[int, int]]] | None = None,
) -> Tensor:
    """max over visible pairs (i, j) of scale · q_i · k_j.

    Args:
        query: [B, H, T, K], as it enters the scores.
        key: [B, G, S, K]; each serves H/G consecutive query heads.
        visible: `(queries, keys) ->` bool, broadcastable to [B, H, queries, keys]; None where all are.
        scale: K^−½ by default.
        spans: `(start, stop)` of some queries -> stretches (start, stop) of keys that hold all they can see; by default
            all keys. Stretches may overlap or be empty.

    Returns:
        [H], at least fp32, without a gradient; −inf for a head that sees nothing.
    """
    (_, H, T, K), (G, S) = query.shape, key.shape[1:3]
    query = at_least_fp32(query) * (K**-0.5 if scale is None else scale)
    query, key = query.unflatten(1, (G, H // G)), at_least_fp32(key)[:, :, None]
    largest = query.new_full((H,), -torch.inf)
    for start in range(0, T, QUERIES):
        stop = min(start + QUERIES, T)
        for first, last in spans(start, stop) if spans else [(0, S)]:
            for left, right in pairwise([*range(first, last, KEYS), max(first, last)]):
                queries, keys = slice(start, stop), slice(left, right)
                logits = (query[..., queries, :] @ key[..., keys, :].mT).flatten(1, 2)
                if (seen := visible(queries, keys)) is not None:
                    logits = logits.masked_fill(~seen, -torch.inf)
                largest = torch.maximum(largest, logits.amax((0, 2, 3)))
    return largest
