"""Spec of `mta`: attention whose scores are convolved over queries, keys and heads."""

from dataclasses import dataclass, replace
from typing import Any, Self

from transformers.utils import logging

from ...component import ATTENTION_PROJECTIONS, MixerSpec, Params, param
from .standard import kv_floats

logger = logging.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class MultiTokenParams(Params):
    """Parameters of `mta`."""

    query_kernel: int = param(6, "queries a score looks back at, its own included", minimum=1)
    key_kernel: int = param(11, "keys around a score's own", minimum=1)
    head_kernel: int = param(2, "heads whose weights are mixed, in groups", minimum=1)
    pre_softmax: bool = param(True, "convolve the logits")
    post_softmax: bool = param(True, "convolve the weights")
    group_norm: bool = param(True, "normalise the output of each group of heads, and gate every head by a scalar")

    @property
    def tail(self) -> int:
        """Earlier queries that are needed for the weights of a token."""
        return (self.query_kernel - 1) * (self.pre_softmax + self.post_softmax)

    def resolve(self, config: Any, explicit: frozenset[str]) -> Self:
        heads = config.num_attention_heads
        if heads % self.head_kernel == 0:
            return self
        if "head_kernel" in explicit:
            raise ValueError(f"head_kernel={self.head_kernel} must divide num_attention_heads={heads}.")
        largest = max(n for n in range(1, self.head_kernel + 1) if heads % n == 0)
        logger.debug("mta: head_kernel shrinks to %d to divide num_attention_heads=%d", largest, heads)
        return replace(self, head_kernel=largest)


SPECS = (
    MixerSpec(
        name="mta",
        family="dense",
        summary="Softmax attention whose scores are convolved over neighbouring queries, keys and heads.",
        reference="Multi-Token Attention, arXiv 2504.00927",
        params=MultiTokenParams,
        implementation="mixers.dense.mta:MultiTokenAttention",
        transfer=ATTENTION_PROJECTIONS,
        qk_norm=True,
        cache=frozenset({"kv", "tail"}),
        state_size=lambda params, config: params.tail * config.num_attention_heads * config.head_dim,
        token_size=kv_floats,
        small_params={"query_kernel": 3, "key_kernel": 4},
    ),
)
