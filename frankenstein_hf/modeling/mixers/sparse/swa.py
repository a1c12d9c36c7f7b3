"""`swa`: sliding-window softmax attention with attention sinks.

Shapes: R rows, L row length, H heads, G key/value heads, W head width; w window_size, s num_sinks.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...cache import MixerStateLayer, States
from ...context import Rows
from ...extras import LayerExtras
from ...ops.max_logits import max_logits
from ...ops.scored_attention import eager_attention, scored_attention
from ...ops.window_attention import window_attention
from ...positions import apply_rotary
from ..base import RowMixer, last_real, merge_heads, padded, split_heads


def eager_swa(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, dropout: float = 0.0) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ / √W) v over the visible keys of [R, G, S, W]; output [R, H, L, W] and weights [R, H, L, S]."""
    return eager_attention(q, k, v, visible, dropout=dropout)


def window_mask(i: Tensor, j: Tensor, real: Tensor, *, left: int, right: int, s: int, is_causal: bool) -> Tensor:
    """Keys {j < s} ∪ {i − left ≤ j ≤ i + right}, in a decoder only those with j ≤ i.

    Args:
        i, j: [R or 1, L], [R or 1, S] positions of queries and keys.
        real: [R or 1, S] False at keys that do not exist.

    Returns:
        [R or 1, 1, L, S].
    """
    i, j = i[:, :, None], j[:, None, :]
    mask = (j < s) | ((i - left <= j) & (j <= i + right))
    if is_causal:
        mask = mask & (j <= i)
    return (mask & real[:, None, :])[:, None]


