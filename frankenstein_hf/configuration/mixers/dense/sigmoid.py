"""Spec of `sigmoid`: attention whose weights are sigmoids instead of a softmax."""

from dataclasses import dataclass

from ...component import ATTENTION_PROJECTIONS, MixerSpec, Params, param
from .standard import kv_floats


def check_learned(name: str, value: str | float) -> None:
    """Raise ValueError unless `value` is a number or "learned"."""
    if isinstance(value, str) and value != "learned":
        raise ValueError(f"parameter '{name}' must be a number or 'learned', got {value!r}.")


@dataclass(frozen=True, kw_only=True)
class SigmoidParams(Params):
    """Parameters of `sigmoid`."""

    bias: str | float = param("learned", "'learned', one scalar a head from 0 on, or a number added to all logits")
    normalize: str = param(
        "none",
        "none: lower each logit by the logarithm of the number of keys its query sees; l1: divide the weights by "
        "their sum instead; hybrid: none, and an RMS norm of the mixer's output",
        choices=("none", "l1", "hybrid"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_learned("bias", self.bias)


SPECS = (
    MixerSpec(
        name="sigmoid",
        family="dense",
        summary="Attention that weighs every key by a sigmoid of its own, without competition.",
        reference="Theory, Analysis, and Best Practices for Sigmoid Self-Attention, arXiv 2409.04431",
        params=SigmoidParams,
        implementation="mixers.dense.sigmoid:SigmoidAttention",
        transfer=ATTENTION_PROJECTIONS,
        qk_norm=True,
        cache=frozenset({"kv"}),
        token_size=kv_floats,
        parameter_free=lambda params: params.bias != "learned" and params.normalize != "hybrid",
        logits=("q_proj", "k_proj"),
    ),
)
