"""Ward clustering of unit keys into buckets of bounded size, many blocks at once.

Shapes: X blocks of C keys [F], P pool keys, m buckets.
"""

import torch
from torch import Tensor

from .numerics import at_least_fp32, full_precision


@torch.no_grad()
@full_precision
def ward_buckets(keys: Tensor, pool_size: int, num_buckets: int, most_keys: int) -> tuple[Tensor, Tensor]:
    """Merge pools of consecutive keys bottom-up until `num_buckets` are left, or none can be merged.

    A merge of two buckets with sums s and s' costs ‖s‖ + ‖s'‖ − ‖s + s'‖. In every round all pairs that are each
    other's cheapest are merged, the cheapest first, as long as there are too many buckets; ties go to the lowest index.

    Args:
        keys: [X, C, F] of length one.
        pool_size: Keys of a pool; the last may have fewer.
        num_buckets: m, at most the number of pools.
        most_keys: Keys of a bucket at most.

    Returns:
        Bucket number of every key [X, C], in the order of each bucket's first key, and unit centroids [X, m, F].
    """
    keys = at_least_fp32(keys)
    (X, C, F), device = keys.shape, keys.device
    P = -(-C // pool_size)
    padded = torch.nn.functional.pad(keys, (0, 0, 0, P * pool_size - C))
    sums = padded.view(X, P, pool_size, F).sum(2)
    index = torch.arange(P, device=device)
    size = (C - pool_size * index).clamp_max(pool_size).expand(X, P).clone()
    owner = index.expand(X, P).clone()
    never = index == index[:, None]
    while True:
        G = sums @ sums.mT
        G = (G + G.mT) / 2  # the product need not be symmetric to the last bit
        square = G.diagonal(dim1=1, dim2=2)
        length = square.clamp_min(0).sqrt()
        cost = length[:, :, None] + length[:, None] - (square[:, :, None] + square[:, None] + 2 * G).clamp_min(0).sqrt()
        dead = size == 0
        too_large = size[:, :, None] + size[:, None] > most_keys
        cost = cost.masked_fill(never | too_large | dead[:, :, None] | dead[:, None], torch.inf)
        cheapest, partner = cost.min(-1)
        is_pair = (partner.gather(1, partner) == index) & (index < partner) & (cheapest < torch.inf)
        rank = torch.where(is_pair, cheapest, torch.inf).argsort(dim=1, stable=True).argsort(dim=1)
        merges = is_pair & (rank < (P - dead.sum(1) - num_buckets)[:, None])
        if not bool(merges.any()):
            break
        into = index.expand(X, P).clone()
        block, left = merges.nonzero(as_tuple=True)
        right = partner[block, left]
        into[block, right] = left
        owner = into.gather(1, owner)
        sums[block, left] += sums[block, right]
        size[block, left] += size[block, right]
        sums[block, right], size[block, right] = 0, 0
    number = (size > 0).cumsum(1) - 1
    bucket = number.gather(1, owner).repeat_interleave(pool_size, dim=1)[:, :C]
    alive = (size > 0).nonzero(as_tuple=True)
    centroids = keys.new_zeros(X, num_buckets, F)
    centroids[alive[0], number[alive]] = torch.nn.functional.normalize(sums[alive], dim=-1)
    return bucket, centroids
