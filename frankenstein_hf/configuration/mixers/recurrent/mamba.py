"""Spec of `mamba`: the selective state-space model."""

from dataclasses import dataclass, replace
from typing import Any, Self

from ...component import MixerSpec, Params, param


@dataclass(frozen=True, kw_only=True)
class MambaParams(Params):
    """Parameters of `mamba`."""

    state_size: int = param(16, "N, state channels per inner channel", minimum=1)
    conv_kernel: int = param(4, "taps of the short convolution", minimum=1, maximum=1024)
    expand: int = param(2, "inner width in units of hidden_size", minimum=1)
    time_step_rank: int | None = param(None, "rank of Δ's projection; hidden_size/16 rounded up by default", minimum=1)
    time_step_min: float = param(0.001, "smallest initial Δ", minimum=1e-8)
    time_step_max: float = param(0.1, "largest initial Δ", minimum=1e-8)
    discretization: str = param("euler", "B̄: Δ·B (as released) or zero-order hold", choices=("euler", "zoh"))

    def resolve(self, config: Any, explicit: frozenset[str]) -> Self:
        if self.time_step_min > self.time_step_max:
            raise ValueError(f"time_step_min={self.time_step_min} must not exceed time_step_max={self.time_step_max}.")
        return replace(self, time_step_rank=self.time_step_rank or -(-config.hidden_size // 16))


def _state_floats(params: MambaParams, config: Any) -> int:
    return params.expand * config.hidden_size * (params.state_size + params.conv_kernel - 1)


SPECS = (
    MixerSpec(
        name="mamba",
        aliases=("ssm", "mamba1", "s6"),
        family="recurrent",
        summary="Selective state-space model with input-dependent step, input and output maps.",
        reference="Mamba: Linear-Time Sequence Modeling with Selective State Spaces, arXiv 2312.00752",
        params=MambaParams,
        implementation="mixers.recurrent.mamba:Mamba",
        cache=frozenset({"state", "tail"}),
        state_size=_state_floats,
    ),
)
