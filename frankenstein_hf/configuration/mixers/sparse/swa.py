"""Spec of `swa`: sliding-window attention with attention sinks."""

from dataclasses import dataclass, replace
from typing import Any, Self

from transformers.utils import logging

from ...component import ATTENTION_PROJECTIONS, MixerSpec, Params, param

logger = logging.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class SWAParams(Params):
    """Parameters of `swa`."""

    window_size: int = param(256, "keys a causal query sees at most, sinks included", minimum=1)
    num_sinks: int = param(4, "first tokens of a document that stay visible", minimum=0)

    @property
    def reach(self) -> int:
        """Keys of the sliding part: w − s."""
        return self.window_size - self.num_sinks

    def resolve(self, config: Any, explicit: frozenset[str]) -> Self:
        if self.num_sinks < self.window_size:
            return self
        if "num_sinks" in explicit:
            raise ValueError(f"num_sinks={self.num_sinks} must be below window_size={self.window_size}.")
        logger.debug("swa: num_sinks shrinks to %d to fit window_size=%d", self.window_size - 1, self.window_size)
        return replace(self, num_sinks=self.window_size - 1)


def _ring_floats(params: SWAParams, config: Any) -> int:
    return 2 * params.window_size * config.num_key_value_heads * config.head_dim


SPECS = (
    MixerSpec(
        name="swa",
        aliases=(
            "sliding_window",
            "sliding_window_attention",
            "sliding_attention",
            "local",
            "local_attention",
            "window_attention",
        ),
        family="sparse",
        summary="Sliding-window softmax attention with attention sinks.",
        reference="Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453",
        params=SWAParams,
        implementation="mixers.sparse.swa:SlidingWindowAttention",
        transfer=ATTENTION_PROJECTIONS,
        qk_norm=True,
        cache=frozenset({"ring"}),
        state_size=_ring_floats,
        parameter_free=lambda params: True,
        logits=("q_proj", "k_proj"),
        reach=lambda params: params.reach // 2,
        small_params={"window_size": 6, "num_sinks": 2},
    ),
)
