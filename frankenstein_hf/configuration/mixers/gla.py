"""Spec of `gla`: gated linear attention."""

from dataclasses import dataclass
from typing import Any

from ..component import MixerSpec, Params, param


@dataclass(frozen=True, kw_only=True)
class GLAParams(Params):
    """Parameters of `gla`."""

    gate_low_rank: int = param(16, "rank of the decay gate's projection", minimum=1)
    gate_normalizer: float = param(16.0, "c in log α = logsigmoid(W x)/c", minimum=1e-3)
    use_short_conv: bool = param(False, "short causal convolution on q, k and v")
    conv_kernel: int = param(4, "taps of the short convolution", minimum=1, maximum=1024)


def _state_floats(params: GLAParams, config: Any) -> int:
    width = config.num_attention_heads * config.head_dim
    tail = 3 * width * (params.conv_kernel - 1) if params.use_short_conv else 0
    return width * config.head_dim + tail


SPECS = (
    MixerSpec(
        name="gla",
        aliases=("gated_linear_attention",),
        family="gated",
        summary="Linear attention with a data-dependent decay per key channel.",
        reference="Gated Linear Attention Transformers with Hardware-Efficient Training, arXiv 2312.06635",
        params=GLAParams,
        implementation="mixers.gla:GatedLinearAttention",
        cache=frozenset({"state", "tail"}),
        state_size=_state_floats,
    ),
)
