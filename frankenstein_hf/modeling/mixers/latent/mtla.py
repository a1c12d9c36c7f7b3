"""`mtla`: attention to slots, gated sums of neighbouring tokens' latents; the cache shrinks along time too.

Shapes: R rows, L row length, H heads, W head width, r latent rank, N slots, K slots a token may belong to.
m tokens make a slot, a slot begins every s ≤ m tokens; slot j covers the tokens s·j … s·j + m − 1.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...cache import MixerKVLayer, States
from ...context import Rows
from ...extras import LayerExtras
from ...ops.numerics import at_least_fp32
from ...ops.scored_attention import eager_attention, scored_attention
from ...ops.slot_attention import explicit_slot_attention, slot_attention
from ...ops.tracing import exporting
from ...positions import apply_rotary
from ..base import RowMixer, merge_heads, split_heads, zero_beyond

QUERIES = 256  # whose scores are held at a time where a cache has been read

# a_t = softmax over complete slots c̄_j = Σ_{i<m} α_{sj+i} c_{sj+i}, sj + m ≤ t + 1, and over the open ones as they are
eager_mtla = explicit_slot_attention


class TemporalLatentAttention(RowMixer):
    """Latents c of m neighbouring tokens are merged, weighted by α = σ(hyper-network(c)) (arXiv 2505.13544).

    A token sees the slots complete before it, and those it belongs to as far as they have come: what a slot gathers
    later is invisible, so that training and decoding agree. A slot has the position of its first token and is rotated
    when it is read. In an encoder every token sees all slots. A slot is kept as its sum so far, so there is nothing
    else to cache.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        r, width, bias = self.params.latent_rank, self.num_heads * self.head_dim, config.attention_bias
        self.q_proj = nn.Linear(self.hidden_size, width, bias=bias)
        self.kv_down_proj = nn.Linear(self.hidden_size, r, bias=bias)
        self.merge_proj = nn.Linear(r, 1)  # the hyper-network
        self.k_up_proj = nn.Linear(r, width, bias=False)
        self.v_up_proj = nn.Linear(r, width, bias=False)
        self.o_proj = nn.Linear(width, self.hidden_size, bias=self.output_bias)

    def weighted_latents(self, x: Tensor) -> Tensor:
        """[R, L, r]: what every token adds to its slots, in at least fp32."""
        c = self.kv_down_proj(x)
        return at_least_fp32(c) * at_least_fp32(self.merge_proj(c)).sigmoid()

    def advance(self, inputs: States, states: States, lengths: Tensor | None) -> States:
        """Slots [R, N, r] after new weighted latents [R, L, r]; `seen` [R] counts tokens."""
        if exporting():
            raise ValueError(
                "the number of its slots depends on how many tokens are real, which a graph cannot look at."
            )
        new, s, m = zero_beyond(inputs["latent"], lengths), self.params.stride, self.params.merge_factor
        R, L, _ = new.shape
        slots = states.get("slots", new.new_zeros(R, 0, new.shape[2]))
        seen = states.get("seen", torch.zeros(R, dtype=torch.long, device=new.device))
        after = seen + (L if lengths is None else lengths)
        if not torch.compiler.is_compiling():  # where a static cache has places for all
            needed = -(-(L if not states and lengths is None else int(after.max())) // s)
            slots = F.pad(slots, (0, 0, 0, max(0, needed - slots.shape[1])))
        tokens = seen[:, None] + torch.arange(L, device=new.device)
        for k in range(self.params.num_open):
            number = tokens // s - k
            belongs = (number >= 0) & (tokens - s * number < m)
            index = number.clamp(0, max(0, slots.shape[1] - 1))[..., None].expand_as(new)
            slots = slots.scatter_add(1, index, new * belongs[..., None])
        return {"slots": slots, "seen": after}

    def open_slots(self, new: Tensor, tokens: Tensor, states: States) -> Tensor:
        """[R, K, L, r]: the k-th newest slot of every token, as far as it has come there.

        Args:
            new: Weighted latents [R, L, r].
            tokens: [R or 1, L] numbers of the tokens in their row.
            states: Before them.
        """
        s, m, opened = self.params.stride, self.params.merge_factor, []
        if s == m and not states:  # slots side by side
            L = new.shape[1]
            return F.pad(new, (0, 0, 0, -L % s)).unflatten(1, (-1, s)).cumsum(2).flatten(1, 2)[:, None, :L]
        for k in range(self.params.num_open):
            first = (tokens // s - k) * s
            total = torch.zeros_like(new)
            if states:
                N = states["slots"].shape[1]
                number = (first // s).expand(new.shape[:2])
                known = (number >= 0) & (number < N)
                index = number.clamp(0, N - 1)[..., None].expand_as(new)
                total = states["slots"].to(new.dtype).gather(1, index) * known[..., None]
            for back in range(min((k + 1) * s, new.shape[1])):  # the token itself, the one before, …
                belongs = (tokens - back >= first) & (tokens - back < first + m) & (first >= 0)
                earlier = new if back == 0 else F.pad(new, (0, 0, back, 0))[:, : new.shape[1]]
                total = total + earlier * belongs[..., None]
            opened.append(total)
        return torch.stack(opened, dim=1)

    def heads(self, latents: Tensor, first: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Latents [R, M, r] of slots that begin at the tokens `first` [R or 1, M] -> keys and values [R, H, M, W]."""
        dtype = self.k_up_proj.weight.dtype if hasattr(self.k_up_proj, "weight") else latents.dtype
        latents = latents.to(dtype)
        key, value = (split_heads(up(latents), self.num_heads) for up in (self.k_up_proj, self.v_up_proj))
        cos, sin = rows.context.rotary_function(first.clamp_min(0), self.head_dim)
        return apply_rotary(key, cos, sin), value

    def mix(self, x: Tensor, rows: Rows, layer: Any) -> tuple[Tensor, LayerExtras | None]:
        q = apply_rotary(split_heads(self.q_proj(x), self.num_heads), *rows.rotary(self.head_dim))
        new = self.weighted_latents(x)
        states: States = {} if layer is None else self.read(layer, new)
        if rows.is_causal:
            output = self.attend(q, new, states, rows)
        else:
            output = self.attend_to_all(q, *self.slots(self.advance({"latent": new}, states, rows.lengths), rows), rows)
        if layer is not None:  # last: a static cache writes over the states before
            self.write(layer, self.advance({"latent": new}, states, rows.lengths), new, rows)
        return self.o_proj(merge_heads(output)), None

    def slots(self, states: States, rows: Rows) -> tuple[Tensor, Tensor]:
        """Keys and values [R, H, N, W] of all slots."""
        latents = states["slots"]
        first = torch.arange(latents.shape[1], device=latents.device) * self.params.stride
        return self.heads(latents, first[None], rows)

    # ------------------------------------------------------------------ attention

    @property
    def dropout(self) -> float:
        """Dropout of attention weights, zero outside training."""
        return self.config.attention_dropout if self.training else 0.0

    def attend(self, q: Tensor, new: Tensor, states: States, rows: Rows) -> Tensor:
        """Causal attention [R, H, L, W]."""
        s, m, K, L = self.params.stride, self.params.merge_factor, self.params.num_open, new.shape[1]
        tokens = rows.positions
        newest = tokens // s  # [R or 1, L]
        first = (newest[:, None] - torch.arange(K, device=q.device)[:, None]) * s  # [R or 1, K, L]
        opened = self.open_slots(new, tokens, states).flatten(1, 2)
        open_k, open_v = (y.unflatten(2, (K, L)) for y in self.heads(opened, first.flatten(1), rows))
        eager = rows.context.backend == "eager"
        if not states and not self.dropout and not eager:
            return slot_attention(q, open_k, open_v, s, m)
        slot_k, slot_v = self.slots(self.advance({"latent": new}, states, rows.lengths), rows)
        step = L if eager else QUERIES
        parts = [
            eager_mtla(
                q[:, :, i : i + step], slot_k, slot_v, open_k[:, :, :, i : i + step], open_v[:, :, :, i : i + step],
                newest[:, i : i + step], self.dropout,
            )
            for i in range(0, L, step)
        ]  # fmt: skip
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def attend_to_all(self, q: Tensor, slot_k: Tensor, slot_v: Tensor, rows: Rows) -> Tensor:
        """Attention of an encoder to all slots of the row, [R, H, L, W]."""
        mask = None
        if rows.lengths is not None:
            begun = -(-rows.lengths.clamp_min(1) // self.params.stride)
            mask = (torch.arange(slot_k.shape[2], device=q.device) < begun[:, None])[:, None, None]
        if rows.context.backend == "eager":
            return eager_attention(q, slot_k, slot_v, mask, dropout=self.dropout)[0]
        return scored_attention(q, slot_k, slot_v, mask, dropout=self.dropout)

    # ------------------------------------------------------------------ the cache

    def read(self, layer: MixerKVLayer, new: Tensor) -> States:
        """The states before this call; in a static cache the slots have all their places from the start."""
        states = layer.tail.read(self.advance) or {}
        places = -(-layer.get_max_length() // self.params.stride)
        if places > 0 and (not states or states["slots"].shape[1] < places):
            empty = {
                "slots": new.new_zeros(len(new), 0, new.shape[2]),
                "seen": torch.zeros(len(new), dtype=torch.long, device=new.device),
            }
            states = dict(states or empty)
            states["slots"] = F.pad(states["slots"], (0, 0, 0, places - states["slots"].shape[1]))
        return states

    def write(self, layer: MixerKVLayer, after: States, new: Tensor, rows: Rows) -> None:
        """Keep the states after this call."""
        layer.count(rows.context.keep, rows.context.all_real)
        layer.tail.write(after, {"latent": new}, rows.context.keep)
