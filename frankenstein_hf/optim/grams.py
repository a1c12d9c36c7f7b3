"""Grams: the gradient decides the direction of a step, Adam its size. The worked example of docs/adding.md."""

from dataclasses import dataclass

import torch

from ..configuration.component import param
from .adam_like import AdamLike
from .base import Batch, ParamGroup, adam_denominator, adam_moments
from .spec import AdamParams, OptimizerSpec, floats


@dataclass(frozen=True, kw_only=True)
class GramsParams(AdamParams):
    """Parameters of `grams`."""

    weight_decay: float = param(0.0, "decoupled weight decay", minimum=0.0)


class Grams(AdamLike):
    """Adam's step with the signs of the gradient (arXiv 2412.17107, algorithm 1):

        m ← β₁ m + (1 − β₁) g;  v ← β₂ v + (1 − β₂) g²;  u = m̂ / (√v̂ + ε)
        θ ← θ − η sign(g) |u|

    An entry whose gradient is 0 does not move. Weight decay is decoupled, as in AdamW.
    """

    params_class = GramsParams

    def update(self, batch: Batch, group: ParamGroup) -> None:
        beta1, beta2 = group["betas"]
        adam_moments(batch, beta1, beta2)
        batch.decay(group["lr"] * group["weight_decay"])
        size = list(torch._foreach_abs(batch["m"]))
        torch._foreach_div_(size, adam_denominator(batch["v"], beta2, group["eps"], batch.step))
        torch._foreach_mul_(size, list(torch._foreach_sign(batch.grads)))
        torch._foreach_add_(batch.params, size, alpha=-group["lr"] / (1 - beta1**batch.step))


SPECS = (
    OptimizerSpec(
        name="grams",
        family="adaptive",
        summary="Adam's step size with the signs of the gradient instead of the momentum's.",
        reference="Grams: Gradient Descent with Adaptive Momentum Scaling, arXiv 2412.17107",
        params=GramsParams,
        implementation="grams:Grams",
        state_bytes=floats(2),
    ),
)
