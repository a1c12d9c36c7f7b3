"""Spec of `longformer`: windowed attention with global tokens."""

from dataclasses import dataclass
from typing import Any

from ...component import ATTENTION_PROJECTIONS, MixerSpec, Params, param
from ..dense.standard import kv_floats


@dataclass(frozen=True, kw_only=True)
class LongformerParams(Params):
    """Parameters of `longformer`."""

    window_size: int = param(256, "tokens of the window: half to either side of a query", minimum=1)
    dilation: int = param(0, "positions skipped between two keys of the window", minimum=0)
    global_tokens: tuple[int, ...] = param((0,), "positions that see, and are seen by, all", minimum=0)
    separate_global: bool = param(False, "compute what global tokens see with projections of their own")

    @property
    def side(self) -> int:
        """How far a query sees to either side."""
        return self.window_size // 2 * (self.dilation + 1)


def _kv_floats(params: LongformerParams, config: Any) -> int:
    return kv_floats(params, config) * (2 if params.separate_global else 1)


SPECS = (
    MixerSpec(
        name="longformer",
        family="sparse",
        summary="Sliding-window softmax attention with global tokens, dilated if wished.",
        reference="Longformer: The Long-Document Transformer, arXiv 2004.05150",
        params=LongformerParams,
        implementation="mixers.sparse.longformer:Longformer",
        transfer=ATTENTION_PROJECTIONS,
        qk_norm=True,
        cache=frozenset({"kv"}),
        token_size=_kv_floats,
        parameter_free=lambda params: not params.separate_global,
        logits=("q_proj", "k_proj"),
        reach=lambda params: params.side,
        small_params={"window_size": 6, "global_tokens": [0, 3]},
    ),
)
