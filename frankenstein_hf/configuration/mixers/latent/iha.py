"""Spec of `iha`: every head attends by several mixtures of all heads."""

from dataclasses import dataclass, replace
from typing import Any, Self

from ...component import ATTENTION_PROJECTIONS, MixerSpec, Params, param
from ..dense.standard import kv_floats


@dataclass(frozen=True, kw_only=True)
class IHAParams(Params):
    """Parameters of `iha`."""

    num_pseudo_heads: int | None = param(
        None, "pseudo-heads P of each head, whose outputs are averaged; as many as heads by default", minimum=1
    )
    init_noise: float = param(
        0.02,
        "spread of the mixtures around each head itself at first; without any they would stay alike",
        minimum=0.0,
        maximum=10.0,
    )

    def resolve(self, config: Any, explicit: frozenset[str]) -> Self:
        return replace(self, num_pseudo_heads=self.num_pseudo_heads or config.num_attention_heads)


SPECS = (
    MixerSpec(
        name="iha",
        family="latent",
        summary="Softmax attention of pseudo-heads, learned mixtures of all heads, averaged for each head.",
        reference="Interleaved Head Attention, arXiv 2602.21371",
        params=IHAParams,
        implementation="mixers.latent.iha:InterleavedHeadAttention",
        transfer=ATTENTION_PROJECTIONS,
        cache=frozenset({"kv"}),
        token_size=kv_floats,
        native_mask=True,
        small_params={"num_pseudo_heads": 3, "init_noise": 0.3},
    ),
)
