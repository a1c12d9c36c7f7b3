"""Specs of latent attention with a decoupled rotary key: `mla`, `gqla` and `mlra`."""

from dataclasses import dataclass, replace
from typing import Any, Self

from ...component import MixerSpec, Params, param
from ...sizes import divided, dividing, rotated_width


@dataclass(frozen=True, kw_only=True)
class LatentParams(Params):
    """What the three have in common."""

    latent_rank: int | None = param(None, "width of the latent keys and values come from; D/2 by default", minimum=1)
    query_rank: int | None = param(None, "width of a latent for the queries too; none by default", minimum=1)
    rope_head_dim: int | None = param(
        None,
        "width of the rotated parts beside each query and beside the keys, which all heads share; head_dim/2 by "
        "default. 0: the heads themselves are rotated, so that decoding has to expand the keys",
        minimum=0,
    )
    latent_norm: str = param("rms_norm", "norm of the latents before they are expanded", choices=("rms_norm", "none"))
    qk_norm: str = param(
        "none",
        "norm of every query and key head, rotated parts apart; the cache then holds one number more a token and "
        "key/value head",
        choices=("none", "rms_norm"),
    )

    @property
    def num_latent_heads(self) -> int:
        """Parts the latent is cut into, each of which serves its own share of the heads."""
        return 1

    def key_value_heads(self, config: Any) -> int:
        """Heads G of expanded keys and values."""
        return config.num_attention_heads

    def resolve(self, config: Any, explicit: frozenset[str]) -> Self:
        return replace(
            self,
            latent_rank=self.latent_rank or max(1, config.hidden_size // 2),
            rope_head_dim=rotated_width(self.rope_head_dim, config),
        )


@dataclass(frozen=True, kw_only=True)
class MLAParams(LatentParams):
    """Parameters of `mla`."""


@dataclass(frozen=True, kw_only=True)
class GQLAParams(LatentParams):
    """Parameters of `gqla`."""

    num_groups: int | None = param(None, "key/value heads; heads/4 by default", minimum=1)
    decode_path: str = param(
        "gqa",
        "what is cached and read when decoding: expanded key/value heads, or the latent with the expansion absorbed "
        "into queries and outputs",
        choices=("gqa", "mqa_absorb"),
    )

    def key_value_heads(self, config: Any) -> int:
        return self.num_groups or 1

    def resolve(self, config: Any, explicit: frozenset[str]) -> Self:
        heads = config.num_attention_heads
        groups = dividing(
            "num_groups", self.num_groups or max(1, heads // 4), heads, "num_attention_heads", "num_groups" in explicit
        )
        params = replace(super().resolve(config, explicit), num_groups=groups)
        if params.decode_path == "mqa_absorb" and params.rope_head_dim == 0 and "decode_path" in explicit:
            raise ValueError("decode_path='mqa_absorb' needs rope_head_dim > 0: rotated heads cannot be absorbed.")
        return params


@dataclass(frozen=True, kw_only=True)
class MLRAParams(LatentParams):
    """Parameters of `mlra`."""

    num_latent_heads: int = param(
        4, "parts of the latent, each of which alone serves its share of the heads; divides latent_rank and heads",
        minimum=1,
    )  # fmt: skip

    def resolve(self, config: Any, explicit: frozenset[str]) -> Self:
        params, heads = super().resolve(config, explicit), config.num_attention_heads
        parts = dividing(
            "num_latent_heads", self.num_latent_heads, heads, "num_attention_heads", "num_latent_heads" in explicit
        )
        rank = divided("latent_rank", params.latent_rank or 1, parts, "num_latent_heads", "latent_rank" in explicit)
        return replace(params, num_latent_heads=parts, latent_rank=rank)


def _cached_floats(params: Any, config: Any) -> int:
    """latent_rank + rope_head_dim, and with a norm of the keys one number a head, where it is not computed anew."""
    rotated, groups = params.rope_head_dim, params.key_value_heads(config)
    if getattr(params, "decode_path", None) == "gqa":
        return 2 * groups * config.head_dim + rotated
    return params.latent_rank + rotated + (groups if params.qk_norm != "none" and rotated else 0)


def _spec(name: str, summary: str, reference: str, params: type[LatentParams], small: dict[str, Any]) -> MixerSpec:
    return MixerSpec(
        name=name,
        family="latent",
        summary=summary,
        reference=reference,
        params=params,
        implementation="mixers.latent.mla:LatentAttention",
        cache=frozenset({"latent"}),
        token_size=_cached_floats,
        native_mask=True,
        rotary_width=lambda params, config: params.rope_head_dim or config.head_dim,
        small_params=small,
    )


SPECS = (
    _spec(
        "mla",
        "Attention whose keys and values are expanded from one cached low-rank latent, with a decoupled rotary key.",
        "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model, arXiv 2405.04434",
        MLAParams,
        {"latent_rank": 6, "qk_norm": "rms_norm"},
    ),
    _spec(
        "gqla",
        "Latent attention with grouped heads that decodes from expanded groups or from the latent, same weights.",
        "GQLA: Group-Query Latent Attention for Hardware-Adaptive Large Language Model Decoding, arXiv 2605.15250",
        GQLAParams,
        {"latent_rank": 6, "query_rank": 5},
    ),
    _spec(
        "mlra",
        "Latent attention whose latent is cut into parts, each of which alone serves its share of the heads.",
        "Multi-Head Low-Rank Attention, arXiv 2603.02188",
        MLRAParams,
        {"latent_rank": 8},
    ),
)
