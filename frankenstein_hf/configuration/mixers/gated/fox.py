"""Spec of `fox`: softmax attention with a forget gate."""

from dataclasses import dataclass
from typing import Any, Self

from ...component import ATTENTION_PROJECTIONS, MixerSpec, Params, param
from ..dense.standard import kv_floats


@dataclass(frozen=True, kw_only=True)
class FoXParams(Params):
    """Parameters of `fox`."""

    output_gate: bool = param(False, "gate the heads' output by a sigmoid of the token")
    qk_norm: bool = param(False, "RMS-normalise every head's queries and keys, with learned gains")

    def resolve(self, config: Any, explicit: frozenset[str]) -> Self:
        if self.qk_norm and config.qk_norm != "none":
            raise ValueError(f"parameter 'qk_norm' and the model's qk_norm={config.qk_norm!r} are one thing; give one.")
        return self


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
        transfer=ATTENTION_PROJECTIONS,
        qk_norm=True,
        cache=frozenset({"kv"}),
        token_size=_floats,
        logits=("q_proj", "k_proj"),
    ),
)
