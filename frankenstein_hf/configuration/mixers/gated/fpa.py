"""Spec of `fpa`: softmax attention that forgets a key by the deepest dip since it was written."""

from dataclasses import dataclass
from typing import Any

from ...component import ATTENTION_PROJECTIONS, MixerSpec, Params, param
from ..dense.standard import kv_floats


@dataclass(frozen=True, kw_only=True)
class FirstPassageParams(Params):
    """Parameters of `fpa`."""

    temperature: float = param(1.0, "of the soft minimum whose gradient takes the hard one's place", minimum=1e-3)
    eviction_threshold: float | None = param(
        None, "outside training, leave out keys whose bias has fallen below its negative; none by default", minimum=0
    )


def _floats(params: FirstPassageParams, config: Any) -> int:
    return kv_floats(params, config) + 3 * config.num_attention_heads


SPECS = (
    MixerSpec(
        name="fpa",
        family="gated",
        summary="Softmax attention that forgets a key by the deepest dip of a learned field since it was written.",
        reference="First Passage Attention",
        params=FirstPassageParams,
        implementation="mixers.gated.fpa:FirstPassageAttention",
        transfer=ATTENTION_PROJECTIONS,
        qk_norm=True,
        cache=frozenset({"kv"}),
        token_size=_floats,
        gradient="surrogate",
        logits=("q_proj", "k_proj"),
    ),
)
