"""Spec of `hgrn2`: a gated linear recurrence whose forget gates are bounded from below."""

from dataclasses import dataclass

from ...component import MixerSpec, param
from ...linear import WidthParams, linear_state_floats


@dataclass(frozen=True, kw_only=True)
class HGRN2Params(WidthParams):
    """Parameters of `hgrn2`."""

    lower_bound: str | float = param(
        "depth",
        "of the forget gate: a number in [0, 1); 'depth': layer ℓ of L has ℓ/L; or 'learned' as in the paper: per "
        "channel, growing with depth",
    )
    tied_key: bool = param(True, "key = 1 − forget gate; otherwise a projection of its own")

    def __post_init__(self) -> None:
        super().__post_init__()
        bound = self.lower_bound
        if not (bound in ("depth", "learned") if isinstance(bound, str) else 0 <= bound < 1):
            raise ValueError(
                f"parameter 'lower_bound' must be 'depth', 'learned' or a number in [0, 1), got {bound!r}."
            )


SPECS = (
    MixerSpec(
        name="hgrn2",
        aliases=("hgrn",),
        family="gated",
        summary="Gated linear recurrence with outer-product states; forget gates bounded from below, more so in depth.",
        reference="HGRN2: Gated Linear RNNs with State Expansion, arXiv 2404.07904",
        params=HGRN2Params,
        implementation="mixers.gated.hgrn2:HGRN2",
        transfer=("q_proj", "v_proj", "o_proj"),
        cache=frozenset({"state"}),
        state_size=linear_state_floats,
    ),
)
