"""Spec of `conformer`: attention and a convolution between two feed-forward blocks, the second of them the layer's."""

from dataclasses import dataclass, replace
from typing import Any, Self

from ...component import ATTENTION_PROJECTIONS, MixerSpec, Params, param
from ..dense.standard import kv_floats


@dataclass(frozen=True, kw_only=True)
class ConformerParams(Params):
    """Parameters of `conformer`."""

    kernel_size: int = param(32, "taps of the depthwise convolution", minimum=1)
    macaron: bool = param(True, "a feed-forward block in front of the attention")
    half_step: bool = param(True, "add half of what that block returns, as the original does")
    ffn_size: int | None = param(None, "its inner width; four times the model's by default", minimum=1)
    position: str = param(
        "relative", "sinusoids of the distance in the scores, rotary positions, or none",
        choices=("relative", "rope", "none"),
    )  # fmt: skip
    conv_norm: str = param(
        "layer",
        "norm behind the convolution: over a token's channels, over each head's share of them, or, in an encoder, over "
        "all real tokens of a batch",
        choices=("layer", "group", "batch"),
    )

    @property
    def ahead(self) -> int:
        """Tokens the centred convolution of an encoder looks ahead at."""
        return self.kernel_size - 1 - self.kernel_size // 2

    def resolve(self, config: Any, explicit: frozenset[str]) -> Self:
        if self.conv_norm == "group" and config.hidden_size % config.num_attention_heads:
            raise ValueError(
                f"conv_norm='group' cuts hidden_size={config.hidden_size} into num_attention_heads="
                f"{config.num_attention_heads} equal parts, which is impossible; use 'layer'."
            )
        return replace(self, ffn_size=4 * config.hidden_size) if self.ffn_size is None else self


SPECS = (
    MixerSpec(
        name="conformer",
        family="convolutional",
        summary="Softmax attention with relative positions, followed by a gated depthwise convolution.",
        reference="Conformer: Convolution-augmented Transformer for Speech Recognition, arXiv 2005.08100",
        params=ConformerParams,
        implementation="mixers.convolutional.conformer:ConformerMixer",
        transfer=ATTENTION_PROJECTIONS,
        cache=frozenset({"kv", "tail"}),
        state_size=lambda params, config: (params.kernel_size - 1) * config.hidden_size,
        token_size=kv_floats,
        takes_residual=True,
        small_params={"kernel_size": 4, "ffn_size": 12},
    ),
)
