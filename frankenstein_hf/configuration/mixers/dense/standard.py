"""Specs of softmax attention over all visible tokens: `standard` and `gqa`."""

from dataclasses import dataclass, replace
from typing import Any, Self

from ...component import ATTENTION_PROJECTIONS, MixerSpec, Params, param


@dataclass(frozen=True, kw_only=True)
class StandardParams(Params):
    """`standard` has no parameters of its own: heads and key/value heads come from the config."""


@dataclass(frozen=True, kw_only=True)
class GQAParams(Params):
    """Parameters of `gqa`."""

    num_key_value_heads: int | None = param(
        None,
        "key/value heads; the config's if below the number of heads, else the largest divisor ≤ heads/4",
        minimum=1,
    )

    def resolve(self, config: Any, explicit: frozenset[str]) -> Self:
        heads = config.num_attention_heads
        groups = self.num_key_value_heads
        if groups is None:
            groups = config.num_key_value_heads
            if groups >= heads:
                groups = max((n for n in range(1, heads // 4 + 1) if heads % n == 0), default=1)
        if heads % groups:
            raise ValueError(f"num_key_value_heads={groups} must divide num_attention_heads={heads}.")
        return replace(self, num_key_value_heads=groups)


def kv_floats(params: Any, config: Any) -> int:
    """Keys and values one token adds to the cache."""
    return 2 * (getattr(params, "num_key_value_heads", None) or config.num_key_value_heads) * config.head_dim


SPECS = (
    MixerSpec(
        name="standard",
        aliases=("attention", "full_attention", "softmax", "softmax_attention", "self_attention", "mha", "transformer"),
        family="dense",
        summary="Softmax multi-head attention.",
        reference="Attention Is All You Need, arXiv 1706.03762",
        params=StandardParams,
        implementation="mixers.dense.standard:StandardAttention",
        transfer=ATTENTION_PROJECTIONS,
        qk_norm=True,
        cache=frozenset({"kv"}),
        token_size=kv_floats,
        parameter_free=lambda params: True,
        native_mask=True,
        logits=("q_proj", "k_proj"),
    ),
    MixerSpec(
        name="gqa",
        aliases=("grouped_query_attention", "mqa"),
        family="dense",
        summary="Softmax attention whose query heads share key/value heads in groups.",
        reference="GQA: Training Generalized Multi-Query Transformer Models, arXiv 2305.13245",
        params=GQAParams,
        implementation="mixers.dense.standard:GroupedQueryAttention",
        transfer=ATTENTION_PROJECTIONS,
        qk_norm=True,
        cache=frozenset({"kv"}),
        token_size=kv_floats,
        parameter_free=lambda params: True,
        native_mask=True,
        logits=("q_proj", "k_proj"),
    ),
)
