"""What latent mixers share: a few numbers are kept of a token, heads are made of them when whole sequences attend.

Shapes: B batch, T queries, S keys, H heads, G key/value heads, W head width.
"""

from typing import Any

from torch import Tensor, nn

from ...attention_backends import dense_attention
from ...cache import States
from ...context import SequenceContext
from ...extras import LayerExtras
from ...ops.few_queries import are_few
from ..base import Mixer, merge_heads


class CompressedAttention(Mixer):
    """Softmax attention as `queries`, `compress` (what is cached) and `expand` (heads again).

    A mixer that can read what is cached without expanding it says how in `attend_as_kept`, for a few new tokens.
    """

    scaling: float
    o_proj: nn.Module

    def queries(self, x: Tensor, context: SequenceContext) -> Any:
        """[B, T, D] -> queries as they enter the scores, [B, H, T, W] or what the mixer's own attention takes."""
        raise NotImplementedError

    def compress(self, x: Tensor, context: SequenceContext, cached: bool) -> States:
        """[B, T, D] -> what is kept of the tokens, [B, …, T, …] each; `cached` says whether there is a cache."""
        raise NotImplementedError

    def expand(self, kept: States, context: SequenceContext, cached: bool) -> tuple[Tensor, Tensor]:
        """Keys as they enter the scores, and values, [B, G, S, …]."""
        raise NotImplementedError

    def project(self, x: Tensor, context: SequenceContext, layer: Any) -> tuple[Any, States]:
        """Queries and what is kept; `layer` is the cache's, or None."""
        return self.queries(x, context), self.compress(x, context, layer is not None)

    def attend_as_kept(self, query: Any, kept: States, context: SequenceContext) -> Tensor | None:
        """[B, H, T, W] for a few queries, without expanding; None where that is impossible or gains nothing."""
        return None

    def attend(self, query: Any, kept: States, context: SequenceContext, cached: bool) -> tuple[Tensor, Tensor | None]:
        """[B, H, T, W] for any number of queries, and the weights if materialised."""
        key, value = self.expand(kept, context, cached)
        return dense_attention(self, query, key, value, context, scale=self.scaling, dropout=self.dropout)

    @property
    def dropout(self) -> float:
        """Dropout of attention weights, zero outside training."""
        return self.config.attention_dropout if self.training else 0.0

    def forward(
        self, hidden_states: Tensor, context: SequenceContext, cache: Any = None
    ) -> tuple[Tensor, LayerExtras | None]:
        layer = None if cache is None else cache.layers[self.layer_idx]
        query, kept = self.project(hidden_states, context, layer)
        if layer is not None:
            layer.count(context.keep, context.all_real)
            kept = {name: layer.extend(name, x) for name, x in kept.items()}
        output = self.attend_as_kept(query, kept, context) if are_few(context) else None
        weights = None
        if output is None:
            output, weights = self.attend(query, kept, context, cache is not None)
        return self.o_proj(merge_heads(output)), LayerExtras(weights if context.output_attentions else None)
