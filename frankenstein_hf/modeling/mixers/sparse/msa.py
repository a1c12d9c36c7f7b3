"""`msa` and `sparda`: attention to blocks of keys that a small index selects for each query.

Shapes: R rows, L queries, S keys, G key/value heads, H heads, W head width, N blocks of C keys, I index width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ...context import SequenceContext
from ...extras import LayerExtras
from ...ops.block_selection import block_scores, choose_blocks, eager_selected_blocks
from ...ops.numerics import at_least_fp32
from ...ops.tiled_attention import selected_block_attention
from ..base import split_heads
from ..sparse_attention import Call, SparseAttention, Streams

eager_msa = eager_selected_blocks  # o_t = softmax(q_t K_ℐᵀ / √W) V_ℐ over the keys of the chosen blocks ℐ_t


class MiniMaxSparseAttention(SparseAttention):
    """Attention to the own block of keys and to the best others, chosen for each query and key/value head.

    Index queries and keys are projections of their own of the detached input. They are trained in the direction of
    the attention itself: KL(index ‖ attention) between the softmax of the chosen blocks' scores and the part of the
    attention, averaged over the heads of a group, that falls into each. The loss is a mean over real tokens and groups.
    """

    loss_name = "msa_kl"
    cached = ("key", "value", "index_key")

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.make_index_query()
        self.index_k_proj = nn.Linear(self.hidden_size, self.params.index_dim, bias=False)

    def make_index_query(self) -> None:
        """The projection of index queries."""
        self.index_q_proj = nn.Linear(self.hidden_size, self.num_key_value_heads * self.params.index_dim, bias=False)

    def project(self, x: Tensor, context: SequenceContext) -> Streams:
        streams = super().project(x, context)
        streams["index_key"] = self.index_k_proj(x.detach())[:, None]
        streams["index_query"] = split_heads(self.index_q_proj(x.detach()), self.num_key_value_heads)
        return streams

    def select(self, streams: Streams, call: Call) -> tuple[Tensor, Tensor]:
        """The chosen blocks [R, G, L, N], bool, and the scores they were chosen by."""
        p, place = self.params, (call.offset, call.is_causal)
        scores = block_scores(streams["index_query"], streams["index_key"], p.block_size, *place)
        return choose_blocks(scores, p.topk_blocks, p.block_size, *place), scores

    def attend(self, streams: Streams, call: Call) -> tuple[Tensor, LayerExtras]:
        q, k, v = (streams[name] for name in ("query", "key", "value"))
        C, weights = self.params.block_size, None
        chosen, scores = self.select(streams, call)
        wants_loss = call.training and self.params.kl_loss_weight > 0
        if call.eager:
            out, weights = eager_msa(q, k, v, chosen, C, call.offset, call.is_causal, call.dropout)
            blocks = nn.functional.pad(weights.detach(), (0, -k.shape[2] % C)).unflatten(-1, (-1, C)).sum(-1)
            masses: Tensor | None = at_least_fp32(blocks).unflatten(1, (k.shape[1], -1)).mean(2)
        else:
            out, masses = selected_block_attention(
                q, k, v, chosen, C, offset=call.offset, is_causal=call.is_causal, dropout=call.dropout,
                want_masses=wants_loss,
            )  # fmt: skip
        if not wants_loss:
            return out, LayerExtras(weights)
        assert masses is not None
        loss = self.params.kl_loss_weight * divergence(scores, masses, chosen, call.lengths) / max(1, call.num_real)
        return out, LayerExtras(weights, aux_losses={self.loss_name: loss})


def divergence(scores: Tensor, masses: Tensor, chosen: Tensor, lengths: Tensor | None) -> Tensor:
    """Σ_t mean_g KL(softmax of the chosen scores ‖ masses) over the real queries; all [R, G, L, N], lengths [R]."""
    log_p = scores.masked_fill(~chosen, -torch.inf).log_softmax(-1).masked_fill(~chosen, 0.0)
    log_q = masses.clamp_min(1e-26).log()
    kl = (log_p.exp() * (log_p - log_q)).masked_fill(~chosen, 0.0).sum(-1).mean(1)
    if lengths is not None:
        kl = kl.masked_fill(torch.arange(kl.shape[1], device=kl.device) >= lengths[:, None], 0.0)
    return kl.sum()


class SparDA(MiniMaxSparseAttention):
    """The same with index queries that a `sparda` layer below has forecast, so that their blocks can be fetched early.

    The first such layer of a model, and any with lookahead 0, selects by a forecast of its own. A layer whose forecast
    nobody would use has no projection for one.
    """

    loss_name = "sparda_kl"
    takes = ("forecast",)

    def make_index_query(self) -> None:
        layers = [i for i, name in enumerate(self.config.mixer_names) if name == "sparda"]
        is_last = not any(i > self.layer_idx and self.config.params_for(i).lookahead for i in layers)
        self.selects_alone = not self.params.lookahead or not any(i < self.layer_idx for i in layers)
        self.forecast_proj = None
        if self.selects_alone or not is_last:
            width = self.num_key_value_heads * self.params.forecast_dim
            self.forecast_proj = nn.Linear(self.hidden_size, width, bias=False)

    def project(self, x: Tensor, context: SequenceContext) -> Streams:
        streams = SparseAttention.project(self, x, context)
        streams["index_key"] = self.index_k_proj(x.detach())[:, None]
        return streams

    def forward(
        self, hidden_states: Tensor, context: SequenceContext, cache: Any = None, forecast: Tensor | None = None
    ) -> tuple[Tensor, LayerExtras | None]:
        """`forecast` [B, G, T, I] comes from the nearest `sparda` layer below; see the class."""
        own = None
        if self.forecast_proj is not None:
            own = split_heads(self.forecast_proj(hidden_states.detach()), self.num_key_value_heads)
        index_query = own if self.selects_alone or forecast is None else forecast
        if index_query is None:
            raise ValueError(f"The sparda mixer of layer {self.layer_idx} needs the forecast of the layer below it.")
        out, extras = self.mix(hidden_states, context, cache, {"index_query": index_query})
        return out, extras if own is None else extras._replace(carried={"forecast": own})
