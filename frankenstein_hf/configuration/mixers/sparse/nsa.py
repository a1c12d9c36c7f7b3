"""Spec of `nsa`: compressed, selected and local keys."""

from dataclasses import dataclass
from typing import Any, Self

from ...component import ATTENTION_PROJECTIONS, MixerSpec, Params, param
from ..dense.standard import kv_floats


@dataclass(frozen=True, kw_only=True)
class NSAParams(Params):
    """Parameters of `nsa`."""

    block_size: int = param(32, "keys that one compressed key stands for", minimum=1)
    stride: int = param(16, "keys between the beginnings of two compressed ones", minimum=1)
    select_block: int = param(64, "keys of a block that can be selected", minimum=1)
    num_selected: int = param(16, "blocks a query selects, the first and the two nearest included", minimum=3)
    window_size: int = param(512, "keys of the local branch: the last ones, or half to either side", minimum=1)

    def resolve(self, config: Any, explicit: frozenset[str]) -> Self:
        for name in ("block_size", "select_block"):
            if getattr(self, name) % self.stride:
                raise ValueError(f"{name}={getattr(self, name)} must be a multiple of stride={self.stride}.")
        return self


def _floats(params: NSAParams, config: Any) -> float:
    return kv_floats(params, config) * (1 + 1 / params.stride)


SPECS = (
    MixerSpec(
        name="nsa",
        family="sparse",
        summary="Softmax attention to compressed keys, to the blocks these select, and to a window, gated.",
        reference="Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention, arXiv 2502.11089",
        params=NSAParams,
        implementation="mixers.sparse.nsa:NativeSparseAttention",
        transfer=ATTENTION_PROJECTIONS,
        qk_norm=True,
        cache=frozenset({"kv", "latent"}),
        token_size=_floats,
        reach=lambda params: 1,
        small_params={"block_size": 4, "stride": 2, "select_block": 4, "num_selected": 4, "window_size": 3},
    ),
)
