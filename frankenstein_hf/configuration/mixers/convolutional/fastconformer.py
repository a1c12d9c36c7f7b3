"""Spec of `fastconformer`: a window and a few global tokens at the head of the sequence."""

from dataclasses import dataclass
from typing import Any

from ...component import ATTENTION_PROJECTIONS, MixerSpec, Params, param


@dataclass(frozen=True, kw_only=True)
class FastConformerParams(Params):
    """Parameters of `fastconformer`."""

    window_size: int = param(256, "tokens of the window: half to either side of a query", minimum=2)
    global_tokens: int = param(1, "leading tokens that see, and are seen by, all", minimum=0, maximum=2**16)
    global_tokens_spacing: int = param(1, "steps from one of them to the next", minimum=1, maximum=4096)
    global_attn_separate: bool = param(False, "compute what global tokens see and show with projections of their own")

    @property
    def side(self) -> int:
        """How far a query sees to either side."""
        return self.window_size // 2

    @property
    def positions(self) -> tuple[int, ...]:
        """𝒢, the positions of the global tokens."""
        return tuple(range(0, self.global_tokens * self.global_tokens_spacing, self.global_tokens_spacing))

    @property
    def head(self) -> int:
        """Leading tokens up to and with the last global one."""
        return self.positions[-1] + 1 if self.global_tokens else 0


def _ring_floats(params: FastConformerParams, config: Any) -> int:
    tokens = params.head * (2 if params.global_attn_separate else 1) + params.side
    return 2 * tokens * config.num_key_value_heads * config.head_dim


SPECS = (
    MixerSpec(
        name="fastconformer",
        family="convolutional",
        summary="Limited-context softmax attention with global tokens at the head of the sequence.",
        reference="Fast Conformer with Linearly Scalable Attention for Efficient Speech Recognition, arXiv 2305.05084",
        params=FastConformerParams,
        implementation="mixers.convolutional.fastconformer:FastConformerAttention",
        transfer=ATTENTION_PROJECTIONS,
        cache=frozenset({"ring"}),
        state_size=_ring_floats,
        parameter_free=lambda params: False,  # what it keeps is bounded: no growing cache of another model fits it
        reach=lambda params: params.side,
        small_params={"window_size": 6, "global_tokens": 2, "global_tokens_spacing": 3},
    ),
)
