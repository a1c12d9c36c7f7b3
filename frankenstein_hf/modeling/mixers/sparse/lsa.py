"""`lsa`: the own block, the first tokens, and keys found through clusters of what came before.

Shapes: R rows, L queries, S keys, G key/value heads, H heads, W head width, N blocks of C keys with m buckets each.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...norms import l2_normalize
from ...ops.clustering import ward_buckets
from ...ops.numerics import at_least_fp32, full_precision
from ...ops.scored_attention import eager_attention
from ...ops.tiled_attention import Tile, tiled_attention
from ..sparse_attention import Call, SparseAttention

eager_lsa = eager_attention  # o_i = softmax over 𝒥_i = sinks ∪ keys of the best buckets ∪ own block


class Index(NamedTuple):
    """Clusters of a row's keys: buckets are numbered through the blocks, m to each.

    Attributes:
        centroids: [R, N·m, G·W], zero where a block has fewer buckets.
        bucket: [R, S'] of each key in a clustered block.
        rank: [R, S'] how many keys of its bucket, sinks aside, stand before it.
    """

    centroids: Tensor
    bucket: Tensor
    rank: Tensor


class LatentSparseAttention(SparseAttention):
    """Native latent sparse attention: no parameters but the projections, no positions, no gradient into the selection.

    Keys of a complete block are clustered once. With several key/value heads, it is their concatenation that is
    clustered, and a query head is compared with the part of its own key head.
    """

    rotated = False

    def core(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, params: Any, layer_idx: int
    ) -> tuple[Tensor, Tensor | None]:
        """Attention [R, H, L, W] without the projections, and the weights if materialised."""
        index = clustered(k, call, params)
        quota = self.select(q, index, call, params)
        if call.eager:
            seen = visible(quota, index, k.shape[2], slice(0, q.shape[2]), slice(0, k.shape[2]), call, params)
            return eager_lsa(q, k, v, seen[:, None], scale=call.scale, dropout=call.dropout)
        if q.shape[2] == 1:
            return _decode(q, k, v, quota, index, call, params), None
        tiles = _tiles(quota, index, k.shape[1], k.shape[2], q.shape[2], call, params)
        return tiled_attention(q, k, v, tiles, scale=call.scale, dropout=call.dropout), None

    @staticmethod
    @torch.no_grad()
    @full_precision
    def select(q: Tensor, index: Index, call: Call, params: Any) -> Tensor:
        """How many keys each query takes from each bucket, [R, L, N·m]: the best buckets first, until there are enough.

        s_{i,b} = max_h q̂_{i,h} · c_b over the buckets of blocks before the own one; in an encoder of all others.
        """
        (R, H, L, W), B = q.shape, index.centroids.shape[1]
        quota = torch.zeros(
            R, L, B, dtype=torch.uint8 if params.max_keys_per_bucket < 256 else torch.int32, device=q.device
        )
        if not B:
            return quota
        G, m = index.centroids.shape[2] // W, params.buckets_per_block
        centroids = index.centroids.view(R, B, G, W).transpose(1, 2).repeat_interleave(H // G, dim=1).mT
        counts = _free_keys(index, B, params)
        exists = (index.centroids != 0).any(-1)
        block = torch.arange(B, device=q.device) // m
        number = min(B, params.num_buckets)
        unit = l2_normalize(at_least_fp32(q))
        for start in range(0, L, 256):
            part = slice(start, min(start + 256, L))
            own = (call.offset + torch.arange(part.start, part.stop, device=q.device))[:, None] // params.cluster_block
            score = (unit[:, :, part] @ centroids).amax(1)
            allowed = (block < own if call.is_causal else block != own) & exists[:, None]
            score = score.masked_fill(~allowed, -torch.inf)
            best, order = score.sort(dim=-1, descending=True, stable=True)  # ties to the lowest index
            best, order = best[..., :number], order[..., :number]
            size = counts[:, None].expand(-1, order.shape[1], -1).gather(2, order).masked_fill(best == -torch.inf, 0)
            taken = torch.minimum(size, (params.num_long_range - size.cumsum(-1) + size).clamp_min(0))
            quota[:, part] = torch.zeros_like(score, dtype=quota.dtype).scatter_(2, order, taken.to(quota.dtype))
        return quota


def _free_keys(index: Index, B: int, params: Any) -> Tensor:
    """[R, B] keys of each bucket that are no sinks."""
    free = (torch.arange(index.bucket.shape[1], device=index.bucket.device) >= params.num_sinks).long()
    counts = torch.zeros(len(index.bucket), B, dtype=torch.long, device=free.device)
    return counts.scatter_add_(1, index.bucket.long(), free.expand(index.bucket.shape))


@torch.no_grad()
@full_precision
def clustered(key: Tensor, call: Call, params: Any) -> Index:
    """The clusters of all complete blocks of keys [R, G, S, W]; in an encoder of what is left at the end too."""
    S, C, m = key.shape[2], params.cluster_block, params.buckets_per_block
    past, now = call.offset // C, S // C
    earlier = [call.past_blocks(name, past * n) for name, n in (("centroid", m), ("bucket", C), ("rank", C))]
    old = None
    if past and all(x is not None for x in earlier):
        centroid, bucket, rank = (x[:, 0] for x in earlier if x is not None)
        old = Index(centroid, bucket[..., 0], rank[..., 0])
    if old is not None and now == past and call.is_causal:
        return old  # as in most decoding steps
    new = _cluster(key[:, :, (past if old else 0) * C : now * C], C, m, past if old else 0, params)
    if old is not None:
        new = Index(*(torch.cat([a.to(b.dtype), b], dim=1) for a, b in zip(old, new)))
    call.keep_blocks("centroid", new.centroids[:, None])
    call.keep_blocks("bucket", new.bucket[:, None, :, None])
    call.keep_blocks("rank", new.rank[:, None, :, None])
    if not call.is_causal and now * C < S:
        rest = _cluster(key[:, :, now * C :], S - now * C, m, now, params)
        new = Index(*(torch.cat([a, b], dim=1) for a, b in zip(new, rest)))
    return new


def _cluster(key: Tensor, C: int, m: int, first: int, params: Any) -> Index:
    """Clusters of whole blocks of C keys [R, G, n·C, W], the first of them block number `first`."""
    R, G, S, W = key.shape
    n = S // C
    if not n:
        empty = torch.zeros(R, 0, dtype=torch.int32, device=key.device)
        return Index(at_least_fp32(key).new_zeros(R, 0, G * W), empty, empty)
    keys = l2_normalize(at_least_fp32(key).transpose(1, 2).flatten(2)).view(R * n, C, G * W)
    wanted = min(m, -(-C // params.keys_per_bucket))
    bucket, centroids = ward_buckets(keys, params.pool_size, wanted, params.max_keys_per_bucket)
    centroids = F.pad(centroids, (0, 0, 0, m - wanted))
    block = torch.arange(n, device=key.device).repeat(R)[:, None]
    free = first * params.cluster_block + block * C + torch.arange(C, device=key.device) >= params.num_sinks
    same = (bucket[:, :, None] == bucket[:, None]) & free[:, None]
    rank = (same & torch.ones(C, C, dtype=torch.bool, device=key.device).tril(-1)).sum(-1)
    bucket = bucket + (first + block) * m
    return Index(
        centroids.view(R, n * m, G * W), bucket.view(R, n * C).to(torch.int32), rank.view(R, n * C).to(torch.int32)
    )


def visible(quota: Tensor, index: Index, S: int, queries: slice, keys: slice, call: Call, params: Any) -> Tensor:
    """[R, queries, keys] whether a query sees a key."""
    i = (call.offset + torch.arange(queries.start, queries.stop, device=quota.device))[:, None]
    j = torch.arange(keys.start, keys.stop, device=quota.device)
    seen = (j < params.num_sinks) | (j // params.cluster_block == i // params.cluster_block)
    seen = (seen & (j <= i) if call.is_causal else seen).expand(len(quota), -1, -1)
    stop = min(keys.stop, index.bucket.shape[1])
    if stop <= keys.start:
        return seen
    bucket, rank = (x[:, keys.start : stop].long() for x in (index.bucket, index.rank))
    taken = quota[:, queries].gather(2, bucket[:, None].expand(-1, i.shape[0], -1))
    found = (rank[:, None] < taken) & (j[: stop - keys.start] >= params.num_sinks)
    return seen | F.pad(found, (0, keys.stop - stop))


def _tiles(quota: Tensor, index: Index, G: int, S: int, L: int, call: Call, params: Any) -> list[Tile]:
    """Tiles of 256 queries and 1024 keys; what is hidden in them is worked out when they are used."""
    tiles = []
    for r in range(len(quota)):
        row = Index(*(x[r : r + 1] for x in index))
        for start in range(0, L, 256):
            queries = slice(start, min(start + 256, L))
            end = min(S, call.offset + queries.stop) if call.is_causal else S
            for first in range(0, end, 1024):
                keys = slice(first, min(first + 1024, end))

                def hidden(r: int = r, row: Index = row, queries: slice = queries, keys: slice = keys) -> Tensor:
                    return ~visible(quota[r : r + 1], row, S, queries, keys, call, params)[0]

                tiles.append(Tile(queries, keys, hidden, slice(r * G, (r + 1) * G)))
    return tiles


def _decode(q: Tensor, k: Tensor, v: Tensor, quota: Tensor, index: Index, call: Call, params: Any) -> Tensor:
    """One query a row: gather the keys it sees."""
    R, H, _, W = q.shape
    seen = visible(quota, index, k.shape[2], slice(0, 1), slice(0, k.shape[2]), call, params)[:, 0]
    count = seen.sum(1)
    order = torch.argsort(~seen, dim=1, stable=True)[:, : int(count.max())] if R > 1 else seen[0].nonzero().T
    keep = torch.arange(order.shape[1], device=q.device) < count[:, None]
    k, v = (x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, W)) for x in (k, v))
    q = q.view(R, k.shape[1], -1, W)
    mask = None if R == 1 else keep[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, mask, call.dropout, scale=call.scale).view(R, H, 1, W)
