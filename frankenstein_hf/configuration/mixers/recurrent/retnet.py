"""Spec of `retnet`: retention."""

from dataclasses import dataclass

from ...component import ATTENTION_PROJECTIONS, MixerSpec, param
from ...linear import WidthParams, linear_state_floats


@dataclass(frozen=True, kw_only=True)
class RetNetParams(WidthParams):
    """Parameters of `retnet`. The paper's models have expand_v = 2."""

    gate: bool = param(True, "SiLU output gate")
    rotary: bool = param(True, "rotate q and k by their positions")


SPECS = (
    MixerSpec(
        name="retnet",
        aliases=("retention",),
        family="recurrent",
        summary="Multi-scale retention: linear attention with a fixed decay per head.",
        reference="Retentive Network: A Successor to Transformer for Large Language Models, arXiv 2307.08621",
        params=RetNetParams,
        implementation="mixers.recurrent.retnet:Retention",
        transfer=ATTENTION_PROJECTIONS,
        cache=frozenset({"state"}),
        state_size=linear_state_floats,
    ),
)
