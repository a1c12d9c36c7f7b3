"""`fastconformer`: limited-context softmax attention with global tokens at the head of the sequence.

Shapes: R rows, L row length, H heads, G key/value heads, W head width; w window_size, 𝒢 global positions, P tokens up
        to the last of them.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ...cache import States
from ...context import Rows, SequenceContext
from ...extras import LayerExtras
from ...ops.patterns import Pattern, WindowPattern
from ...ops.scored_attention import eager_attention, scored_attention
from ...positions import apply_rotary
from ..base import last_real, merge_heads, padded, split_heads
from ..sparse_attention import Call, PatternAttention, Streams

eager_fastconformer = eager_attention  # softmax over {|i − j| ≤ w/2} ∪ {j ∈ 𝒢}, everything for i ∈ 𝒢


class FastConformerAttention(PatternAttention):
    """Attention to the tokens at most w/2 away and to the global ones, which see everything (arXiv 2305.05084).

    The first global token is the first of the sequence, the others follow at equal steps. With separate projections a
    global token shows others its own keys and values, and sees the keys and values of that kind of all tokens. Decoding
    keeps the first P tokens and a ring of w/2: constant memory.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.separate = self.params.global_attn_separate and self.params.global_tokens > 0
        if self.separate:
            bias, width = config.attention_bias, self.num_key_value_heads * self.head_dim
            self.q_global_proj = nn.Linear(self.hidden_size, self.num_heads * self.head_dim, bias=bias)
            self.k_global_proj = nn.Linear(self.hidden_size, width, bias=bias)
            self.v_global_proj = nn.Linear(self.hidden_size, width, bias=bias)

    @staticmethod
    def patterns(params: Any, layer_idx: int, num_heads: int) -> list[tuple[slice, Pattern]]:
        pattern = WindowPattern(params.side, 0, params.positions, not params.global_attn_separate)
        return [(slice(0, num_heads), pattern)]

    def project(self, x: Tensor, context: SequenceContext | Rows) -> Streams:
        streams = super().project(x, context)  # type: ignore[arg-type]
        if self.separate:
            q = split_heads(self.q_global_proj(x), self.num_heads)
            k = split_heads(self.k_global_proj(x), self.num_key_value_heads)
            rotary = context.rotary(self.head_dim)
            streams["query_global"], streams["key_global"] = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
            streams["value_global"] = split_heads(self.v_global_proj(x), self.num_key_value_heads)
            place = context.positions
            here = self.is_global(place)[:, None, :, None]
            for name in ("key", "value"):
                streams[name] = torch.where(here, streams[f"{name}_global"], streams[name])
        return streams

    def is_global(self, place: Tensor) -> Tensor:
        """Whether positions are in 𝒢."""
        return (place < self.params.head) & (place % self.params.global_tokens_spacing == 0)

    def attend(self, streams: Streams, call: Call) -> tuple[Tensor, LayerExtras]:
        out, extras = super().attend(streams, call)
        i = torch.arange(out.shape[2], device=out.device)[: self.params.head : self.params.global_tokens_spacing]
        if not self.separate:
            return out, extras
        mask = None
        if call.is_causal:
            mask = (torch.arange(streams["key"].shape[2], device=out.device) <= i[:, None])[None, None]
        q, k, v = streams["query_global"].index_select(2, i), streams["key_global"], streams["value_global"]
        if not call.eager:
            return out.index_copy(2, i, scored_attention(q, k, v, mask, dropout=call.dropout)), extras
        rows, weights = eager_attention(q, k, v, mask, dropout=call.dropout)
        assert extras.weights is not None
        return out.index_copy(2, i, rows), LayerExtras(extras.weights.index_copy(2, i, weights))

    def max_logits(self, streams: Streams, rows: Rows) -> Tensor | None:
        """Not claimed: two pairs of projections may make them."""
        return None

    # ------------------------------------------------------------------ decoding

    def forward(
        self, hidden_states: Tensor, context: SequenceContext, cache: Any = None
    ) -> tuple[Tensor, LayerExtras | None]:
        if cache is None:
            return super().forward(hidden_states, context)
        layer, (rows,) = cache.layers[self.layer_idx], context.rows
        new = self.project(rows.compact(hidden_states), rows)
        states = layer.read(self.advance)
        weights: Tensor | None = None
        if states is None:
            output, extras = super().forward(hidden_states, context)
            weights = extras.weights if extras is not None else None
        else:
            mixed, weights = self.attend_to_past(new, states, rows)
            output = context.restore([self.o_proj(merge_heads(mixed))])
            weights = context.restore_weights([weights]) if weights is not None and context.output_attentions else None
        inputs = {name: x.transpose(1, 2) for name, x in new.items() if "query" not in name}
        states = self.advance(inputs, states or {}, rows.lengths)
        if layer.num_places is not None:  # of one length throughout
            size = min(self.params.side, layer.num_places)
            states |= {name: padded(states[name], size)[:, -size:] for name in ("key", "value")}
        layer.write(states, inputs, context.keep)
        return output, LayerExtras(weights)

    def advance(self, inputs: States, states: States, lengths: Tensor | None) -> States:
        """First P tokens [R, P, G, W] and the last w/2 at most, with new ones [R, L, G, W]; `seen` [R]."""
        key = inputs["key"]
        R, L, P = *key.shape[:2], self.params.head
        seen = states["seen"] if states else torch.zeros(R, dtype=torch.long, device=key.device)
        places = torch.arange(P, device=key.device)
        source = torch.where(places < seen[:, None], places, (P + places - seen[:, None]).clamp(0, P + L - 1))
        kept: States = {"seen": seen + (L if lengths is None else lengths)}
        for name, new in inputs.items():
            head = states.get(f"head_{name}", new.new_zeros(R, P, *new.shape[2:]))
            index = source[:, :, None, None].expand(-1, -1, *new.shape[2:])
            kept[f"head_{name}"] = torch.cat([head, new], dim=1).gather(1, index)
            if "global" not in name:
                ring = states.get(name, new[:, :0])
                kept[name] = last_real(padded(ring, min(self.params.side, ring.shape[1] + L)), new, lengths)
        return kept

    def attend_to_past(self, new: Streams, states: States, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Attention of new tokens to head, ring and each other, w of them at a time so that cost stays O(L·w)."""
        L, eager = new["query"].shape[2], rows.context.backend == "eager"
        step = L if eager else self.params.window_size
        outputs, weights = [], None
        for start in range(0, L, step):
            part = {name: x[:, :, start : start + step] for name, x in new.items()}
            size = part["query"].shape[2]
            lengths = None if rows.lengths is None else (rows.lengths - start).clamp(0, size)
            output, weights = self._attend_to_past(part, states, lengths, eager)
            outputs.append(output)
            if start + step < L:
                inputs = {name: x.transpose(1, 2) for name, x in part.items() if "query" not in name}
                states = self.advance(inputs, states, lengths)
        return torch.cat(outputs, dim=2), weights

    def _attend_to_past(
        self, new: Streams, states: States, lengths: Tensor | None, eager: bool
    ) -> tuple[Tensor, Tensor | None]:
        q, device, seen = new["query"], new["query"].device, states["seen"][:, None]
        size = states["key"].shape[1]  # of the ring, which is only as long as the tokens seen
        ring = seen - size + torch.arange(size, device=device)
        i = seen + torch.arange(q.shape[2], device=device)
        head = torch.arange(self.params.head, device=device).expand(len(seen), -1)
        real_new = torch.ones_like(i, dtype=torch.bool) if lengths is None else i - seen < lengths[:, None]
        # what is still inside the ring must not count twice
        real = torch.cat([head < seen - size, ring >= 0, real_new], dim=1)[:, None, None]
        j, at = torch.cat([head, ring, i], dim=1)[:, None, None], i[:, None, :, None]
        visible = (at - j <= self.params.side) | self.is_global(j)
        visible = visible if self.separate else visible | self.is_global(at)
        keys, values = (self._past_and_new(name, new, states, [f"head_{name}", name]) for name in ("key", "value"))
        out, weights = self._scored(q, keys, values, visible & real & (j <= at), eager)
        if self.separate:
            j = torch.cat([head, i], dim=1)[:, None, None]
            real = torch.cat([head < seen, real_new], dim=1)[:, None, None]
            keys, values = (self._past_and_new(x, new, states, [f"head_{x}"]) for x in ("key_global", "value_global"))
            rows, _ = self._scored(new["query_global"], keys, values, real & (j <= at), eager)
            out = torch.where(self.is_global(at), rows, out)
        return out, weights

    @staticmethod
    def _past_and_new(name: str, new: Streams, states: States, past: list[str]) -> Tensor:
        return torch.cat([*(states[part].transpose(1, 2) for part in past), new[name]], dim=2)

    def _scored(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, eager: bool) -> tuple[Tensor, Tensor | None]:
        dropout = self.config.attention_dropout if self.training else 0.0
        if eager:
            return eager_attention(q, k, v, mask, dropout=dropout)
        return scored_attention(q, k, v, mask, dropout=dropout), None
