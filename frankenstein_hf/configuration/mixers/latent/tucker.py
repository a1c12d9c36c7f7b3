"""Spec of `tucker`: attention whose projections are factorised with ranks of their own."""

from dataclasses import dataclass, replace
from typing import Any, Self

from ...component import MixerSpec, Params, param


@dataclass(frozen=True, kw_only=True)
class TuckerParams(Params):
    """Parameters of `tucker`."""

    query_rank: int | None = param(None, "width of the queries' factor; D by default", minimum=1)
    key_rank: int | None = param(None, "width of the keys' factor, which is cached; D/2 by default", minimum=1)
    value_rank: int | None = param(None, "width of the values' factor, which is cached; D/2 by default", minimum=1)

    def resolve(self, config: Any, explicit: frozenset[str]) -> Self:
        D = config.hidden_size
        return replace(
            self,
            query_rank=self.query_rank or D,
            key_rank=self.key_rank or max(1, D // 2),
            value_rank=self.value_rank or max(1, D // 2),
        )


SPECS = (
    MixerSpec(
        name="tucker",
        family="latent",
        summary="Softmax attention whose query, key and value projections are products of a factor and a core.",
        reference="Tucker Attention: A generalization of approximate attention mechanisms, arXiv 2603.30033",
        params=TuckerParams,
        implementation="mixers.latent.tucker:TuckerAttention",
        cache=frozenset({"latent"}),
        token_size=lambda params, config: params.key_rank + params.value_rank,
        native_mask=True,
        small_params={"query_rank": 7, "key_rank": 5, "value_rank": 6},
    ),
)
