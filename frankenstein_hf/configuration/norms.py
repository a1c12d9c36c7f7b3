"""Specs of normalisation layers."""

from dataclasses import dataclass

from .component import ComponentSpec, Params, param


@dataclass(frozen=True, kw_only=True)
class PartialRMSNormParams(Params):
    """Parameters of `prms_norm`."""

    partial_ratio: float = param(
        0.0625, "Share of the channels whose root mean square scales all.", minimum=0.0, maximum=1.0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.partial_ratio == 0:
            raise ValueError("parameter 'partial_ratio' must be above 0 and at most 1, got 0.")


@dataclass(frozen=True, kw_only=True)
class DynamicTanhParams(Params):
    """Parameters of `dynamic_tanh`."""

    alpha_init: float = param(0.5, "The slope α at the start.", minimum=0.0)
    affine: bool = param(True, "Learn a gain and a bias for every channel.")


@dataclass(frozen=True, kw_only=True)
class DerfParams(Params):
    """Parameters of `derf`."""

    alpha_init: float = param(0.5, "The slope α at the start.", minimum=0.0)
    shift_init: float = param(0.0, "The shift s at the start.")


@dataclass(frozen=True, kw_only=True)
class FlashNormParams(Params):
    """Parameters of `flash_norm`."""

    partial_ratio: float = param(
        0.0, "Share of the channels whose root mean square scales all; 0 means all.", minimum=0.0, maximum=1.0
    )


NORM_SPECS = (
    ComponentSpec(
        name="rms_norm",
        family="norm",
        summary="Scale by the root mean square; learned gain.",
        reference="Root Mean Square Layer Normalization, arXiv 1910.07467",
        implementation="norms:RMSNorm",
    ),
    ComponentSpec(
        name="layer_norm",
        family="norm",
        summary="Subtract the mean, scale by the standard deviation; learned gain and bias.",
        reference="Layer Normalization, arXiv 1607.06450",
        implementation="norms:LayerNorm",
    ),
    ComponentSpec(
        name="prms_norm",
        family="norm",
        summary="`rms_norm` with the root mean square of the first channels only.",
        reference="Root Mean Square Layer Normalization, arXiv 1910.07467, section 5 (pRMSNorm)",
        params=PartialRMSNormParams,
        implementation="norms:PartialRMSNorm",
    ),
    ComponentSpec(
        name="dynamic_tanh",
        family="norm",
        summary="tanh(αx) with one learned slope, gain and bias: no statistics.",
        reference="Transformers without Normalization, arXiv 2503.10622",
        params=DynamicTanhParams,
        implementation="norms:DynamicTanh",
    ),
    ComponentSpec(
        name="derf",
        family="norm",
        summary="erf(αx + s) with learned slope, shift, gain and bias: no statistics.",
        reference="Stronger Normalization-Free Transformers, arXiv 2512.10938",
        params=DerfParams,
        implementation="norms:Derf",
    ),
    ComponentSpec(
        name="flash_norm",
        family="norm",
        summary="Scale by the root mean square, without a gain: the linear layers that read it hold the gain.",
        reference="FlashNorm: Fast Normalization for LLMs, arXiv 2407.09577",
        params=FlashNormParams,
        implementation="norms:FlashNorm",
    ),
)

# norm_placement: whether a sublayer's input is normed, and whether its output is.
NORM_PLACEMENTS: dict[str, tuple[bool, bool]] = {"pre": (True, False), "post": (False, True), "sandwich": (True, True)}
