"""Spec of `deltanet`: the delta rule."""

from dataclasses import dataclass

from ...component import ATTENTION_PROJECTIONS, MixerSpec, param
from ...linear import ConvolutionParams, WidthParams, linear_state_floats


@dataclass(frozen=True, kw_only=True)
class DeltaNetParams(WidthParams, ConvolutionParams):
    """Parameters of `deltanet`."""

    allow_negative_eigenvalues: bool = param(False, "what erases in (0, 2) instead of (0, 1)")


SPECS = (
    MixerSpec(
        name="deltanet",
        family="gated",
        summary="Error-correcting fast weights: each write replaces what its key had stored.",
        reference="Parallelizing Linear Transformers with the Delta Rule over Sequence Length, arXiv 2406.06484",
        params=DeltaNetParams,
        implementation="mixers.gated.deltanet:DeltaNet",
        transfer=ATTENTION_PROJECTIONS,
        cache=frozenset({"state", "tail"}),
        state_size=linear_state_floats,
    ),
)
