"""The numerical cores as pure functions of tensors; shapes and sources in each docstring."""

from .modeling.ops.consensus import (
    EdgeNetworks,
    Edges,
    Window,
    aligned_edges,
    consensus_energy,
    consensus_gradient,
    edge_weights,
    window_consensus_gradient,
    window_edges,
)
from .modeling.ops.decayed_scan import decayed_scan
from .modeling.ops.delta_rule import delta_rule
from .modeling.ops.fast_weights import channelwise_delta_rule
from .modeling.ops.gaussian_field import apply_band, gaussian_band
from .modeling.ops.lse_merge import merge_partial_softmax
from .modeling.ops.neural_memory import neural_memory
from .modeling.ops.rehearsal import rehearsal_delta_rule, rehearsal_scan
from .modeling.ops.scored_attention import eager_attention, scored_attention
from .modeling.ops.selective_scan import selective_scan
from .modeling.ops.short_convolution import short_convolution
from .modeling.ops.window_attention import window_attention

__all__ = [
    "EdgeNetworks",
    "Edges",
    "Window",
    "aligned_edges",
    "apply_band",
    "channelwise_delta_rule",
    "consensus_energy",
    "consensus_gradient",
    "decayed_scan",
    "delta_rule",
    "eager_attention",
    "edge_weights",
    "gaussian_band",
    "merge_partial_softmax",
    "neural_memory",
    "rehearsal_delta_rule",
    "rehearsal_scan",
    "scored_attention",
    "selective_scan",
    "short_convolution",
    "window_attention",
    "window_consensus_gradient",
    "window_edges",
]
