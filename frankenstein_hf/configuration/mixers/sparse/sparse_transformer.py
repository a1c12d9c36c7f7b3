"""Spec of `sparse_transformer`: strided and fixed factorised attention."""

import math
from dataclasses import dataclass, replace
from typing import Any, Self

from ...component import ATTENTION_PROJECTIONS, MixerSpec, Params, param
from ..dense.standard import kv_floats


@dataclass(frozen=True, kw_only=True)
class SparseTransformerParams(Params):
    """Parameters of `sparse_transformer`."""

    stride: int = param(0, "l; 0: ⌊√max_position_embeddings⌋", minimum=0)
    summary_columns: int = param(1, "last positions of a block of l that later blocks see (fixed)", minimum=1)
    mode: str = param(
        "mixed",
        "strided: the last l keys and every l-th; fixed: the own block and the summaries; mixed: half the heads each",
        choices=("mixed", "strided", "fixed"),
    )

    def resolve(self, config: Any, explicit: frozenset[str]) -> Self:
        stride = self.stride or max(1, math.isqrt(config.max_position_embeddings))
        if self.summary_columns > stride:
            raise ValueError(f"summary_columns={self.summary_columns} must be at most stride={stride}.")
        return replace(self, stride=stride)


SPECS = (
    MixerSpec(
        name="sparse_transformer",
        family="sparse",
        summary="Softmax attention to the last l keys and every l-th, or to the own block and block summaries.",
        reference="Generating Long Sequences with Sparse Transformers, arXiv 1904.10509",
        params=SparseTransformerParams,
        implementation="mixers.sparse.sparse_transformer:SparseTransformer",
        transfer=ATTENTION_PROJECTIONS,
        qk_norm=True,
        cache=frozenset({"kv"}),
        token_size=kv_floats,
        parameter_free=lambda params: True,
        logits=("q_proj", "k_proj"),
        reach=lambda params: 1,
        small_params={"stride": 4},
    ),
)
