"""Spec of `sparsek`: differentiable selection of the k best keys."""

from dataclasses import dataclass
from typing import Any

from ...component import ATTENTION_PROJECTIONS, MixerSpec, Params, param
from ..dense.standard import kv_floats


@dataclass(frozen=True, kw_only=True)
class SparseKParams(Params):
    """Parameters of `sparsek`."""

    k: int = param(128, "keys a query may spend, as the sum of their weights m", minimum=1)
    scorer: str = param(
        "key",
        "what the score of a key depends on: itself, so that a dropped key never returns; or on the query too",
        choices=("key", "key_query"),
    )


def _floats(params: SparseKParams, config: Any) -> int:
    return kv_floats(params, config) + config.num_key_value_heads


SPECS = (
    MixerSpec(
        name="sparsek",
        family="sparse",
        summary="Softmax attention to keys chosen by a differentiable top-k whose weights scale the values.",
        reference="Sparser is Faster and Less is More: Efficient Sparse Attention for Long-Range Transformers, "
        "arXiv 2406.16747",
        params=SparseKParams,
        implementation="mixers.sparse.sparsek:SparseKAttention",
        transfer=ATTENTION_PROJECTIONS,
        qk_norm=True,
        cache=frozenset({"kv", "index"}),
        token_size=_floats,
        reach=lambda params: 1,
        small_params={"k": 5},
    ),
)
