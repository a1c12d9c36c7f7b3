"""The numerical cores as pure functions of tensors; shapes and sources in each docstring."""

from .modeling.ops.decayed_scan import decayed_scan
from .modeling.ops.delta_rule import delta_rule
from .modeling.ops.lse_merge import merge_partial_softmax
from .modeling.ops.scored_attention import eager_attention, scored_attention
from .modeling.ops.selective_scan import selective_scan
from .modeling.ops.short_convolution import short_convolution
from .modeling.ops.window_attention import window_attention

__all__ = [
    "decayed_scan",
    "delta_rule",
    "eager_attention",
    "merge_partial_softmax",
    "scored_attention",
    "selective_scan",
    "short_convolution",
    "window_attention",
]
