"""Spec of `gma`: Gaussian mixture attention."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from ...component import MixerSpec, Params, param


@dataclass(frozen=True, kw_only=True)
class GMAParams(Params):
    """Parameters of `gma`."""

    former_names: ClassVar[Mapping[str, str]] = {"epsilon": "eps"}

    num_components: int = param(8, "Gaussian components a head, the slots of its memory", minimum=1)
    routing_dim: int | None = param(None, "width of queries and keys; the head width by default", minimum=1)
    eps: float = param(1e-6, "added to the sum of affinities a readout is divided by", minimum=1e-12, maximum=1.0)
    sigma_eps: float = param(1e-4, "smallest variance of a component", minimum=1e-8, maximum=0.5)
    init_mean_std: float = param(1.0, "spread of the initial component means", minimum=0.0)

    def resolve(self, config: Any, explicit: frozenset[str]) -> Self:
        return replace(self, routing_dim=self.routing_dim or config.head_dim)


def _state_floats(params: GMAParams, config: Any) -> int:
    return config.num_attention_heads * params.num_components * (config.head_dim + 1)


SPECS = (
    MixerSpec(
        name="gma",
        family="latent",
        summary="Linear attention whose affinities are overlaps of Gaussian-mixture responsibilities.",
        reference="Gaussian Mixture Attention: Linear-Time Sequence Mixing via Probabilistic Latent Routing, "
        "arXiv 2606.18283",
        params=GMAParams,
        implementation="mixers.latent.gma:GaussianMixtureAttention",
        cache=frozenset({"state"}),
        state_size=_state_floats,
        small_params={"num_components": 3, "routing_dim": 5},
    ),
)
