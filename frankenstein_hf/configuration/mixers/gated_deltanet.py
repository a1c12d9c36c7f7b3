"""Spec of `gated_deltanet`: the delta rule with a scalar decay per head."""

from dataclasses import dataclass
from typing import Any

from ..component import MixerSpec, Params, param


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetParams(Params):
    """Parameters of `gated_deltanet`."""

    use_short_conv: bool = param(True, "short causal convolution on q, k and v")
    conv_kernel: int = param(4, "taps of the short convolution", minimum=1)
    allow_negative_eigenvalues: bool = param(False, "β in (0, 2) instead of (0, 1)")
    gate: bool = param(True, "SiLU output gate")


def _state_floats(params: GatedDeltaNetParams, config: Any) -> int:
    width = config.num_attention_heads * config.head_dim
    tail = 3 * width * (params.conv_kernel - 1) if params.use_short_conv else 0
    return width * config.head_dim + tail


SPECS = (
    MixerSpec(
        name="gated_deltanet",
        family="gated",
        summary="Error-correcting fast weights with a scalar decay per head.",
        reference="Gated Delta Networks: Improving Mamba2 with Delta Rule, arXiv 2412.06464",
        params=GatedDeltaNetParams,
        implementation="mixers.gated_deltanet:GatedDeltaNet",
        cache=frozenset({"state", "tail"}),
        state_size=_state_floats,
    ),
)
