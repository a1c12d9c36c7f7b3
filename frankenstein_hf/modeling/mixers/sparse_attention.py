"""What the sparse softmax mixers share: projections, a cache of all keys and values, rows of one document each.

Shapes: B batch, R rows, T tokens, L queries of a row, S keys of a row, H heads, G key/value heads, W head width.

A row's queries stand at the positions offset … offset + L − 1 of its keys, all counted in real tokens. Rows that differ
in offset (with a past) or in length (in an encoder, where the end of a row matters) are attended to one after another,
so that no sparse core ever meets a pad before the end of a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..cache import MixerKVLayer
from ..context import Rows, SequenceContext
from ..extras import LayerExtras, summed
from ..ops.max_logits import max_logits
from ..ops.patterns import Pattern, pattern_attention
from ..positions import apply_rotary
from .base import Mixer, merge_heads, split_heads

Streams = dict[str, Tensor]


@dataclass
class Call:
    """One call of a sparse core: rows of equal length and offset.

    Attributes:
        offset: Position of the first query.
        is_causal: Whether later tokens are invisible.
        eager: Whether to materialise masks and scores.
        training: Whether the model is being trained.
        dropout: Of attention weights, zero outside training.
        scale: Factor of the scores; None: W^−½.
        rows: [r] rows of the group this call is about, or None for all.
        lengths: [r] real queries (a decoder's rows may have filling behind them), or None when all are.
        layer: The cache, or None.
        num_real: Real tokens of the whole batch in this forward.
    """

    offset: int
    is_causal: bool
    eager: bool = False
    training: bool = False
    dropout: float = 0.0
    scale: float | None = None
    rows: Tensor | None = None
    lengths: Tensor | None = None
    layer: MixerKVLayer | None = None
    num_real: int = 1

    def past_blocks(self, name: str, count: int) -> Tensor | None:
        """The first `count` blocks [r, …, count, W] of the cached stream `name`, whose entries are no tokens."""
        if self.layer is None or not count or name not in self.layer.streams:
            return None
        stream = self.layer.streams[name]
        return (stream if self.rows is None else stream[self.rows])[..., :count, :]

    def keep_blocks(self, name: str, blocks: Tensor) -> None:
        """Put all blocks [r, …, N, W] of these rows into the cache; how many of them count, a row's length tells."""
        if self.layer is None:
            return
        if self.rows is not None and name in self.layer.streams:
            old, N = self.layer.streams[name], blocks.shape[-2]
            grown = nn.functional.pad(old, (0, 0, 0, max(0, N - old.shape[-2])))
            grown[self.rows, ..., :N, :] = blocks
            blocks = grown
        self.layer.streams[name] = blocks


class SparseAttention(Mixer):
    """Softmax attention of each query to some of the keys.

    Subclasses say which, in `attend`. What they need besides keys and values they add in `project`; the streams named
    in `cached` are kept for every token.
    """

    rotated = True  # whether queries and keys carry rotary positions
    cached: tuple[str, ...] = ("key", "value")

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.num_key_value_heads = config.num_key_value_heads
        bias, width = config.attention_bias, self.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(self.hidden_size, self.num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(self.hidden_size, width, bias=bias)
        self.v_proj = nn.Linear(self.hidden_size, width, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, self.hidden_size, bias=self.output_bias)
        self.add_qk_norm(self.num_key_value_heads)

    # ------------------------------------------------------------------ for subclasses

    def project(self, x: Tensor, context: SequenceContext) -> Streams:
        """[B, T, D] -> "query" [B, H, T, W], "key" and "value" [B, G, T, W], and further streams [B, …, T, …]."""
        q = split_heads(self.q_proj(x), self.num_heads)
        k = split_heads(self.k_proj(x), self.num_key_value_heads)
        v = split_heads(self.v_proj(x), self.num_key_value_heads)
        q, k = self.norm_heads(q, k)
        if self.rotated:
            rotary = context.rotary(self.head_dim)
            q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
        return {"query": q, "key": k, "value": v}

    def attend(self, streams: Streams, call: Call) -> tuple[Tensor, LayerExtras]:
        """Attention of the queries [r, H, L, W] among the streams to the keys [r, G, S, W].

        Returns:
            [r, H, L, W], and extras with weights [r, H, L, S] if materialised.
        """
        q, k, v = (streams[name] for name in ("query", "key", "value"))
        out, weights = self.core(q, k, v, call, self.params, self.layer_idx)
        return out, LayerExtras(weights)

    def core(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, params: Any, layer_idx: int
    ) -> tuple[Tensor, Tensor | None]:
        """What `attend` comes to where queries, keys and values are all there is; see there."""
        raise NotImplementedError

    # ------------------------------------------------------------------ the way there and back

    def forward(
        self, hidden_states: Tensor, context: SequenceContext, cache: Any = None
    ) -> tuple[Tensor, LayerExtras | None]:
        return self.mix(hidden_states, context, cache, {})

    def mix(
        self, hidden_states: Tensor, context: SequenceContext, cache: Any, streams: Streams
    ) -> tuple[Tensor, LayerExtras]:
        """`forward` with further `streams`, which no projection of this layer yields."""
        layer = None if cache is None else cache.layers[self.layer_idx]
        new = self.project(hidden_states, context) | streams
        whole = {}
        if layer is not None:
            layer.count(context.keep, context.all_real)
            whole = {name: layer.extend(name, new[name]) for name in self.cached}
        num_real = hidden_states.shape[0] * hidden_states.shape[1] if context.all_real else int(context.keep.sum())
        outputs, weights, extras = [], [], []
        for rows in context.rows:
            output = hidden_states.new_zeros(
                *((rows.index if rows.index is not None else context.keep).shape), self.num_heads * self.head_dim
            )
            parts = []
            here = {name: _compact(rows, x) for name, x in new.items()}
            for call, some in self._calls(rows, here, whole, layer, num_real):
                mixed, extra = self.attend(some, call)
                merged = merge_heads(mixed).to(output.dtype)
                if call.rows is None and merged.shape == output.shape:
                    output = merged
                else:
                    full = torch.nn.functional.pad(merged, (0, 0, 0, output.shape[1] - merged.shape[1]))
                    everyone = torch.arange(len(output), device=output.device) if call.rows is None else call.rows
                    output = output.index_copy(0, everyone, full)
                extras.append(extra)
                parts.append((call, extra.weights))
            outputs.append(output)
            if context.output_attentions and all(weight is not None for _, weight in parts):
                weights.append(_joined_weights(parts, output.shape[0], output.shape[1]))
        largest = [extra.max_logits for extra in extras if extra.max_logits is not None]
        if context.output_max_logits:
            largest += [m for rows in context.rows if (m := self.max_logits(new, rows)) is not None]
        return self.o_proj(context.restore(outputs)), LayerExtras(
            context.restore_weights(weights) if weights else None,
            torch.stack(largest).amax(0) if largest else None,
            summed(extra.aux_losses for extra in extras),
        )

    def _calls(
        self, rows: Rows, here: Streams, whole: Streams, layer: MixerKVLayer | None, num_real: int
    ) -> Iterator[tuple[Call, Streams]]:
        """The group of rows cut into rows of equal offset and, in an encoder, equal length."""
        common: dict[str, Any] = dict(
            is_causal=rows.is_causal,
            eager=rows.context.backend == "eager",
            training=self.training,
            dropout=self.config.attention_dropout if self.training else 0.0,
            layer=layer,
            num_real=num_real,
        )
        lengths = rows.lengths
        if rows.num_past is not None:
            assert layer is not None
            yield from self._calls_with_past(rows, here, whole, layer, common)
        elif rows.is_causal or lengths is None:
            yield Call(0, lengths=lengths, **common), here
        else:
            for length in lengths.unique().tolist():
                members = (lengths == length).nonzero().squeeze(1)
                if length:
                    yield (
                        Call(0, rows=members, **common),
                        {name: x.index_select(0, members)[..., :length, :] for name, x in here.items()},
                    )

    def _calls_with_past(
        self, rows: Rows, here: Streams, whole: Streams, layer: MixerKVLayer, common: dict[str, Any]
    ) -> Iterator[tuple[Call, Streams]]:
        num_past = rows.num_past
        assert num_past is not None
        L = here["query"].shape[-2]
        if layer.keep is None:
            past = layer.get_seq_length() - L
            yield Call(past, lengths=rows.lengths, **common), here | whole
            return
        order = torch.argsort(~layer.keep, dim=1, stable=True)  # real tokens first
        for past in num_past.unique().tolist():
            members = (num_past == past).nonzero().squeeze(1)
            index = order[members, : past + L]
            some = {name: x.index_select(0, members) for name, x in here.items()}
            for name, x in whole.items():
                x = x.index_select(0, members)
                at = index.view(len(members), *[1] * (x.dim() - 3), -1, 1).expand(*x.shape[:-2], -1, x.shape[-1])
                some[name] = x.gather(-2, at)
            lengths = None if rows.lengths is None else rows.lengths[members]
            yield Call(int(past), rows=members, lengths=lengths, **common), some

    def max_logits(self, streams: Streams, rows: Rows) -> Tensor | None:
        """[H] largest logits within the rows; for mixers whose spec claims them."""
        return None


def _compact(rows: Rows, x: Tensor) -> Tensor:
    """[B, …, T, W] -> [R, …, L, W]."""
    return x if rows.index is None else rows.compact(x.movedim(-2, 1)).movedim(1, -2)


def _joined_weights(parts: list[tuple[Call, Tensor | None]], R: int, L: int) -> Tensor:
    """[R, H, L, S] from the weights of every call."""
    longest = max(weight.shape[3] for _, weight in parts if weight is not None)
    if parts and parts[0][0].layer is None:
        longest = max(longest, L)
    joined: Tensor | None = None
    for call, weight in parts:
        assert weight is not None
        weight = torch.nn.functional.pad(weight, (0, longest - weight.shape[3], 0, L - weight.shape[2]))
        if call.rows is None:
            return weight
        joined = weight.new_zeros(R, *weight.shape[1:]) if joined is None else joined
        joined = joined.index_copy(0, call.rows, weight)
    assert joined is not None
    return joined


class PatternAttention(SparseAttention):
    """Sparse attention in a fixed pattern; it has no parameters but the projections."""

    @staticmethod
    def patterns(params: Any, layer_idx: int, num_heads: int) -> list[tuple[slice, Pattern]]:
        """Which heads see which pattern."""
        raise NotImplementedError

    def attend(self, streams: Streams, call: Call) -> tuple[Tensor, LayerExtras]:
        q, k, v = (streams[name] for name in ("query", "key", "value"))
        patterns = self.patterns(self.params, self.layer_idx, self.num_heads)
        out, weights = attend_in_patterns(patterns, q, k, v, call)
        return out, LayerExtras(weights)

    def max_logits(self, streams: Streams, rows: Rows) -> Tensor | None:
        q, k = (_compact(rows, streams[name]) for name in ("query", "key"))
        places = torch.arange(rows.size, device=q.device)
        keep = rows.keep if rows.keep is not None else torch.ones(1, rows.size, dtype=torch.bool, device=q.device)
        largest = []
        for heads, pattern in self.patterns(self.params, self.layer_idx, self.num_heads):
            # the far end of a row may matter to a pattern, and rows differ in length
            for r in range(len(q)) if rows.lengths is not None else [slice(None)]:
                row = slice(r, r + 1) if isinstance(r, int) else r
                S = int(rows.lengths[r]) if rows.lengths is not None else rows.size
                real = keep[row]

                def visible(queries: slice, keys: slice, pattern: Any = pattern, S: int = S, real: Tensor = real):
                    seen = pattern.seen(places[queries, None], places[keys], S, rows.is_causal)
                    return seen & real[:, None, queries, None] & real[:, None, None, keys]

                largest.append(max_logits(q[row, heads], _of_heads(k, heads, self.num_heads)[row], visible))
        per_row = len(largest) // len(self.patterns(self.params, self.layer_idx, self.num_heads))
        joined = [torch.stack(largest[i : i + per_row]).amax(0) for i in range(0, len(largest), per_row)]
        return torch.cat(joined)


def _of_heads(x: Tensor, heads: slice, num_heads: int) -> Tensor:
    """The key/value heads [B, g, S, W] that serve the query heads `heads`."""
    first, last = heads.start or 0, num_heads if heads.stop is None else heads.stop
    if (first, last) == (0, num_heads):
        return x
    share = num_heads // x.shape[1]
    if first % share == 0 and last % share == 0:
        return x[:, first // share : last // share]
    if share % (last - first) == 0:  # all within one group
        return x[:, first // share : first // share + 1]
    return x.repeat_interleave(share, dim=1)[:, first:last]


def attend_in_patterns(
    patterns: list[tuple[slice, Pattern]], query: Tensor, key: Tensor, value: Tensor, call: Call
) -> tuple[Tensor, Tensor | None]:
    """Attention of heads to what their patterns show: [r, H, L, W], and the weights if materialised."""
    outputs, weights = [], []
    for heads, pattern in patterns:
        k, v = (_of_heads(x, heads, query.shape[1]) for x in (key, value))
        out, weight = pattern_attention(
            query[:, heads], k, v, pattern, offset=call.offset, is_causal=call.is_causal, eager=call.eager,
            scale=call.scale, dropout=call.dropout,
        )  # fmt: skip
        outputs.append(out)
        weights.append(weight)
    if len(outputs) == 1:
        return outputs[0], weights[0]
    return torch.cat(outputs, 1), None if weights[0] is None else torch.cat(weights, 1)  # type: ignore[arg-type]
