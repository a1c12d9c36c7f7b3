"""Spec of `probsparse`: full attention for the queries that need it."""

from dataclasses import dataclass
from typing import Any

from ...component import ATTENTION_PROJECTIONS, MixerSpec, Params, param
from ..dense.standard import kv_floats


@dataclass(frozen=True, kw_only=True)
class ProbSparseParams(Params):
    """Parameters of `probsparse`."""

    factor_keys: float = param(5.0, "c₁: an encoder measures queries on c₁⌈ln L⌉ sampled keys", minimum=1e-3)
    factor_queries: float = param(5.0, "c₂: and c₂⌈ln L⌉ queries attend, the others read the mean value", minimum=1e-3)
    relative: bool = param(True, "score positions by projected sinusoids and learned biases instead of rotation")


def _floats(params: ProbSparseParams, config: Any) -> int:
    return kv_floats(params, config) + (config.num_attention_heads if params.relative else 0)


SPECS = (
    MixerSpec(
        name="probsparse",
        family="sparse",
        summary="Softmax attention of the queries whose distribution is farthest from uniform; a decoder's all attend.",
        reference="Informer, arXiv 2012.07436, with the relative positions of Deep Sparse Conformer, arXiv 2209.00260",
        params=ProbSparseParams,
        implementation="mixers.sparse.probsparse:ProbSparseAttention",
        transfer=ATTENTION_PROJECTIONS,
        qk_norm=True,
        cache=frozenset({"kv"}),
        token_size=_floats,
        small_params={"factor_keys": 1.5, "factor_queries": 1.5},
        reach=lambda params: 1,
    ),
)
