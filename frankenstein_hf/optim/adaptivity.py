"""Anon: the degree of adaptivity as a parameter, between SGD, Adam and beyond."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..configuration.component import param
from .base import Batch, FrankensteinOptimizer, ParamGroup, zeros
from .spec import AdamParams, OptimizerSpec, floats


@dataclass(frozen=True, kw_only=True)
class AnonParams(AdamParams):
    """Parameters of `anon`."""

    gamma: float = param(1.0, "γ, adaptivity: 0 as SGD, 1 as Adam; negative and larger values extrapolate")


class Anon(FrankensteinOptimizer):
    """A preconditioner of tunable power, renewed when the step t = 1, 2, 4, 8 … (arXiv 2605.02317, incremental
    delay update):

        m ← β₁ m + (1 − β₁) g;  v ← β₂ v + (1 − β₂) g²
        at t = 2ᵏ:  v̄ = v/(1 − β₂^max(t/2, 1)) + ε;  v ← 0
                    a ← v̄^(−γ/2) for k = 0, else √(2 / (1/a² + v̄^γ))
        θ ← θ − η m̂ a, with the a just renewed

    v starts from 0 after each renewal, hence its correction by the t/2 steps since then. Weight decay is decoupled.
    """

    params_class = AnonParams
    elementwise = True

    def init_state(self, p: Tensor, g: Tensor, group: ParamGroup) -> dict[str, Any]:
        return {"m": zeros(p), "v": zeros(p), "a": zeros(p)}

    def update(self, batch: Batch, group: ParamGroup) -> None:
        (beta1, beta2), t, m, v, g = group["betas"], batch.step, batch["m"], batch["v"], batch.grads
        batch.decay(group["lr"] * group["weight_decay"])
        torch._foreach_lerp_(m, g, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, g, g, 1 - beta2)
        if t & (t - 1) == 0:
            self._renew(batch, group)
        torch._foreach_addcmul_(batch.params, m, batch["a"], -group["lr"] / (1 - beta1**t))

    def _renew(self, batch: Batch, group: ParamGroup) -> None:
        t, gamma, a, v = batch.step, group["gamma"], batch["a"], batch["v"]
        v_bar = list(torch._foreach_div(v, 1 - group["betas"][1] ** max(t // 2, 1)))
        torch._foreach_add_(v_bar, group["eps"])
        torch._foreach_pow_(v_bar, gamma)
        if t > 1:
            torch._foreach_add_(v_bar, list(torch._foreach_pow(a, -2.0)))
            torch._foreach_div_(v_bar, 2.0)
        torch._foreach_copy_(a, list(torch._foreach_pow(v_bar, -0.5)))
        torch._foreach_zero_(v)


SPECS = (
    OptimizerSpec(
        name="anon",
        family="adaptive",
        summary="Momentum with a preconditioner of any power γ, renewed at powers of two.",
        reference="Anon: Extrapolating Adaptivity Beyond SGD and Adam, arXiv 2605.02317",
        params=AnonParams,
        implementation="adaptivity:Anon",
        state_bytes=floats(3),
    ),
)
