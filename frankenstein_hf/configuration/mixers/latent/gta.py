"""Spec of `gta`: one attention map a group of heads, and values decoded from a latent."""

from dataclasses import dataclass, replace
from typing import Any, Self

from ...component import MixerSpec, Params, param
from ...sizes import dividing


@dataclass(frozen=True, kw_only=True)
class GTAParams(Params):
    """Parameters of `gta`."""

    num_shared_groups: int | None = param(
        None, "groups of heads with one attention map each; heads/4 by default", minimum=1
    )
    value_latent_rank: int | None = param(None, "width of the values' latent; D/2 by default", minimum=1)

    def resolve(self, config: Any, explicit: frozenset[str]) -> Self:
        heads, name = config.num_attention_heads, "num_shared_groups"
        groups = dividing(
            name, self.num_shared_groups or max(1, heads // 4), heads, "num_attention_heads", name in explicit
        )
        rank = self.value_latent_rank or max(1, config.hidden_size // 2)
        return replace(self, num_shared_groups=groups, value_latent_rank=rank)


def _cached_floats(params: Any, config: Any) -> int:
    return params.num_shared_groups * config.head_dim + params.value_latent_rank


SPECS = (
    MixerSpec(
        name="gta",
        family="latent",
        summary="Softmax attention with one map a group of heads, and values decoded from a latent through SiLU.",
        reference="GTA: Grouped-head latenT Attention, arXiv 2506.17286",
        params=GTAParams,
        implementation="mixers.latent.gta:GroupedHeadLatentAttention",
        cache=frozenset({"latent"}),
        token_size=_cached_floats,
        native_mask=True,
        small_params={"value_latent_rank": 6},
    ),
)
