"""Softmax attention over a list of tiles: exact, at a cost proportional to the tiles, without a T×S tensor.

Shapes: P independent key/value heads (batch · heads), N query heads that share one, T queries, S keys, D key width,
        V value width; n queries and m keys of a tile.

A tile is a set of queries and a set of keys that meet. A query may occur in any number of tiles; its softmax runs over
the union of what it sees in them. Sparse patterns and selections differ only in their tiles. The backward pass computes
the scores of a tile once more, so that nothing but the output and the log of each softmax's denominator is kept.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .numerics import LOG_TINY, at_least_fp32, full_precision, untraced

Places = slice | Tensor
FAR = 60.0  # weights up to e^60 beside others near one lose nothing in fp32


class Tile(NamedTuple):
    """Queries that meet keys.

    Attributes:
        queries: Places along T, a slice or distinct indices.
        keys: Places along S, a slice or distinct indices.
        hidden: Bool, True where a query does not see a key: [n', m], about the first n' ≤ n queries only; or a function
            that returns it whenever it is needed. A pair may be visible in one tile at most.
        head: The one of the P heads the tile is about, or some of them; None: all.
        links: [blocks, e] places of further keys, of which every n/blocks consecutive queries meet e. `hidden` is then
            [n, m + e].
    """

    queries: Places
    keys: Places
    hidden: Tensor | Callable[[], Tensor] | None = None
    head: int | slice | None = None
    links: Tensor | None = None


@untraced
@full_precision
def tiled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tiles: Sequence[Tile],
    *,
    once: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(scale · q kᵀ, over the keys a query meets in the tiles) v.

    Args:
        query: [B, H, T, D].
        key, value: [B, G, S, D] and [B, G, S, V], G dividing H; each serves H/G consecutive query heads. P = B·G.
        tiles: What meets what; `head` counts b·G + g.
        once: Whether every query is in exactly one tile and sees something there, which is cheaper.
        scale: D^−½ by default.
        dropout: Probability of dropping a weight.

    Returns:
        [B, H, T, V] in the dtype of `query`; zeros where a query sees nothing.
    """
    return _attend(query, key, value, tiles, scale, dropout, _Once if once else _Union)[0]


@untraced
@full_precision
def tiled_attention_with_masses(
    query: Tensor, key: Tensor, value: Tensor, tiles: Sequence[Tile], *, scale: float | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """`tiled_attention`, and the part of each query's softmax that falls into each tile.

    Returns:
        Output [B, H, T, V], and for every tile [P or 1, n, N], at least fp32, without a gradient.
    """
    return _attend(query, key, value, tiles, scale, dropout, _UnionWithMasses)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, tiles: Sequence[Tile], scale: float | None, dropout: float, function: Any
) -> tuple[Tensor, list[Tensor]]:
    (B, H, T, D), G = query.shape, key.shape[1]
    scale = D**-0.5 if scale is None else scale
    q = (query * scale).view(B, G, H // G, T, D).transpose(2, 3).reshape(B * G, T, H // G, D)
    q, k, v = (at_least_fp32(x).contiguous() for x in (q, key.flatten(0, 1), value.flatten(0, 1)))
    seed = int(torch.randint(2**62, ())) if dropout else 0
    out = function.apply(q, k, v, [tile._replace(hidden=_mask_of(tile, q)) for tile in tiles], dropout, seed)
    out, *masses = out if isinstance(out, tuple) else (out,)
    out = out.view(B, G, T, H // G, -1).transpose(2, 3).reshape(B, H, T, -1)
    return out.to(query.dtype), masses


def _mask_of(tile: Tile, like: Tensor) -> Any:
    """What is hidden as zeros and -inf to add to the scores, or as a function that returns such a mask."""
    hidden = tile.hidden
    if hidden is None:
        return None
    if callable(hidden):
        return lambda: _additive(hidden(), like)
    return _additive(hidden, like)


def _additive(hidden: Tensor, like: Tensor) -> Tensor:
    return like.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


def _of(x: Tensor, head: int | slice | None) -> Tensor:
    """The part of x [P, …] that a tile is about."""
    if head is None:
        return x
    return x[head : head + 1] if isinstance(head, int) else x[head]


def _take(x: Tensor, places: Places, head: int | slice | None) -> Tensor:
    """x [P, T, …] -> [p, n, …]; a view for slices."""
    x = _of(x, head)
    return x[:, places] if isinstance(places, slice) else x.index_select(1, places)


def _put(x: Tensor, places: Places, head: int | slice | None, new: Tensor) -> None:
    x = _of(x, head)
    if isinstance(places, slice):
        x[:, places] = new
    else:
        x.index_copy_(1, places, new)


def _add(x: Tensor, places: Places, head: int | slice | None, new: Tensor) -> None:
    x = _of(x, head)
    if isinstance(places, slice):
        x[:, places] += new
    else:
        x.index_add_(1, places, new)


def _mask(scores: Tensor, mask: Any) -> None:
    """Add a mask [n', m] of zeros and -inf to `scores` [p, n, N, m] in place; ten times as fast as filling."""
    if mask is not None:
        scores[:, : mask.shape[0]].add_(mask.unsqueeze(-2))


def _kept(weights: Tensor, dropout: float, seed: int, number: int) -> Tensor:
    """Factor of the weights of tile `number`: 0 where dropped, else 1/(1 − dropout); the same in both passes."""
    generator = torch.Generator(weights.device).manual_seed((seed + number * 0x9E3779B1) % 2**63)
    return (
        torch.empty(weights.shape, dtype=weights.dtype, device=weights.device)
        .bernoulli_(1 - dropout, generator=generator)
        .div_(1 - dropout)
    )


class _Once(torch.autograd.Function):
    """q [P, T, N, D] (scaled), k [P, S, D], v [P, S, V] -> o [P, T, N, V]; every query is in one tile."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], dropout: float, seed: int,
    ) -> Tensor:  # fmt: skip
        o = q.new_zeros(*q.shape[:3], v.shape[-1])
        for number, tile in enumerate(tiles):
            q_t, k_t, v_t = _take(q, tile.queries, None), _take(k, tile.keys, None), _take(v, tile.keys, None)
            w = _Once.weights(q_t, k_t, k, tile)
            if dropout:
                w *= _kept(w, dropout, seed, number)
            P, n, N, _ = q_t.shape
            m = k_t.shape[1]
            w = w.view(P, n * N, -1)
            new = torch.bmm(w[..., :m], v_t)
            if tile.links is not None:
                blocks, e = tile.links.shape
                linked = v.index_select(1, tile.links.flatten()).view(P * blocks, e, -1)
                new += torch.bmm(w[..., m:].reshape(P * blocks, -1, e), linked).view(new.shape)
            _put(o, tile.queries, None, new.view(P, n, N, -1))
        ctx.save_for_backward(q, k, v, o)
        ctx.rest = tiles, dropout, seed
        return o

    @staticmethod
    def weights(q_t: Tensor, k_t: Tensor, k: Tensor, tile: Tile) -> Tensor:
        """Softmax [P, n, N, m + e] of one tile."""
        P, n, N, D = q_t.shape
        s = torch.bmm(q_t.reshape(P, n * N, D), k_t.mT)
        if tile.links is not None:
            blocks, e = tile.links.shape
            linked = k.index_select(1, tile.links.flatten()).view(P * blocks, e, D)
            s = torch.cat([s, torch.bmm(q_t.reshape(P * blocks, -1, D), linked.mT).view(P, n * N, e)], dim=-1)
        s = s.view(P, n, N, -1)
        _mask(s, tile.hidden)
        return s.softmax(-1)

    @staticmethod
    @full_precision
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o = ctx.saved_tensors
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        do = do.contiguous()
        delta = (do * o).sum(-1, keepdim=True)
        tiles, dropout, seed = ctx.rest
        for number, tile in enumerate(tiles):
            q_t, k_t, v_t = _take(q, tile.queries, None), _take(k, tile.keys, None), _take(v, tile.keys, None)
            P, n, N, _ = q_t.shape
            m = k_t.shape[1]
            w = _Once.weights(q_t, k_t, k, tile).view(P, n * N, -1)
            q_t = q_t.reshape(P, n * N, -1)
            do_t = _take(do, tile.queries, None).reshape(P, n * N, -1)
            dw = torch.bmm(do_t, v_t.mT)
            if tile.links is not None:
                blocks, e = tile.links.shape
                links = tile.links.flatten()
                linked = [x.index_select(1, links).view(P * blocks, e, -1) for x in (k, v)]
                q_l, do_l = (x.reshape(P * blocks, -1, x.shape[-1]) for x in (q_t, do_t))
                dw = torch.cat([dw, torch.bmm(do_l, linked[1].mT).view(P, n * N, e)], dim=-1)
            used = w
            if dropout:
                kept = _kept(w.view(P, n, N, -1), dropout, seed, number).view(w.shape)
                dw, used = dw.mul_(kept), w * kept
            _add(dv, tile.keys, None, torch.bmm(used[..., :m].mT, do_t))
            if tile.links is not None:
                used_l = used[..., m:].reshape(P * blocks, -1, e)
                dv.index_add_(1, links, torch.bmm(used_l.mT, do_l).view(P, blocks * e, -1))
            ds = dw.sub_(_take(delta, tile.queries, None).reshape(P, n * N, 1)).mul_(w)
            new = torch.bmm(ds[..., :m], k_t)
            _add(dk, tile.keys, None, torch.bmm(ds[..., :m].mT, q_t))
            if tile.links is not None:
                ds_l = ds[..., m:].reshape(P * blocks, -1, e)
                new += torch.bmm(ds_l, linked[0]).view(new.shape)
                dk.index_add_(1, links, torch.bmm(ds_l.mT, q_l).view(P, blocks * e, -1))
            _put(dq, tile.queries, None, new.view(P, n, N, -1))
        return dq, dk, dv, None, None, None, None


class _Union(torch.autograd.Function):
    """The same where queries are in any number of tiles: one softmax over what they see in all of them."""

    want_masses = False

    @classmethod
    def forward(
        cls, ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], dropout: float, seed: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        P, T, N, _ = q.shape
        o = q.new_zeros(P, T, N, v.shape[-1])
        largest = q.new_full((P, T, N, 1), -torch.inf)
        total = q.new_zeros(P, T, N, 1)
        tile_lse = []
        for number, (queries, keys, hidden, head, _) in enumerate(tiles):
            mask: Any = hidden() if callable(hidden) else hidden
            q_t, k_t, v_t = _take(q, queries, head), _take(k, keys, head), _take(v, keys, head)
            p, n, m = q_t.shape[0], q_t.shape[1], k_t.shape[1]
            q_t = q_t.reshape(p, n * N, -1)
            if not isinstance(queries, slice):  # who else chose these keys must not change a bit
                q_t, k_t, v_t = _at_least(8, q_t), _at_least(16, k_t), _at_least(16, v_t)
            every = torch.bmm(q_t, k_t.mT)
            every[..., m:] = -torch.inf
            s = every[:, : n * N].view(p, n, N, -1)
            _mask(s[..., :m], mask)
            # a query's weights refer to the largest score of its first tile, or one far beyond it
            before, now = _take(largest, queries, head), s.amax(-1, keepdim=True)
            grows = (now > before + FAR) & (before > -torch.inf)
            now = torch.where(grows | (before == -torch.inf), now, before)
            reference = now.masked_fill(now == -torch.inf, 0)
            _exp_(s.sub_(reference), mask, m)
            mass = s.sum(-1, keepdim=True)
            if cls.want_masses:
                tile_lse.append(reference + mass.log())
            if dropout:
                s[..., :m] *= _kept(s[..., :m], dropout, seed, number)
            new = torch.bmm(every, v_t)[:, : n * N].view(p, n, N, -1)
            if bool(grows.any()):
                shrink = (before - reference).clamp_max_(0.0).exp_()  # exactly one where nothing grows
                shrink.masked_fill_(before == -torch.inf, 0.0)
                _put(o, queries, head, _take(o, queries, head) * shrink)
                _put(total, queries, head, _take(total, queries, head) * shrink)
            _add(o, queries, head, new)
            _add(total, queries, head, mass)
            _put(largest, queries, head, now)
        total.masked_fill_(total == 0, 1)
        o /= total
        lse = largest.masked_fill_(largest == -torch.inf, 0).add_(total.log_())
        masses = [
            (part - _take(lse, tile.queries, tile.head)).exp_().squeeze(-1) for part, tile in zip(tile_lse, tiles)
        ]
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.rest = tiles, dropout, seed
        ctx.mark_non_differentiable(*masses)
        return o, *masses

    @staticmethod
    @full_precision
    @once_differentiable
    def backward(ctx: Any, do: Tensor, *unused: Any) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        N, do = q.shape[2], do.contiguous()
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        delta = (do * o).sum(-1, keepdim=True)
        tiles, dropout, seed = ctx.rest
        for number, (queries, keys, hidden, head, _) in enumerate(tiles):
            mask: Any = hidden() if callable(hidden) else hidden
            q_t, k_t, v_t = _take(q, queries, head), _take(k, keys, head), _take(v, keys, head)
            p, n, m = q_t.shape[0], q_t.shape[1], k_t.shape[1]
            do_t = _take(do, queries, head).reshape(p, n * N, -1)
            q_t = q_t.reshape(p, n * N, -1)
            w = torch.bmm(q_t, k_t.mT).view(p, n, N, m)
            _mask(w, mask)
            _exp_(w.sub_(_take(lse, queries, head)), mask, m)
            dw = torch.bmm(do_t, v_t.mT).view(p, n, N, m)
            used = w
            if dropout:
                kept = _kept(w, dropout, seed, number)
                dw, used = dw.mul_(kept), w * kept
            _add(dv, keys, head, torch.bmm(used.view(p, n * N, m).mT, do_t))
            ds = dw.sub_(_take(delta, queries, head)).mul_(w).view(p, n * N, m)
            _add(dq, queries, head, torch.bmm(ds, k_t).view(p, n, N, -1))
            _add(dk, keys, head, torch.bmm(ds.mT, q_t))
        return dq, dk, dv, None, None, None, None


class _UnionWithMasses(_Union):
    want_masses = True


def _at_least(unit: int, x: Tensor) -> Tensor:
    """x [p, n, …] with zeros up to a multiple of 8 rows, or at least `unit`.

    Matrix products of fewer rows or columns take other paths, whose sums are rounded otherwise.
    """
    missing = max(unit - x.shape[1], -x.shape[1] % 8 if unit == 8 else 0)
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x


def _exp_(scores: Tensor, mask: Tensor | None, m: int) -> None:
    """exp in place, exactly zero where masked; clamped, because tiny numbers make exp and later products slow."""
    scores.clamp_min_(LOG_TINY).exp_()
    if mask is not None:
        scores[:, : mask.shape[0], :, :m].mul_((mask == 0).to(scores.dtype).unsqueeze(-2))


# ---------------------------------------------------------------------- selections


def selected_tiles(
    chosen: Tensor, block_size: int, num_keys: int, *, offset: int, is_causal: bool, most_queries: int = 2048
) -> list[Tile]:
    """Tiles of queries that each chose some blocks of keys, grouped by key block.

    Args:
        chosen: [P, T, blocks] bool. In causal mode no query chooses a block behind its own.
        block_size: Keys of a block; the last block may be shorter.
        num_keys: S.
        offset: Position of query 0 among the keys.
        is_causal: Whether a query sees nothing behind itself, which matters in its own block.
        most_queries: Larger groups are cut.
    """
    T, blocks = chosen.shape[1:]
    device = chosen.device
    by_block = chosen.transpose(1, 2).contiguous()
    head_of, block_of, queries = by_block.nonzero().unbind(1)  # sorted
    places = offset + torch.arange(T, device=device)
    group = head_of * blocks + block_of
    counts = torch.bincount(group, minlength=by_block.shape[0] * blocks).tolist()
    own_ones = group[offset + queries < (block_of + 1) * block_size]  # the first of their group
    own = torch.bincount(own_ones, minlength=len(counts)).tolist()
    tiles, start = [], 0
    for number, (count, inside) in enumerate(zip(counts, own)):
        head, block = divmod(number, blocks)
        first = block * block_size
        keys = slice(first, min(first + block_size, num_keys))
        for begin in range(0, count, most_queries):
            index = queries[start + begin : start + min(begin + most_queries, count)]
            hidden = None
            if is_causal and begin < inside:
                at = places[index[: inside - begin]]
                hidden = torch.arange(first, keys.stop, device=device) > at[:, None]
            tiles.append(Tile(index, keys, hidden, head))
        start += count
    return tiles


def selected_block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    chosen: Tensor,
    block_size: int,
    *,
    offset: int,
    is_causal: bool,
    scale: float | None = None,
    dropout: float = 0.0,
    want_masses: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention of every query to the blocks of keys it chose, with one softmax over their union.

    Args:
        query, key, value, scale, dropout: As in `tiled_attention`.
        chosen: [B, G, T, blocks] bool, one selection for the query heads that share keys; or [B, H, T, blocks].
        block_size, offset, is_causal: As in `selected_tiles`.
        want_masses: Also return what part of the softmax falls into each block.

    Returns:
        [B, H, T, V]; and [B, G, T, blocks], the masses averaged over the query heads of a group, or None.
    """
    heads = chosen.shape[1]
    if heads != key.shape[1]:
        key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    if chosen.shape[2] == 1 and not want_masses:
        return _one_query(query, key, value, chosen, block_size, offset, is_causal, scale, dropout), None
    tiles = selected_tiles(chosen.flatten(0, 1), block_size, key.shape[2], offset=offset, is_causal=is_causal)
    if not want_masses:
        return tiled_attention(query, key, value, tiles, scale=scale, dropout=dropout), None
    out, parts = tiled_attention_with_masses(query, key, value, tiles, scale=scale, dropout=dropout)
    by_block = chosen.transpose(2, 3)
    masses = torch.zeros(by_block.shape, dtype=parts[0].dtype, device=out.device)
    masses.masked_scatter_(by_block, torch.cat([part.mean(-1).flatten() for part in parts]))
    return out, masses.transpose(2, 3)


def _one_query(
    query: Tensor, key: Tensor, value: Tensor, chosen: Tensor, C: int, offset: int, is_causal: bool,
    scale: float | None, dropout: float,
) -> Tensor:  # fmt: skip
    """A decoding step: gather the chosen blocks [B, G, 1, N]."""
    (B, H, _, D), (G, S) = query.shape, key.shape[1:3]
    counts = chosen.squeeze(2).sum(-1)
    blocks = chosen.squeeze(2).to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices
    blocks = blocks[..., : int(counts.max())]
    places = (blocks[..., None] * C + torch.arange(C, device=key.device)).flatten(2)  # [B, G, keys]
    real = torch.arange(blocks.shape[-1], device=key.device) < counts[..., None]
    seen = real.repeat_interleave(C, dim=-1) & (places <= (offset if is_causal else S - 1))
    index = places.clamp_max(S - 1)[..., None]
    key, value = (x.gather(2, index.expand(-1, -1, -1, x.shape[-1])) for x in (key, value))
    out = torch.nn.functional.scaled_dot_product_attention(
        query.view(B, G, H // G, D), key, value, seen[:, :, None], dropout, scale=scale
    )
    return out.view(B, H, 1, -1)
