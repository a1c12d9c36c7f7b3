"""Spec of `retnet`: retention."""

from dataclasses import dataclass
from typing import Any

from ..component import MixerSpec, Params, param


@dataclass(frozen=True, kw_only=True)
class RetNetParams(Params):
    """Parameters of `retnet`."""

    gate: bool = param(True, "SiLU output gate")
    rotary: bool = param(True, "rotate q and k by their positions")


def _state_floats(params: RetNetParams, config: Any) -> int:
    return config.num_attention_heads * config.head_dim**2


SPECS = (
    MixerSpec(
        name="retnet",
        aliases=("retention",),
        family="recurrent",
        summary="Multi-scale retention: linear attention with a fixed decay per head.",
        reference="Retentive Network: A Successor to Transformer for Large Language Models, arXiv 2307.08621",
        params=RetNetParams,
        implementation="mixers.retnet:Retention",
        cache=frozenset({"state"}),
        state_size=_state_floats,
    ),
)
