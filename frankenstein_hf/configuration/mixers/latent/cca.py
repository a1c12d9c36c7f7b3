"""Specs of attention inside a compressed latent: `cca` and `ccgqa`."""

from dataclasses import dataclass, replace
from typing import Any, Self

from ...component import MixerSpec, Params, param
from ...sizes import divided, dividing


@dataclass(frozen=True, kw_only=True)
class CompressedConvolutionalParams(Params):
    """What the two have in common."""

    num_conv_layers: int = param(
        2, "convolutions of queries and keys: none, along time, and within heads", choices=(0, 1, 2)
    )
    conv_kernel_seq: int = param(4, "tokens the convolution of each channel along time reaches", minimum=1)
    conv_kernel_ch: int = param(3, "tokens the convolution over the channels of a head reaches", minimum=1)
    qk_mean: bool = param(True, "add the mean of query and key, before their convolution, to both")
    value_shift: bool = param(True, "half of each head's value comes from the token before")

    @property
    def reach(self) -> int:
        """Tokens before the current one that the convolutions look at."""
        kernels = (self.conv_kernel_seq, self.conv_kernel_ch)[: self.num_conv_layers]
        return sum(kernels) - len(kernels)

    def sizes(self, config: Any) -> tuple[int, int]:
        """Key/value heads G, and the width of every head."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class CCAParams(CompressedConvolutionalParams):
    """Parameters of `cca`."""

    latent_rank: int | None = param(None, "width of all heads together; D/4 by default, divisible by heads", minimum=1)

    def sizes(self, config: Any) -> tuple[int, int]:
        return config.num_attention_heads, (self.latent_rank or 0) // config.num_attention_heads

    def resolve(self, config: Any, explicit: frozenset[str]) -> Self:
        rank, heads = self.latent_rank or max(1, config.hidden_size // 4), config.num_attention_heads
        rank = divided("latent_rank", rank, heads, "num_attention_heads", "latent_rank" in explicit)
        return replace(self, latent_rank=rank)


@dataclass(frozen=True, kw_only=True)
class CCGQAParams(CompressedConvolutionalParams):
    """Parameters of `ccgqa`."""

    query_latent_rank: int | None = param(
        None, "width of all query heads together; D/2 by default, divisible by heads", minimum=1
    )
    kv_latent_rank: int | None = param(
        None, "width of all key heads together; D/8 by default, num_kv_heads heads as wide as the queries'", minimum=1
    )
    num_kv_heads: int | None = param(
        None, "key/value heads; heads · kv_latent_rank / query_latent_rank by default, a divisor of heads", minimum=1
    )

    def sizes(self, config: Any) -> tuple[int, int]:
        return self.num_kv_heads or 1, (self.query_latent_rank or 0) // config.num_attention_heads

    def resolve(self, config: Any, explicit: frozenset[str]) -> Self:
        heads, D = config.num_attention_heads, config.hidden_size
        query = self.query_latent_rank or max(1, D // 2)
        query = divided("query_latent_rank", query, heads, "num_attention_heads", "query_latent_rank" in explicit)
        width, rank = query // heads, self.kv_latent_rank or max(1, D // 8)
        groups = self.num_kv_heads or max(1, min(heads, rank // width))
        groups = dividing(
            "num_kv_heads", groups, heads, "num_attention_heads", bool({"num_kv_heads", "kv_latent_rank"} & explicit)
        )
        if "kv_latent_rank" in explicit and rank != groups * width:
            raise ValueError(
                f"kv_latent_rank={rank} must be num_kv_heads={groups} heads of width {width}, that of the queries "
                "(query_latent_rank / num_attention_heads)."
            )
        return replace(self, query_latent_rank=query, kv_latent_rank=groups * width, num_kv_heads=groups)


def _cached_floats(params: Any, config: Any) -> int:
    groups, width = params.sizes(config)
    return 2 * groups * width


def _tail_floats(params: Any, config: Any) -> int:
    groups, width = params.sizes(config)
    shifted = groups * (width // 2) if params.value_shift else 0
    return params.reach * (config.num_attention_heads + groups) * width + shifted


def _spec(name: str, summary: str, params: type[CompressedConvolutionalParams], small: dict[str, Any]) -> MixerSpec:
    return MixerSpec(
        name=name,
        family="latent",
        summary=summary,
        reference="Compressed Convolutional Attention: Efficient Attention in a Compressed Latent Space, "
        "arXiv 2510.04476",
        params=params,
        implementation="mixers.latent.cca:CompressedConvolutionalAttention",
        cache=frozenset({"latent", "tail"}),
        token_size=_cached_floats,
        state_size=_tail_floats,
        rotary_width=lambda params, config: params.sizes(config)[1],
        small_params=small,
    )


SPECS = (
    _spec(
        "cca",
        "Softmax attention inside a latent, its queries and keys convolved, half of each value from the token before.",
        CCAParams,
        {"latent_rank": 8},
    ),
    _spec(
        "ccgqa",
        "The same with fewer key/value heads than query heads, each compressed by a factor of its own.",
        CCGQAParams,
        {"query_latent_rank": 8, "conv_kernel_seq": 3},
    ),
)
