"""Methods with Adam's two moments and one change: LaProp, ADOPT, cautious AdamW."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..configuration.component import param
from .base import Batch, FrankensteinOptimizer, ParamGroup, adam_denominator, adam_moments, zeros
from .spec import AdamParams, OptimizerSpec, below_one, floats


class AdamLike(FrankensteinOptimizer):
    """State m and v, updated element by element."""

    elementwise = True

    def init_state(self, p: Tensor, g: Tensor, group: ParamGroup) -> dict[str, Any]:
        return {"m": zeros(p), "v": zeros(p)}


@dataclass(frozen=True, kw_only=True)
class LaPropParams(AdamParams):
    """Parameters of `laprop`."""

    lr: float = param(4e-4, "learning rate", minimum=0.0)
    eps: float = param(1e-15, "added to the root of the second moment", minimum=0.0)


class LaProp(AdamLike):
    """Momentum of the normalised gradient (arXiv 2002.04839, algorithm 1), in the paper's letters:

        n ← ν n + (1 − ν) g²;  m ← μ m + (1 − μ) g / (√(n/(1 − νᵗ)) + ε);  θ ← θ − λ m/(1 − μᵗ)

    with μ, ν = betas and n kept as "v". Weight decay is decoupled as in the authors' code (the algorithm has none).
    """

    params_class = LaPropParams

    def update(self, batch: Batch, group: ParamGroup) -> None:
        (mu, nu), m, v, g = group["betas"], batch["m"], batch["v"], batch.grads
        batch.decay(group["lr"] * group["weight_decay"])
        torch._foreach_mul_(v, nu)
        torch._foreach_addcmul_(v, g, g, 1 - nu)
        denominator = adam_denominator(v, nu, group["eps"], batch.step)
        torch._foreach_mul_(m, mu)
        torch._foreach_addcdiv_(m, g, denominator, 1 - mu)
        torch._foreach_add_(batch.params, m, alpha=-group["lr"] / (1 - mu**batch.step))


@dataclass(frozen=True, kw_only=True)
class AdoptParams(AdamParams):
    """Parameters of `adopt`."""

    betas: tuple[float, float] = below_one((0.9, 0.9999), "decay rates of the first and second moment")
    eps: float = param(1e-6, "least root of the second moment", minimum=0.0)
    clip_exponent: float | None = param(
        0.25, "the normalised gradient is clipped to ±t to this power; None: no clipping", minimum=0.0
    )


class Adopt(AdamLike):
    """The second moment of the step before, so that it is independent of the gradient (arXiv 2411.02853, algorithm 2):

        v₀ = g₀²;  m ← β₁ m + (1 − β₁) clip(g / max(√v, ε), ±c_t);  θ ← θ − η m;  v ← β₂ v + (1 − β₂) g²

    with c_t = t^¼ and t the number of the update. The first step only sets v, as in the paper; the authors' code too.
    """

    params_class = AdoptParams

    def update(self, batch: Batch, group: ParamGroup) -> None:
        (beta1, beta2), v, g = group["betas"], batch["v"], batch.grads
        if batch.step == 1:
            torch._foreach_addcmul_(v, g, g)
            return
        batch.decay(group["lr"] * group["weight_decay"])
        denominator = list(torch._foreach_sqrt(v))
        torch._foreach_maximum_(denominator, group["eps"])
        normed = list(torch._foreach_div(g, denominator))
        if group["clip_exponent"] is not None:
            bound = (batch.step - 1) ** group["clip_exponent"]
            torch._foreach_minimum_(normed, bound)
            torch._foreach_maximum_(normed, -bound)
        torch._foreach_lerp_(batch["m"], normed, 1 - beta1)
        torch._foreach_add_(batch.params, batch["m"], alpha=-group["lr"])
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, g, g, 1 - beta2)


@dataclass(frozen=True, kw_only=True)
class CautiousParams(AdamParams):
    """Parameters of `cautious_adamw`."""

    weight_decay: float = param(0.01, "decoupled weight decay", minimum=0.0)
    cautious_clip: float = param(1e-3, "least mean of the mask that its rescaling divides by", minimum=0.0, maximum=1.0)


class CautiousAdamW(AdamLike):
    """AdamW whose step is kept only where it agrees in sign with the gradient (arXiv 2411.16085, algorithm 2):

        φ = 1[m g > 0];  θ ← θ − η φ / max(mean φ, clip) · m̂ / (√v̂ + ε)

    The mean is over the parameter tensor; the floor is 10⁻³ in the authors' code.
    """

    params_class = CautiousParams

    def update(self, batch: Batch, group: ParamGroup) -> None:
        beta1, beta2 = group["betas"]
        adam_moments(batch, beta1, beta2)
        batch.decay(group["lr"] * group["weight_decay"])
        denominator = list(torch._foreach_sqrt(batch["v"]))
        masked = list(torch._foreach_mul(batch["m"], batch.grads))
        for phi, m, x in zip(masked, batch["m"], denominator):
            mean = phi.gt_(0).mean().clamp_(min=group["cautious_clip"])
            phi.mul_(m)
            x.mul_(mean * (1 - beta2**batch.step) ** -0.5).add_(mean * group["eps"])
        torch._foreach_addcdiv_(batch.params, masked, denominator, -group["lr"] / (1 - beta1**batch.step))


SPECS = (
    OptimizerSpec(
        name="laprop",
        family="adaptive",
        summary="Adam with momentum taken after normalisation.",
        reference="LaProp: Separating Momentum and Adaptivity in Adam, arXiv 2002.04839",
        params=LaPropParams,
        implementation="adam_like:LaProp",
        state_bytes=floats(2),
    ),
    OptimizerSpec(
        name="adopt",
        family="adaptive",
        summary="Adam that normalises by the second moment of the step before; converges for any β₂.",
        reference="ADOPT: Modified Adam Can Converge with Any β2 with the Optimal Rate, arXiv 2411.02853",
        params=AdoptParams,
        implementation="adam_like:Adopt",
        state_bytes=floats(2),
    ),
    OptimizerSpec(
        name="cautious_adamw",
        family="adaptive",
        summary="AdamW that steps only where momentum and gradient agree in sign.",
        reference="Cautious Optimizers: Improving Training with One Line of Code, arXiv 2411.16085",
        params=CautiousParams,
        implementation="adam_like:CautiousAdamW",
        state_bytes=floats(2),
    ),
)
