"""Spec of `mfa`: many wide query heads over one key/value head."""

from dataclasses import dataclass
from typing import Any

from ...component import MixerSpec, Params, param


@dataclass(frozen=True, kw_only=True)
class MFAParams(Params):
    """Parameters of `mfa`."""

    factor_rank: int = param(128, "width C of every query head and of the one key and value head", minimum=1)
    key_reuse: bool = param(False, "values are made of the keys, v = k + α ⊙ N k with α = 0 at first; half the cache")


def _cached_floats(params: Any, config: Any) -> int:
    return params.factor_rank * (1 if params.key_reuse else 2)


SPECS = (
    MixerSpec(
        name="mfa",
        family="latent",
        summary="Softmax attention of many wide query heads, low-rank together, over one shared key/value head.",
        reference="Multi-matrix Factorization Attention, arXiv 2412.19255",
        params=MFAParams,
        implementation="mixers.latent.mfa:MultiMatrixFactorizationAttention",
        cache=frozenset({"latent"}),
        token_size=_cached_floats,
        native_mask=True,
        rotary_width=lambda params, config: params.factor_rank,
        small_params={"factor_rank": 6, "key_reuse": True},
    ),
)
