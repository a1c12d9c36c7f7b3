"""Specs of the Falcon family: fast weights as online learning of prefix-aligned pairs (read after write)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ...component import ATTENTION_PROJECTIONS, MixerSpec, param
from ...linear import ConvolutionParams


@dataclass(frozen=True, kw_only=True)
class FalconParams(ConvolutionParams):
    """Parameters of `falcon1`, `falcon2`, `falcon1a` and `falcon2a`. In a config λ is called "lambda"."""

    former_names: ClassVar[Mapping[str, str]] = {"lambda": "lambda_", "short_conv": "use_short_conv"}

    chunk_size: int | None = param(64, "tokens computed in parallel at most; None: token by token", minimum=1)
    qk_norm: str = param("rms_norm", "feature map φ of queries and keys", choices=("rms_norm", "l2_norm"))
    beta_mode: str = param(
        "ctx_eta",
        "step size: β of η = β/(statistic + λ + ε) fixed, β from the token, or η from the token (β then follows)",
        choices=("ctx_eta", "ctx_beta", "static"),
    )
    lambda_mode: str = param(
        "ctx", "forgetting: λ fixed, or from the token in units of the statistic", choices=("ctx", "static")
    )
    beta: float = param(1.0, "β when beta_mode is static", minimum=0.0, maximum=2.0)
    lambda_: float = param(0.0, "λ when lambda_mode is static; in a config its name is 'lambda'", minimum=0.0)
    eps: float = param(1e-6, "ε of the step size", minimum=0.0)
    eps_gamma: float = param(1e-4, "a step keeps at least this part of the state", minimum=1e-6, maximum=1.0)
    shifted: bool = param(True, "write v_t to the previous token's key (read after write) instead of to its own")

    @property
    def pairs(self) -> int:
        """W: pairs of key and value a step learns from."""
        return 1

    @property
    def past_keys(self) -> int:
        """Earlier keys the next step needs."""
        return self.pairs - 1 + self.shifted


@dataclass(frozen=True, kw_only=True)
class FalconWindowParams(FalconParams):
    """Parameters of `falcon3` and `falcon3a`."""

    former_names: ClassVar[Mapping[str, str]] = {**FalconParams.former_names, "window": "window_size"}

    window_size: int = param(4, "B, the last pairs every step rehearses", minimum=1)

    @property
    def pairs(self) -> int:
        return self.window_size


def _state_floats(params: FalconParams, config: Any) -> int:
    width = config.num_attention_heads * config.head_dim
    return width * (config.head_dim + params.past_keys + params.pairs - 1) + params.tail_floats(3 * width)


def _spec(name: str, class_name: str, summary: str, params: type[FalconParams] = FalconParams) -> MixerSpec:
    # the gradient check needs a fixed λ: the other one uses a detached statistic
    small: dict[str, Any] = {"lambda_mode": "static", "lambda": 0.2, "chunk_size": 8}
    return MixerSpec(
        name=name,
        family="fast_weight",
        summary=summary,
        reference="Falcon: fast-weight attention as online continual learning under read-after-write semantics",
        params=params,
        implementation=f"mixers.fast_weight.falcon:{class_name}",
        transfer=ATTENTION_PROJECTIONS,
        cache=frozenset({"state", "tail"}),
        state_size=_state_floats,
        small_params={**small, "window_size": 3} if params is FalconWindowParams else small,
    )


SPECS = (
    _spec("falcon1", "Falcon1", "Delta rule on shifted pairs with a normalised step and its own forgetting."),
    _spec("falcon2", "Falcon2", "`falcon1` with a step size per value channel."),
    _spec("falcon3", "Falcon3", "`falcon1` that rehearses the last pairs at every step.", FalconWindowParams),
    _spec("falcon1a", "Falcon1A", "Additive writes of shifted pairs with a normalised step and its own forgetting."),
    _spec("falcon2a", "Falcon2A", "`falcon1a` with a step size per value channel."),
    _spec("falcon3a", "Falcon3A", "`falcon1a` that rehearses the last pairs at every step.", FalconWindowParams),
)
