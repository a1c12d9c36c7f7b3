"""Attention that asks for the order of the tokens: keys, values and what else is cached, without a pad between them.

Shapes: R rows, L row length, S keys of the past and of the row, H heads, G key/value heads, W head width.
"""

from typing import Any

import torch
from torch import Tensor

from ..cache import States
from ..context import Rows
from ..extras import LayerExtras
from ..ops.max_logits import max_logits
from ..positions import apply_rotary
from .base import RowMixer, merge_heads, split_heads
from .dense.standard import StandardAttention


def visible_keys(last: Tensor, num_keys: int) -> Tensor:
    """[R or 1, 1, L, S] True at the keys up to `last` [R or 1, L]."""
    return torch.arange(num_keys, device=last.device) <= last[:, None, :, None]


class RowAttention(RowMixer, StandardAttention):
    """The projections of `standard` on rows of one document each; the cache grows by a stream for each thing kept.

    Attributes:
        rotates: Whether queries and keys get rotary positions.
    """

    rotates = True

    def project(self, x: Tensor, rows: Rows) -> tuple[Tensor, States]:
        """[R, L, D] -> queries [R, L, H, W] and what is kept of the tokens, [R, L, G, W] each or the like."""
        q, k = split_heads(self.q_proj(x), self.num_heads), split_heads(self.k_proj(x), self.num_key_value_heads)
        q, k = self.norm_heads(q, k)
        if self.rotates:
            rotary = rows.rotary(self.head_dim)
            q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
        v = self.v_proj(x).unflatten(-1, (self.num_key_value_heads, -1))
        return q.transpose(1, 2), {"key": k.transpose(1, 2), "value": v}

    def attend(self, query: Tensor, seen: States, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Queries [R, L, H, W], what is kept of all tokens [R, S, …] -> output [R, H, L, W], weights [R, H, L, S]."""
        raise NotImplementedError

    def gather(self, output: Tensor, x: Tensor) -> Tensor:
        """Output of the heads [R, H, L, W] and input [R, L, D] -> output [R, L, D]."""
        return self.o_proj(merge_heads(output))

    def mix(self, x: Tensor, rows: Rows, layer: Any) -> tuple[Tensor, LayerExtras | None]:
        query, new = self.project(x, rows)
        seen = remember(new, rows, layer)
        output, weights = self.attend(query, seen, rows)
        largest = self.max_logits(query, new["key"], rows) if rows.context.output_max_logits else None
        return self.gather(output, x), LayerExtras(weights, max_logits=largest)

    def is_eager(self, rows: Rows) -> bool:
        """Whether to materialise the scores: for reading, single tokens, whose scores are one row, and dropout."""
        return rows.context.backend == "eager" or rows.size == 1 or self.dropout > 0

    @property
    def dropout(self) -> float:
        """Dropout of attention weights, zero outside training."""
        return self.config.attention_dropout if self.training else 0.0

    def last_keys(self, rows: Rows) -> Tensor:
        """[R or 1, L] place of the last key each token sees."""
        if rows.is_causal:
            return rows.positions
        end = rows.positions.new_full((1,), rows.size) if rows.lengths is None else rows.lengths
        return (end - 1)[:, None].expand(-1, rows.size)

    def max_logits(self, query: Tensor, key: Tensor, rows: Rows) -> Tensor:
        """[H] largest logits within the rows."""
        last, keep = self.last_keys(rows), rows.keep

        def visible(queries: slice, keys: slice) -> Tensor:
            seen = torch.arange(keys.start, keys.stop, device=last.device) <= last[:, None, queries, None]
            return seen if keep is None else seen & keep[:, None, queries, None]

        return max_logits(query.transpose(1, 2), key.transpose(1, 2), visible, scale=self.scaling)


def remember(new: States, rows: Rows, layer: Any) -> States:
    """Add what is kept of these tokens to the cache.

    Args:
        new: Tensors [R, L, …].
        rows: The rows they are of.
        layer: A `MixerKVLayer`, or None without a cache.

    Returns:
        The same tensors [R, S, …] of all tokens seen, real ones first and in order.
    """
    if layer is None:
        return new
    context, seen = rows.context, {}
    layer.count(context.keep, context.all_real)
    order = None if layer.keep is None else torch.argsort(~layer.keep, dim=1, stable=True)
    for name, x in new.items():
        whole = layer.extend(name, context.restore([x]).flatten(2))
        if order is not None:
            whole = whole.gather(1, order[..., None].expand(-1, -1, whole.shape[2]))
        seen[name] = whole.unflatten(2, x.shape[2:])
    return seen
