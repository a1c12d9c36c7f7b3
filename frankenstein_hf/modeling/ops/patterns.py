"""Fixed sparse patterns: which keys a query sees, as a predicate over positions, and as tiles that hold just those.

Shapes: T queries at the positions offset … offset + T − 1, S keys at the positions 0 … S − 1; all of one document.

A pattern is written for an encoder; a decoder sees of it what lies at or before the query.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from .scored_attention import eager_attention
from .tiled_attention import Places, Tile, tiled_attention

BLOCK = 128  # queries of a tile


class Pattern:
    """What a query sees, by position.

    Attributes:
        once: Whether each query is in exactly one of the tiles.
    """

    once = True

    def visible(self, i: Tensor, j: Tensor, num_keys: int, is_causal: bool) -> Tensor:
        """Whether query position i sees key position j; integer tensors that broadcast."""
        raise NotImplementedError

    def seen(self, i: Tensor, j: Tensor, num_keys: int, is_causal: bool) -> Tensor:
        """`visible`, and in a decoder only what is not behind the query."""
        seen = self.visible(i, j, num_keys, is_causal)
        return seen & (j <= i) if is_causal else seen

    def tiles(self, T: int, S: int, offset: int, is_causal: bool, device: torch.device) -> Iterator[Tile]:
        """Tiles that hold every visible pair once."""
        raise NotImplementedError

    def reach(self, first: int, last: int, S: int, is_causal: bool) -> tuple[int, int]:
        """A stretch (start, stop) of keys around the query positions first … last, for `block_tiles`."""
        raise NotImplementedError

    def columns(self, first: int, last: int, S: int, is_causal: bool, device: torch.device) -> Tensor:
        """Sorted positions of the other keys they see, for `block_tiles`; those inside the stretch do not matter."""
        return torch.zeros(0, dtype=torch.long, device=device)

    def block_tiles(
        self, T: int, S: int, offset: int, is_causal: bool, device: torch.device, size: int = BLOCK
    ) -> Iterator[Tile]:
        """A tile for every block of consecutive queries: its stretch of keys and its columns in front of it."""
        for start in range(0, T, size):
            first, last = offset + start, offset + min(start + size, T) - 1
            low, high = self.reach(first, last, S, is_causal)
            low, high = max(0, low), min(S, last + 1 if is_causal else S, high)
            columns = self.columns(first, last, S, is_causal, device)
            columns = columns[(columns < low) | (columns >= high)]
            keys: Places = slice(low, high)
            if is_causal:
                columns = columns[columns <= last]
            j = torch.arange(low, high, device=device)
            if len(columns):
                keys = j = torch.cat([columns, j])
            i = torch.arange(first, last + 1, device=device)
            hidden = ~self.seen(i[:, None], j, S, is_causal)
            yield Tile(slice(first - offset, last + 1 - offset), keys, hidden)


@dataclass
class WindowPattern(Pattern):
    """The keys at most `side` steps of dilation + 1 away, and some tokens that see and are seen by all.

    Attributes:
        side: Steps to either side, ≥ 0.
        dilation: Positions skipped between two steps, ≥ 0.
        global_tokens: Positions, sorted.
        global_rows: Whether global tokens see everything too; False where somebody else computes their rows.
    """

    side: int
    dilation: int = 0
    global_tokens: tuple[int, ...] = ()
    global_rows: bool = True

    def visible(self, i: Tensor, j: Tensor, num_keys: int, is_causal: bool) -> Tensor:
        step = self.dilation + 1
        distance = i - j
        seen = (distance.abs() <= self.side * step) & (distance % step == 0)
        if self.global_tokens:
            seen = seen | self._is_global(j)
            if self.global_rows:
                seen = seen | self._is_global(i)
        return seen

    def _is_global(self, x: Tensor) -> Tensor:
        if self.global_tokens == tuple(range(len(self.global_tokens))):
            return x < len(self.global_tokens)
        return torch.isin(x, torch.tensor(self.global_tokens, device=x.device))

    def reach(self, first: int, last: int, S: int, is_causal: bool) -> tuple[int, int]:
        return first - self.side, last + self.side + 1

    def columns(self, first: int, last: int, S: int, is_causal: bool, device: torch.device) -> Tensor:
        return torch.tensor([g for g in self.global_tokens if g < S], dtype=torch.long, device=device)

    def tiles(self, T: int, S: int, offset: int, is_causal: bool, device: torch.device) -> Iterator[Tile]:
        if self.dilation:
            found = self._dilated(T, S, offset, is_causal, device)
        else:
            size = min(256, max(64, 1 << max(0, self.side - 1).bit_length()))
            found = self.block_tiles(T, S, offset, is_causal, device, size)
        here = [g - offset for g in self.global_tokens if offset <= g < offset + T] if self.global_rows else []
        for tile in found:
            yield from _without(tile, here)
        if here:  # they see everything
            rows, j = torch.tensor(here, device=device), torch.arange(S, device=device)
            yield Tile(rows, slice(0, S), j > (rows + offset)[:, None] if is_causal else None)

    def _dilated(self, T: int, S: int, offset: int, is_causal: bool, device: torch.device) -> Iterator[Tile]:
        """Positions of one residue modulo (dilation + 1) see each other only: as many undilated windows."""
        step = self.dilation + 1
        size = BLOCK * step
        glob = self.columns(0, 0, S, is_causal, device)
        for start in range(0, T, size):
            for first in range(start, min(start + step, T)):
                queries = slice(first, min(start + size, T), step)
                i = offset + torch.arange(T, device=device)[queries]
                low, high = int(i[0]) - self.side * step, int(i[-1]) + self.side * step
                low += -(low // step) * step if low < 0 else 0
                j = torch.arange(low, min(S - 1, int(i[-1]) if is_causal else high) + 1, step, device=device)
                j = torch.cat([glob[~torch.isin(glob, j)], j])
                yield Tile(queries, j, ~self.seen(i[:, None], j, S, is_causal))


@dataclass
class LocalPattern(Pattern):
    """What another pattern shows within a window; positions may count from a later token than 0.

    Attributes:
        inner: The other pattern.
        left, right: How far a query looks back and ahead.
        first: Position of key 0 in the sequence the other pattern speaks of.
    """

    inner: Pattern
    left: int
    right: int
    first: int = 0

    def visible(self, i: Tensor, j: Tensor, num_keys: int, is_causal: bool) -> Tensor:
        near = (j >= i - self.left) & (j <= i + self.right)
        return near & self.inner.visible(i + self.first, j + self.first, num_keys + self.first, is_causal)

    def reach(self, first: int, last: int, S: int, is_causal: bool) -> tuple[int, int]:
        return first - self.left, last + self.right + 1

    def tiles(self, T: int, S: int, offset: int, is_causal: bool, device: torch.device) -> Iterator[Tile]:
        yield from self.block_tiles(T, S, offset, is_causal, device)


@dataclass
class BigBirdPattern(Pattern):
    """A window, global blocks at the start, and a few random blocks for every block of queries (arXiv 2007.14062).

    The random blocks of a query block are drawn, each equally likely, from the blocks that neither its window nor the
    globals touch: those before it in a decoder, all of them in an encoder. They depend on (seed, layer, query block)
    and on nothing else, but for how many blocks an encoder has.

    Attributes:
        side: Tokens of the window to either side.
        block_size, num_random, num_global: Of the blocks.
        seed, layer: What the random blocks are drawn from.
    """

    side: int
    block_size: int
    num_random: int
    num_global: int
    seed: int = 0
    layer: int = 0
    _tables: dict = field(default_factory=dict, repr=False, compare=False)

    def random_blocks(self, n: Tensor, num_blocks: int, is_causal: bool) -> Tensor:
        """[len(n), num_random] blocks of the query blocks `n`; −1 where there are no more."""
        b, g, side = self.block_size, self.num_global, self.side
        before = ((n * b - side) // b - g).clamp_min(0)  # eligible blocks before the window …
        behind = (((n + 1) * b - 1 + side) // b + 1).clamp_min(g)
        eligible = before if is_causal else before + (num_blocks - behind).clamp_min(0)  # … and behind it
        chosen: list[Tensor] = []
        for draw in range(self.num_random):
            left = eligible - draw
            number = _hash(self.seed, self.layer, n, draw) % left.clamp_min(1)
            if chosen:
                for earlier in torch.stack(chosen).sort(dim=0).values:
                    number = number + (number >= earlier).long()
            chosen.append(torch.where(left > 0, number, 2**40 + draw))
        if not chosen:
            return n.new_zeros(len(n), 0)
        number = torch.stack(chosen, dim=1)
        block = torch.where(number < before[:, None], number + g, number - before[:, None] + behind[:, None])
        return torch.where(number < eligible[:, None], block, -1)

    def _random(self, first: int, last: int, S: int, is_causal: bool, device: torch.device) -> Tensor:
        n = torch.arange(first // self.block_size, last // self.block_size + 1, device=device)
        return self.random_blocks(n, -(-S // self.block_size), is_causal)

    def visible(self, i: Tensor, j: Tensor, num_keys: int, is_causal: bool) -> Tensor:
        b = self.block_size
        seen = ((i - j).abs() <= self.side) | (j < self.num_global * b) | (i < self.num_global * b)
        if self.num_random:
            first, last = int(i.min()), int(i.max())
            table = self._random(first, last, num_keys, is_causal, i.device)[i // b - first // b]  # [..., num_random]
            for random in table.unbind(-1):
                seen = seen | (j // b == random)
        return seen

    def reach(self, first: int, last: int, S: int, is_causal: bool) -> tuple[int, int]:
        return first - self.side, last + self.side + 1

    def columns(self, first: int, last: int, S: int, is_causal: bool, device: torch.device) -> Tensor:
        return torch.arange(min(S, self.num_global * self.block_size), device=device)

    def tiles(self, T: int, S: int, offset: int, is_causal: bool, device: torch.device) -> Iterator[Tile]:
        b = self.block_size
        num_global = max(0, min(self.num_global * b - offset, T))
        if num_global:  # they see everything
            i, j = offset + torch.arange(num_global, device=device), torch.arange(S, device=device)
            high = offset + num_global if is_causal else S
            yield Tile(slice(0, num_global), slice(0, high), j[:high] > i[:, None] if is_causal else None)
        size = max(1, min(256, max(64, self.side)) // b) * b
        start = num_global
        while start < T:  # a part of a query block comes in a tile of its own
            stop = min(start + ((-(start + offset)) % b or size), T)
            if (start + offset) % b == 0 and stop - start > b:
                stop -= (stop - start) % b
            yield self._tile(start, stop, S, offset, is_causal, device)
            start = stop

    def _tile(self, start: int, stop: int, S: int, offset: int, is_causal: bool, device: torch.device) -> Tile:
        b, n = self.block_size, stop - start
        window = WindowPattern(self.side, 0, tuple(range(self.num_global * b)), False)
        (tile,) = window.block_tiles(n, S, offset + start, is_causal, device, n)
        blocks = self._random(offset + start, offset + stop - 1, S, is_causal, device)
        links = (blocks[..., None] * b + torch.arange(b, device=device)).flatten(1)  # [query blocks, e]
        missing = ((links < 0) | (links >= S)).repeat_interleave(n // len(links), dim=0)
        assert isinstance(tile.hidden, Tensor)
        hidden = torch.cat([tile.hidden, missing], dim=1)
        return tile._replace(queries=slice(start, stop), hidden=hidden, links=links.clamp(0, S - 1))


@dataclass
class StridedPattern(Pattern):
    """The last l keys and every l-th (arXiv 1904.10509)."""

    stride: int
    once = False

    def visible(self, i: Tensor, j: Tensor, num_keys: int, is_causal: bool) -> Tensor:
        return ((i - j).abs() < self.stride) | ((i - j) % self.stride == 0)

    def tiles(self, T: int, S: int, offset: int, is_causal: bool, device: torch.device) -> Iterator[Tile]:
        stride = self.stride
        yield from WindowPattern(stride - 1).tiles(T, S, offset, is_causal, device)
        if stride == 1:
            everything = torch.arange(S, device=device), offset + torch.arange(T, device=device)[:, None]
            j, i = everything
            yield Tile(slice(0, T), slice(0, S), (j == i) | (j > i) if is_causal else j == i)
            return
        for first in range(min(stride, T)):  # a class of positions that see each other
            i = offset + torch.arange(first, T, stride, device=device)[:, None]
            keys = slice((offset + first) % stride, min(S, int(i[-1]) + 1) if is_causal else S, stride)
            j = torch.arange(S, device=device)[keys]
            yield Tile(slice(first, T, stride), keys, j >= i if is_causal else j == i)


@dataclass
class FixedPattern(Pattern):
    """The own block of l tokens and the last c columns of every block (arXiv 1904.10509)."""

    stride: int
    summary_columns: int

    def visible(self, i: Tensor, j: Tensor, num_keys: int, is_causal: bool) -> Tensor:
        return (i // self.stride == j // self.stride) | (j % self.stride >= self.stride - self.summary_columns)

    def reach(self, first: int, last: int, S: int, is_causal: bool) -> tuple[int, int]:
        return first // self.stride * self.stride, (last // self.stride + 1) * self.stride

    def columns(self, first: int, last: int, S: int, is_causal: bool, device: torch.device) -> Tensor:
        j = torch.arange(min(S, last + 1) if is_causal else S, device=device)
        return j[j % self.stride >= self.stride - self.summary_columns]

    def tiles(self, T: int, S: int, offset: int, is_causal: bool, device: torch.device) -> Iterator[Tile]:
        yield from self.block_tiles(T, S, offset, is_causal, device)


def _without(tile: Tile, rows: list[int]) -> Iterator[Tile]:
    """The tile without some of its queries."""
    assert isinstance(tile.queries, slice) and isinstance(tile.hidden, Tensor)
    members = range(tile.queries.start, tile.queries.stop, tile.queries.step or 1)
    inside = [members.index(row) for row in rows if row in members]
    if not inside:
        yield tile
    elif len(inside) < len(members):
        keep = torch.ones(len(members), dtype=torch.bool, device=tile.hidden.device)
        keep[inside] = False
        places = torch.tensor(members, device=keep.device)[keep]
        yield tile._replace(queries=places, hidden=tile.hidden[keep])


def _hash(seed: int, layer: int, n: Tensor, draw: int) -> Tensor:
    """Evenly distributed whole numbers 0 … 2⁶² for every n (SplitMix64)."""
    x = n * _signed(0x9E3779B97F4A7C15) + _signed((seed * 0xBF58476D1CE4E5B9 + layer * 0x94D049BB133111EB + draw) << 7)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * _signed(factor)  # a logical shift
    return (x ^ ((x >> 31) & (2**33 - 1))) & (2**62 - 1)


def _signed(x: int) -> int:
    return (x + 2**63) % 2**64 - 2**63


def pattern_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    offset: int,
    is_causal: bool,
    eager: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """Softmax attention within a fixed pattern.

    Args:
        query: [B, H, T, D], at the positions offset … offset + T − 1 of its rows.
        key, value: [B, G, S, D], G dividing H.
        pattern: What a query sees.
        offset, is_causal: See the head of the file.
        eager: Build the mask and the scores, and return the weights [B, H, T, S]: the readable reference.
        scale, dropout: As in `tiled_attention`.

    Returns:
        [B, H, T, D], and the weights or None.
    """
    (B, H, T, D), S, device = query.shape, key.shape[2], query.device
    if eager:
        i, j = offset + torch.arange(T, device=device)[:, None], torch.arange(S, device=device)
        mask = pattern.seen(i, j, S, is_causal)[None, None]
        return eager_attention(query, key, value, mask, scale=scale, dropout=dropout)
    if T == 1:
        seen = pattern.seen(torch.tensor(offset, device=device), torch.arange(S, device=device), S, is_causal)
        key, value = (x.index_select(2, seen.nonzero().squeeze(1)) for x in (key, value))
        query = query.view(B, key.shape[1], -1, D)
        out = F.scaled_dot_product_attention(query, key, value, None, dropout, scale=scale)
        return out.view(B, H, T, -1), None
    tiles = list(pattern.tiles(T, S, offset, is_causal, device))
    return tiled_attention(query, key, value, tiles, once=pattern.once, scale=scale, dropout=dropout), None
