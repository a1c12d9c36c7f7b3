"""Spec of `gated_deltanet`: the delta rule with a scalar decay per head."""

from dataclasses import dataclass

from ...component import ATTENTION_PROJECTIONS, MixerSpec, param
from ...linear import linear_state_floats
from .deltanet import DeltaNetParams


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetParams(DeltaNetParams):
    """Parameters of `gated_deltanet`."""

    gate: bool = param(True, "SiLU output gate")


SPECS = (
    MixerSpec(
        name="gated_deltanet",
        aliases=("gdn",),
        family="gated",
        summary="Error-correcting fast weights with a scalar decay per head.",
        reference="Gated Delta Networks: Improving Mamba2 with Delta Rule, arXiv 2412.06464",
        params=GatedDeltaNetParams,
        implementation="mixers.gated.gated_deltanet:GatedDeltaNet",
        transfer=ATTENTION_PROJECTIONS,
        cache=frozenset({"state", "tail"}),
        state_size=linear_state_floats,
    ),
)
