"""Spec of `ode`: a layer as the numerical integration of a continuous system."""

from dataclasses import dataclass
from typing import Any, Self

from ...component import ATTENTION_PROJECTIONS, MixerSpec, Params, param


@dataclass(frozen=True, kw_only=True)
class ODEParams(Params):
    """Parameters of `ode`."""

    solver: str = param("rk4", "classical Runge-Kutta of fourth order, or Euler", choices=("rk4", "euler"))
    steps: int = param(2, "integration steps of a layer, each of length 1/steps", minimum=1)
    gate: bool = param(False, "rk4: step by a learned blend of k₁ and k₂ instead of the classical weights")

    @property
    def num_stages(self) -> int:
        """Evaluations of the attention in one layer."""
        return self.steps * (4 if self.solver == "rk4" else 1)

    def resolve(self, config: Any, explicit: frozenset[str]) -> Self:
        if self.gate and self.solver == "euler":
            raise ValueError("gate=True blends the stages of solver='rk4'; 'euler' has only one.")
        return self


def _kv_floats(params: ODEParams, config: Any) -> int:
    return params.num_stages * 2 * config.num_key_value_heads * config.head_dim


SPECS = (
    MixerSpec(
        name="ode",
        family="recurrent",
        summary="Softmax attention integrated over a layer's depth with Runge-Kutta or Euler steps.",
        reference="ODE Transformer: An Ordinary Differential Equation-Inspired Model for Sequence Generation, "
        "arXiv 2203.09176",
        params=ODEParams,
        implementation="mixers.recurrent.ode:ODEAttention",
        transfer=ATTENTION_PROJECTIONS,
        qk_norm=True,
        cache=frozenset({"kv"}),
        token_size=_kv_floats,
        takes_residual=True,
        native_mask=True,
        logits=("q_proj", "k_proj"),
    ),
)