class SlidingWindowAttention(RowMixer):
    """Attention to the first s tokens and to the last w − s (arXiv 2309.17453); an encoder looks (w − s)/2 either way.

    Decoding keeps the sinks and a ring of at most w − s keys and values: constant memory.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.num_key_value_heads = config.num_key_value_heads
        bias, width = config.attention_bias, self.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(self.hidden_size, self.num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(self.hidden_size, width, bias=bias)
        self.v_proj = nn.Linear(self.hidden_size, width, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, self.hidden_size, bias=self.output_bias)
        self.add_qk_norm(self.num_key_value_heads)

    def heads(self, qkv: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Projections [R, L, (H + 2G)·W] -> rotated queries [R, H, L, W] and keys, and values [R, G, L, W]."""
        H, G = self.num_heads, self.num_key_value_heads
        qk, v = split_heads(qkv, H + 2 * G).split([H + G, G], dim=1)
        q, k = self.norm_heads(*qk.split([H, G], dim=1))
        rotary = rows.rotary(self.head_dim)
        return apply_rotary(q, *rotary), apply_rotary(k, *rotary), v

    def mix(self, x: Tensor, rows: Rows, layer: MixerStateLayer | None) -> tuple[Tensor, LayerExtras | None]:
        q, k, v = self.heads(self.joint(x, "q_proj", "k_proj", "v_proj"), rows)
        states = None if layer is None else layer.read(self.advance)
        if states is None:
            output, weights = self.attend(q, k, v, rows)
        else:
            output, weights = self.attend_to_past(q, k, v, states, rows)
        if layer is not None:
            inputs = {"key": k.transpose(1, 2), "value": v.transpose(1, 2)}
            states = self.sized(self.advance(inputs, states or {}, rows.lengths), layer)
            layer.write(states, inputs, rows.context.keep)
        return self.o_proj(merge_heads(output)), LayerExtras(weights, max_logits=self.max_logits(q, k, rows))

    def window(self, is_causal: bool) -> dict[str, int]:
        """Tokens a query sees to either side, itself not counted."""
        reach = self.params.reach
        return {"left": reach - 1, "right": 0} if is_causal else {"left": reach // 2, "right": reach // 2}

    @property
    def dropout(self) -> float:
        """Dropout of attention weights, zero outside training."""
        return self.config.attention_dropout if self.training else 0.0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Attention within the rows."""
        window, s = self.window(rows.is_causal), self.params.num_sinks
        if rows.context.backend == "eager":
            places = torch.arange(rows.size, device=q.device)[None]
            real = rows.keep if rows.keep is not None else torch.ones_like(places, dtype=torch.bool)
            mask = window_mask(places, places, real, **window, s=s, is_causal=rows.is_causal)
            return eager_swa(q, k, v, mask, self.dropout)
        output = window_attention(
            q, k, v, **window, num_sinks=s, is_causal=rows.is_causal, lengths=rows.lengths, dropout=self.dropout
        )
        return output, None

    def max_logits(self, q: Tensor, k: Tensor, rows: Rows) -> Tensor | None:
        """[H] largest logits within the rows, if asked for."""
        if not rows.context.output_max_logits:
            return None
        window, s = self.window(rows.is_causal), self.params.num_sinks
        places = torch.arange(rows.size, device=q.device)[None]
        keep = rows.keep if rows.keep is not None else torch.ones_like(places, dtype=torch.bool)

        def visible(queries: slice, keys: slice) -> Tensor:
            i, j, real = places[:, queries], places[:, keys], keep[:, keys]
            return window_mask(i, j, real, **window, s=s, is_causal=rows.is_causal) & keep[:, None, queries, None]

        def spans(start: int, stop: int) -> Iterator[tuple[int, int]]:
            yield 0, min(s, rows.size)
            yield max(0, start - window["left"]), min(rows.size, stop + window["right"])

        return max_logits(q, k, visible, spans=spans)

    # ------------------------------------------------------------------ decoding

    def advance(self, inputs: States, states: States, lengths: Tensor | None) -> States:
        """Sinks [R, s, G, W] and ring [R, w − s, G, W] after new keys and values [R, L, G, W]; `seen` [R] counts.

        Both are only as long as the tokens seen so far need. The ring's last place is the newest token's.
        """
        key = inputs["key"]
        R, L = key.shape[:2]
        seen = states["seen"] if states else torch.zeros(R, dtype=torch.long, device=key.device)
        kept: States = {"seen": seen + (L if lengths is None else lengths)}
        for name, new in inputs.items():
            empty = new[:, :0]
            sinks, ring = states.get(f"sink_{name}", empty), states.get(name, empty)
            sinks = padded(sinks, min(self.params.num_sinks, sinks.shape[1] + L), front=False)
            places = torch.arange(s := sinks.shape[1], device=key.device)
            source = torch.where(places < seen[:, None], places, (s + places - seen[:, None]).clamp(0, s + L - 1))
            index = source[:, :, None, None].expand(-1, -1, *new.shape[2:])
            kept[f"sink_{name}"] = torch.cat([sinks, new], dim=1).gather(1, index)
            kept[name] = last_real(padded(ring, min(self.params.reach, ring.shape[1] + L)), new, lengths)
        return kept

    def sized(self, states: States, layer: MixerStateLayer) -> States:
        """States as the cache keeps them: of one length throughout where it has fixed places, else as they are."""
        if layer.num_places is None:
            return states
        s, size = (min(n, layer.num_places) for n in (self.params.num_sinks, self.params.reach))
        fixed = {name: padded(states[name], size)[:, -size:] for name in ("key", "value")}
        fixed |= {f"sink_{name}": padded(states[f"sink_{name}"], s, front=False)[:, :s] for name in ("key", "value")}
        return states | fixed

    def attend_to_past(
        self, q: Tensor, k: Tensor, v: Tensor, states: States, rows: Rows
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of new tokens to sinks, ring and each other, w queries at a time so that cost stays O(L·w)."""
        eager, L = rows.context.backend == "eager", q.shape[2]
        step = L if eager else self.params.window_size
        outputs, weights = [], None
        for start in range(0, L, step):
            new_k, new_v = (y[:, :, start : start + step] for y in (k, v))
            size, lengths = new_k.shape[2], None
            if rows.lengths is not None:
                lengths = (rows.lengths - start).clamp(0, size)
            key, value, mask = self._past_and_new(new_k, new_v, states, lengths)
            query = q[:, :, start : start + step]
            if eager:
                output, weights = eager_swa(query, key, value, mask, self.dropout)
            else:
                output = scored_attention(query, key, value, mask, dropout=self.dropout)
            outputs.append(output)
            if start + step < L:
                states = self.advance({"key": new_k.transpose(1, 2), "value": new_v.transpose(1, 2)}, states, lengths)
        return torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0], weights

    def _past_and_new(
        self, k: Tensor, v: Tensor, states: States, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [R, G, w + L, W] and the mask [R, 1, L, w + L]."""
        s, size, L = states["sink_key"].shape[1], states["key"].shape[1], k.shape[2]
        seen = states["seen"][:, None]
        device = k.device
        ring = seen - size + torch.arange(size, device=device)
        new = seen + torch.arange(L, device=device)
        sinks = torch.arange(s, device=device).expand(seen.shape[0], s)
        j = torch.cat([sinks, ring, new], dim=1)
        real_new = torch.ones_like(new, dtype=torch.bool) if lengths is None else new - seen < lengths[:, None]
        # a sink still inside the ring must not count twice
        real = torch.cat([sinks < seen - size, ring >= 0, real_new], dim=1)
        mask = window_mask(new, j, real, **self.window(True), s=self.params.num_sinks, is_causal=True)
        key, value = (
            torch.cat([states[f"sink_{name}"], states[name], y.transpose(1, 2)], dim=1).transpose(1, 2)
            for name, y in (("key", k), ("value", v))
        )
        return key, value, mask
