"""Spec of `kda`: the delta rule with a decay per key channel."""

from dataclasses import dataclass, replace
from typing import Any, Self

from ...component import ATTENTION_PROJECTIONS, MixerSpec, param
from ...linear import linear_state_floats
from .deltanet import DeltaNetParams


@dataclass(frozen=True, kw_only=True)
class KDAParams(DeltaNetParams):
    """Parameters of `kda`."""

    gate_low_rank: int | None = param(
        None, "rank of the decay's and the output gate's maps; head_dim by default", minimum=1
    )
    gate: bool = param(True, "output gate")
    gate_activation: str = param("sigmoid", "of the output gate: as published, or silu", choices=("sigmoid", "silu"))

    def resolve(self, config: Any, explicit: frozenset[str]) -> Self:
        return replace(super().resolve(config, explicit), gate_low_rank=self.gate_low_rank or config.head_dim)


SPECS = (
    MixerSpec(
        name="kda",
        aliases=("kimi_delta_attention", "kimi_linear"),
        family="gated",
        summary="Kimi Delta Attention: the delta rule with a data-dependent decay per key channel.",
        reference="Kimi Linear: An Expressive, Efficient Attention Architecture, arXiv 2510.26692",
        params=KDAParams,
        implementation="mixers.gated.kda:KimiDeltaAttention",
        transfer=ATTENTION_PROJECTIONS,
        cache=frozenset({"state", "tail"}),
        state_size=linear_state_floats,
    ),
)
