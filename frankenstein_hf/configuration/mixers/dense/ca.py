"""Spec of `ca`: attention as an integral over a continuous line of keys and values."""

from dataclasses import dataclass

from ...component import ATTENTION_PROJECTIONS, MixerSpec, Params, param
from .sigmoid import check_learned
from .standard import kv_floats


@dataclass(frozen=True, kw_only=True)
class ContinuumParams(Params):
    """Parameters of `ca`."""

    gain: str | float = param(
        "learned",
        "'learned', one factor of the scores a head from 1 on, or a number (the fixed one is 1/0.3)",
        minimum=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_learned("gain", self.gain)


SPECS = (
    MixerSpec(
        name="ca",
        family="dense",
        summary="Softmax attention integrated over keys and values joined by straight lines.",
        reference="Continuum Attention",
        params=ContinuumParams,
        implementation="mixers.dense.ca:ContinuumAttention",
        transfer=ATTENTION_PROJECTIONS,
        qk_norm=True,
        cache=frozenset({"kv"}),
        token_size=kv_floats,
        parameter_free=lambda params: params.gain != "learned",
        logits=("q_proj", "k_proj"),
    ),
)
