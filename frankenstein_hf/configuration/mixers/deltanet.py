"""Spec of `deltanet`: the delta rule."""

from dataclasses import dataclass
from typing import Any

from ..component import MixerSpec, Params, param


@dataclass(frozen=True, kw_only=True)
class DeltaNetParams(Params):
    """Parameters of `deltanet`."""

    use_short_conv: bool = param(True, "short causal convolution with SiLU on q, k and v")
    conv_kernel: int = param(4, "taps of the short convolution", minimum=1, maximum=1024)
    allow_negative_eigenvalues: bool = param(False, "what erases in (0, 2) instead of (0, 1)")


def delta_state_floats(params: Any, config: Any) -> int:
    """A K×V matrix per head and the convolution's tail; the same for all mixers of the delta rule."""
    width = config.num_attention_heads * config.head_dim
    tail = 3 * width * (params.conv_kernel - 1) if params.use_short_conv else 0
    return width * config.head_dim + tail


SPECS = (
    MixerSpec(
        name="deltanet",
        family="gated",
        summary="Error-correcting fast weights: each write replaces what its key had stored.",
        reference="Parallelizing Linear Transformers with the Delta Rule over Sequence Length, arXiv 2406.06484",
        params=DeltaNetParams,
        implementation="mixers.deltanet:DeltaNet",
        cache=frozenset({"state", "tail"}),
        state_size=delta_state_floats,
    ),
)
