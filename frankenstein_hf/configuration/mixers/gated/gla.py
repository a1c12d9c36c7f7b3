"""Spec of `gla`: gated linear attention."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from ...component import ATTENTION_PROJECTIONS, MixerSpec, param
from ...linear import ConvolutionParams, WidthParams, linear_state_floats


@dataclass(frozen=True, kw_only=True)
class GLAParams(WidthParams, ConvolutionParams):
    """Parameters of `gla`. Published checkpoints have expand_k = 0.5."""

    gate_low_rank: int = param(16, "rank of the decay gate's projection", minimum=1)
    gate_normalizer: float = param(16.0, "c in log α = logsigmoid(W x)/c", minimum=1e-3)
    use_short_conv: bool = param(False, "short causal convolution on q, k and v")
    activation: str | None = param(
        None, "of q, k and v; silu by default behind a convolution, else identity", choices=(None, "silu", "identity")
    )

    @classmethod
    def upgraded(cls, values: Mapping[str, Any], version: str) -> Mapping[str, Any]:
        return values

    def resolve(self, config: Any, explicit: frozenset[str]) -> Self:
        default = "silu" if self.use_short_conv else "identity"
        return replace(super().resolve(config, explicit), activation=self.activation or default)


SPECS = (
    MixerSpec(
        name="gla",
        aliases=("gated_linear_attention",),
        family="gated",
        summary="Linear attention with a data-dependent decay per key channel.",
        reference="Gated Linear Attention Transformers with Hardware-Efficient Training, arXiv 2312.06635",
        params=GLAParams,
        implementation="mixers.gated.gla:GatedLinearAttention",
        transfer=ATTENTION_PROJECTIONS,
        cache=frozenset({"state", "tail"}),
        state_size=linear_state_floats,
    ),
)
