"""Spec of `mtla`: latent attention whose cache shrinks along time too."""

from dataclasses import dataclass, replace
from typing import Any, Self

from ...component import MixerSpec, Params, param


@dataclass(frozen=True, kw_only=True)
class MTLAParams(Params):
    """Parameters of `mtla`."""

    latent_rank: int | None = param(None, "width of the latent keys and values come from; D/2 by default", minimum=1)
    merge_factor: int = param(2, "tokens a slot is a sum of", minimum=1)
    stride: int | None = param(None, "tokens from one slot to the next, at most merge_factor, the default", minimum=1)

    @property
    def num_open(self) -> int:
        """Slots a token belongs to, or may: it reads them as far as they have come."""
        return -(-self.merge_factor // (self.stride or self.merge_factor))

    def resolve(self, config: Any, explicit: frozenset[str]) -> Self:
        stride = self.stride or self.merge_factor
        if stride > self.merge_factor:
            raise ValueError(f"stride={stride} must not exceed merge_factor={self.merge_factor}: tokens would be lost.")
        return replace(self, latent_rank=self.latent_rank or max(1, config.hidden_size // 2), stride=stride)


SPECS = (
    MixerSpec(
        name="mtla",
        family="latent",
        summary="Latent attention to slots, gated sums of neighbouring tokens' latents; the last one is open.",
        reference="Multi-head Temporal Latent Attention, arXiv 2505.13544",
        params=MTLAParams,
        implementation="mixers.latent.mtla:TemporalLatentAttention",
        cache=frozenset({"latent", "tail"}),
        token_size=lambda params, config: params.latent_rank / params.stride,
        small_params={"latent_rank": 6, "merge_factor": 4, "stride": 2},
    ),
)
