"""Spec of `fox`: softmax attention with a forget gate."""

from dataclasses import dataclass
from typing import Any

from ...component import MixerSpec, Params, param
from ..dense.standard import kv_floats


@dataclass(frozen=True, kw_only=True)
class FoXParams(Params):
    """Parameters of `fox`."""

    output_gate: bool = param(False, "gate the heads' output by a sigmoid of the token")
    qk_norm: bool = param(False, "RMS-normalise every head's queries and keys, with learned gains")


def _floats(params: FoXParams, config: Any) -> int:
    return kv_floats(params, config) + config.num_attention_heads


SPECS = (
    MixerSpec(
        name="fox",
        family="gated",
        summary="Softmax attention whose logits fall with the forget gates passed since a key.",
        reference="Forgetting Transformer: Softmax Attention with a Forget Gate, arXiv 2503.02130",
        params=FoXParams,
        implementation="mixers.gated.fox:ForgettingAttention",
        cache=frozenset({"kv"}),
        token_size=_floats,
        logits=("q_proj", "k_proj"),
    ),
)
