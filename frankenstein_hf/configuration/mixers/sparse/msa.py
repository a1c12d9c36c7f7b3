"""Specs of attention to selected blocks of keys: `msa` and `sparda`."""

from dataclasses import dataclass
from typing import Any

from ...component import ATTENTION_PROJECTIONS, MixerSpec, Params, param
from ..dense.standard import kv_floats


@dataclass(frozen=True, kw_only=True)
class BlockParams(Params):
    """Parameters both share."""

    block_size: int = param(128, "keys of a block", minimum=1)
    topk_blocks: int = param(16, "blocks a query attends to, its own included", minimum=1)
    kl_loss_weight: float = param(1.0, "weight of the loss that trains the selection", minimum=0)


@dataclass(frozen=True, kw_only=True)
class MSAParams(BlockParams):
    """Parameters of `msa`."""

    index_dim: int = param(64, "width of index queries and keys", minimum=1)


@dataclass(frozen=True, kw_only=True)
class SparDAParams(BlockParams):
    """Parameters of `sparda`."""

    forecast_dim: int = param(64, "width of forecasts and index keys", minimum=1)
    lookahead: int = param(
        1, "1: the forecast of a layer selects for the next such layer; 0: for itself", choices=(0, 1)
    )

    @property
    def index_dim(self) -> int:
        """Width of index queries and keys."""
        return self.forecast_dim


def _floats(params: Any, config: Any) -> int:
    return kv_floats(params, config) + params.index_dim


COMMON: dict[str, Any] = dict(family="sparse", cache=frozenset({"kv", "index"}), token_size=_floats)

SPECS = (
    MixerSpec(
        name="msa",
        summary="Softmax attention to the blocks of keys that a small trained index selects for each query.",
        reference="MiniMax Sparse Attention, MiniMax-M3",
        params=MSAParams,
        implementation="mixers.sparse.msa:MiniMaxSparseAttention",
        transfer=ATTENTION_PROJECTIONS,
        qk_norm=True,
        reach=lambda params: 1,
        small_params={"block_size": 5, "topk_blocks": 2, "index_dim": 4},
        **COMMON,
    ),
    MixerSpec(
        name="sparda",
        summary="Softmax attention to the blocks of keys that a forecast made in the layer below selects.",
        reference="SparDA: Decoupled Sparse Attention with Forecast projections",
        params=SparDAParams,
        implementation="mixers.sparse.msa:SparDA",
        transfer=ATTENTION_PROJECTIONS,
        qk_norm=True,
        reach=lambda params: 1,
        small_params={"block_size": 5, "topk_blocks": 2, "forecast_dim": 4},
        **COMMON,
    ),
)
