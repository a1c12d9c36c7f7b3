"""Spec of `gated_deltanet2`: the delta rule with gates per channel for erasing and for writing."""

from dataclasses import dataclass

from ...component import ATTENTION_PROJECTIONS, MixerSpec
from ...linear import linear_state_floats
from .kda import KDAParams


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet2Params(KDAParams):
    """Parameters of `gated_deltanet2`."""


SPECS = (
    MixerSpec(
        name="gated_deltanet2",
        family="gated",
        summary="The delta rule with gates per channel: one erases along the keys, one writes along the values.",
        reference="Gated DeltaNet-2: Decoupling Erase and Write in Linear Attention, arXiv 2605.22791",
        params=GatedDeltaNet2Params,
        implementation="mixers.gated.gated_deltanet2:GatedDeltaNet2",
        transfer=ATTENTION_PROJECTIONS,
        cache=frozenset({"state", "tail"}),
        state_size=linear_state_floats,
    ),
)
