"""Spec of `rglru`: the recurrent block of Griffin with its real-gated linear recurrent unit."""

from dataclasses import dataclass, replace
from typing import Any, Self

from ...component import MixerSpec, Params, param


@dataclass(frozen=True, kw_only=True)
class RGLRUParams(Params):
    """Parameters of `rglru`. `full_first_write` and gates with as many blocks as heads are RecurrentGemma's."""

    lru_width: int | None = param(
        None, "channels of the recurrence; by default 4/3 of hidden_size, rounded to a multiple of the heads", minimum=1
    )
    conv_kernel: int = param(4, "taps of the short convolution", minimum=1)
    decay_scale: float = param(8.0, "c in a_t = σ(−Λ)^(c·r_t)", minimum=1e-3)
    full_first_write: bool = param(False, "write a document's first token without the factor √(1 − a²)")

    def resolve(self, config: Any, explicit: frozenset[str]) -> Self:
        heads = config.num_attention_heads
        width = self.lru_width or max(1, round(4 * config.hidden_size / 3 / heads)) * heads
        if width % heads:
            raise ValueError(f"lru_width={width} must be a multiple of num_attention_heads={heads}.")
        return replace(self, lru_width=width)


SPECS = (
    MixerSpec(
        name="rglru",
        family="recurrent",
        summary="Griffin's gated linear recurrence: every channel is one number that decays by a gate.",
        reference="Griffin: Mixing Gated Linear Recurrences with Local Attention for Efficient Language Models, "
        "arXiv 2402.19427",
        params=RGLRUParams,
        implementation="mixers.recurrent.rglru:RGLRU",
        cache=frozenset({"state", "tail"}),
        state_size=lambda params, config: params.lru_width * params.conv_kernel,
    ),
)
