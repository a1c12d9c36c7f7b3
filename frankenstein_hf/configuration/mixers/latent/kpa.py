"""Specs of attention over products of contextual factors: `kpa` and its vector case `tpa`."""

from dataclasses import dataclass, replace
from typing import Any, Self

from ...component import MixerSpec, Params, param
from ...sizes import largest_divisor


@dataclass(frozen=True, kw_only=True)
class KPAParams(Params):
    """Parameters of `kpa`."""

    h1: int | None = param(
        None,
        "heads of the first factor; h1 · h2 = heads; the largest proper divisor of the heads by default",
        minimum=1,
    )
    h2: int | None = param(None, "heads of the second factor", minimum=1)
    d1: int | None = param(
        None, "width of the first factor; d1 · d2 = head_dim; the largest divisor up to 8 with an even d2 by default",
        minimum=1,
    )  # fmt: skip
    d2: int | None = param(None, "width of the second factor, which carries rotary positions: even", minimum=1)
    query_rank: int = param(6, "products the queries are sums of", minimum=1)
    key_rank: int = param(2, "products the keys are sums of; their factors are cached", minimum=1)
    value_rank: int = param(2, "products the values are sums of; their factors are cached", minimum=1)

    def resolve(self, config: Any, explicit: frozenset[str]) -> Self:
        heads, width = config.num_attention_heads, config.head_dim
        proper = max(1, largest_divisor(heads, heads // 2))
        h1, h2 = _split("h1", self.h1, "h2", self.h2, heads, "num_attention_heads", proper)
        even = [n for n in range(1, 9) if width % n == 0 and width // n % 2 == 0]
        d1, d2 = _split("d1", self.d1, "d2", self.d2, width, "head_dim", max(even, default=1))
        if d2 % 2 and explicit & {"d1", "d2"} and d1 > 1:
            raise ValueError(f"d2={d2} must be even: rotary positions turn pairs of its channels.")
        return replace(self, h1=h1, h2=h2, d1=d1, d2=d2)


def _split(
    first: str, one: int | None, second: str, other: int | None, whole: int, owner: str, default: int
) -> tuple[int, int]:
    """Two factors of `whole`, what is not given filled in. Raises ValueError if they are none."""
    if one is None:
        one = default if other is None else max(1, whole // other)
    other = max(1, whole // one) if other is None else other
    if one * other != whole:
        raise ValueError(f"{first}={one} times {second}={other} must be {owner}={whole}.")
    return one, other


@dataclass(frozen=True, kw_only=True)
class TPAParams(Params):
    """Parameters of `tpa`."""

    query_rank: int = param(8, "products the queries are sums of", minimum=1)
    key_rank: int = param(2, "products the keys are sums of; their factors are cached", minimum=1)
    value_rank: int = param(2, "products the values are sums of; their factors are cached", minimum=1)


def _kpa_floats(params: KPAParams, config: Any) -> int:
    assert params.h1 and params.h2 and params.d1 and params.d2
    return (params.key_rank + params.value_rank) * (params.h1 * params.d1 + params.h2 * params.d2)


def _tpa_floats(params: TPAParams, config: Any) -> int:
    return (params.key_rank + params.value_rank) * (config.num_attention_heads + config.head_dim)


SPECS = (
    MixerSpec(
        name="kpa",
        family="latent",
        summary="Softmax attention whose queries, keys and values are sums of Kronecker products of small factors.",
        reference="Kronecker Product Attention: Memory-efficient KV compression via structured factorization, "
        "arXiv 2610.12657",
        params=KPAParams,
        implementation="mixers.latent.kpa:KroneckerProductAttention",
        cache=frozenset({"latent"}),
        token_size=_kpa_floats,
        native_mask=True,
        rotary_width=lambda params, config: params.d2,
        small_params={"h1": 1, "query_rank": 3},
    ),
    MixerSpec(
        name="tpa",
        family="latent",
        summary="Softmax attention whose queries, keys and values are sums of outer products of small factors.",
        reference="Tensor Product Attention Is All You Need, arXiv 2501.06425",
        params=TPAParams,
        implementation="mixers.latent.kpa:TensorProductAttention",
        cache=frozenset({"latent"}),
        token_size=_tpa_floats,
        native_mask=True,
        small_params={"query_rank": 3},
    ),
)
