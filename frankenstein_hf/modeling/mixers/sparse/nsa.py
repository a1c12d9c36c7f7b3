"""`nsa`: compressed keys, the blocks they select, and a window.

Shapes: R rows, L queries, S keys, G key/value heads, H heads, W head width, N selectable blocks of C keys, M compressed
        keys, each of l keys that begin d apart.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from ...context import SequenceContext
from ...extras import LayerExtras
from ...ops.block_selection import eager_selected_blocks, top_blocks
from ...ops.numerics import at_least_fp32, full_precision
from ...ops.patterns import WindowPattern, pattern_attention
from ...ops.scored_attention import eager_attention
from ...ops.tiled_attention import Tile, selected_block_attention, tiled_attention
from ..sparse_attention import Call, SparseAttention, Streams


def eager_nsa(
    q: Tensor, k: Tensor, v: Tensor, k_cmp: Tensor, v_cmp: Tensor, α: Tensor, see_cmp: Tensor, chosen: Tensor,
    see_win: Tensor, C: int, offset: int, is_causal: bool,
) -> Tensor:  # fmt: skip
    """y_t = α_cmp Attn(q_t, K̃_cmp, Ṽ_cmp) + α_sel Attn(q_t, K_ℐ, V_ℐ) + α_win Attn(q_t, K_{t−w:t}, V_{t−w:t})."""
    y_cmp, _ = eager_attention(q, k_cmp, v_cmp, see_cmp) if k_cmp.shape[2] else (torch.zeros_like(q), None)
    y_sel, _ = eager_selected_blocks(q, k, v, chosen, C, offset, is_causal)
    y_win, _ = eager_attention(q, k, v, see_win)
    α_cmp, α_sel, α_win = α.unbind(-1)
    return α_cmp[..., None] * y_cmp + α_sel[..., None] * y_sel + α_win[..., None] * y_win


class BlockCompression(nn.Module):
    """φ: one key (or value) [W] for l of them [l, W], with a learned offset for each place in the block."""

    def __init__(self, block_size: int, head_dim: int) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.empty(block_size, head_dim))
        self.up_proj = nn.Linear(block_size * head_dim, head_dim)
        self.down_proj = nn.Linear(head_dim, head_dim, bias=False)  # one for all keys would change no softmax

    def init_parameters(self) -> None:
        """The offsets of places start at nothing."""
        init.zeros_(self.place)

    def forward(self, blocks: Tensor) -> Tensor:
        """[..., l, W] -> [..., W]."""
        return self.down_proj(F.gelu(self.up_proj((blocks + self.place).flatten(-2))))


class NativeSparseAttention(SparseAttention):
    """Three attentions with gates from the token (arXiv 2502.11089).

    The compressed one sees the compressed keys whose block is complete; a query before the first reads zero. What it
    gives to each, summed over the heads that share keys, is spread over the selectable blocks that its block overlaps,
    and selects among them. The first block, the own and the one before (in an encoder also the one behind) are always
    selected.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.k_compression = BlockCompression(self.params.block_size, self.head_dim)
        self.v_compression = BlockCompression(self.params.block_size, self.head_dim)
        self.g_proj = nn.Linear(self.hidden_size, 3 * self.num_heads)

    def project(self, x: Tensor, context: SequenceContext) -> Streams:
        gate = self.g_proj(x).sigmoid().unflatten(-1, (self.num_heads, 3))
        return super().project(x, context) | {"gate": gate.transpose(1, 2)}

    # ------------------------------------------------------------------ the compressed branch

    def compressed(self, streams: Streams, call: Call) -> tuple[Tensor, Tensor]:
        """Compressed keys and values [R, G, M, W] of all complete blocks, those of the past from the cache."""
        S = streams["key"].shape[2]
        l, d = self.params.block_size, self.params.stride
        past, now = ((n - l) // d + 1 if n >= l else 0 for n in (call.offset, S))
        both = []
        for name, compression in (("key", self.k_compression), ("value", self.v_compression)):
            new = streams[name][:, :, :0]
            if now > past:
                stretch = streams[name][:, :, past * d : (now - 1) * d + l]
                new = compression(stretch.unfold(2, l, d).transpose(-1, -2))
            earlier = call.past_blocks(f"compressed_{name}", past)
            both.append(new if earlier is None else torch.cat([earlier.to(new.dtype), new], dim=2))
            call.keep_blocks(f"compressed_{name}", both[-1])
        return both[0], both[1]

    def sees_compressed(self, i: Tensor, M: int, call: Call) -> Tensor:
        """[len(i), M] whether the query at position i sees a compressed key: whether its block is complete by then."""
        ends = torch.arange(M, device=i.device) * self.params.stride + self.params.block_size - 1
        return ends <= i[:, None] if call.is_causal else torch.ones(len(i), M, dtype=torch.bool, device=i.device)

    def overlap(self, M: int, N: int, device: torch.device) -> Tensor:
        """[M, N] strides a compressed key's block shares with a selectable block."""
        p = self.params
        first, block = (
            p.stride * torch.arange(M, device=device)[:, None],
            p.select_block * torch.arange(N, device=device),
        )
        shared = torch.minimum(first + p.block_size, block + p.select_block) - torch.maximum(first, block)
        return shared.clamp_min(0) // p.stride

    # ------------------------------------------------------------------ the selection

    @torch.no_grad()
    @full_precision
    def select(self, q: Tensor, k_cmp: Tensor, S: int, call: Call) -> Tensor:
        """ℐ_t: [R, G, L, N] bool."""
        (R, H, L, W), (G, M), C = q.shape, k_cmp.shape[1:3], self.params.select_block
        N = -(-S // C)
        places = call.offset + torch.arange(L, device=q.device)
        scores = torch.zeros(R, G, L, N, device=q.device, dtype=at_least_fp32(q[:0]).dtype)
        if M:
            spread = self.overlap(M, N, q.device).to(scores.dtype)
            keys = at_least_fp32(k_cmp).mT[:, :, None]
            for start in range(0, L, 256):  # in parts, so that no L × M tensor arises
                part = at_least_fp32(q[:, :, start : start + 256]).unflatten(1, (G, H // G))
                seen = self.sees_compressed(places[start : start + 256], M, call)
                s = (part * W**-0.5 @ keys).masked_fill_(~seen, -torch.inf)
                p = s.softmax(-1).nan_to_num_(0.0).sum(2)  # nothing to see yet: no preference
                scores[:, :, start : start + 256] = p @ spread
        b, own = torch.arange(N, device=q.device), (places // C)[:, None]
        forced = (b == 0) | (b == own) | (b == own - 1)
        if not call.is_causal:
            forced = forced | (b == own + 1)
        allowed = ~forced & (b < own) if call.is_causal else ~forced
        number = max(0, self.params.num_selected - (3 if call.is_causal else 4))
        return top_blocks(scores, number, allowed) | forced

    def attend(self, streams: Streams, call: Call) -> tuple[Tensor, LayerExtras]:
        q, k, v, gate = (streams[name] for name in ("query", "key", "value", "gate"))
        L, S, w, C = q.shape[2], k.shape[2], self.params.window_size, self.params.select_block
        k_cmp, v_cmp = self.compressed(streams, call)
        chosen = self.select(q, k_cmp, S, call)
        window = WindowPattern(w - 1 if call.is_causal else w // 2)
        place: dict[str, Any] = dict(offset=call.offset, is_causal=call.is_causal)
        i = call.offset + torch.arange(L, device=q.device)
        if call.eager:
            see_win = window.seen(i[:, None], torch.arange(S, device=q.device), S, call.is_causal)
            see_cmp = self.sees_compressed(i, k_cmp.shape[2], call)
            return eager_nsa(q, k, v, k_cmp, v_cmp, gate, see_cmp, chosen, see_win, C, **place), LayerExtras()
        far = tiled_attention(q, k_cmp, v_cmp, self.tiles(i, k_cmp.shape[2], call), dropout=call.dropout)
        selected, _ = selected_block_attention(q, k, v, chosen, C, dropout=call.dropout, **place)
        near, _ = pattern_attention(q, k, v, window, dropout=call.dropout, **place)
        α = gate.unsqueeze(-2).unbind(-1)
        return α[0] * far + α[1] * selected + α[2] * near, LayerExtras()

    def tiles(self, i: Tensor, M: int, call: Call) -> list[Tile]:
        """Blocks of queries with the compressed keys they see."""
        tiles = []
        for start in range(0, len(i), 256):
            seen = self.sees_compressed(i[start : start + 256], M, call)
            count = int(seen[-1].sum())  # the last query sees most
            if count:
                tiles.append(Tile(slice(start, start + len(seen)), slice(0, count), ~seen[:, :count]))
        return tiles
