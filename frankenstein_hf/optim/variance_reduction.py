"""Methods that remember more than Adam: Adan, AdEMAMix, MARS."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..configuration.component import param
from .base import Batch, FrankensteinOptimizer, ParamGroup, adam_denominator, adam_moments, zeros
from .spec import HybridParams, OptimizerParams, OptimizerSpec, below_one, floats, or_adamw

# ---------------------------------------------------------------------- Adan


@dataclass(frozen=True, kw_only=True)
class AdanParams(OptimizerParams):
    """Parameters of `adan`."""

    betas: tuple[float, float, float] = below_one(
        (0.98, 0.92, 0.99), "decay rates of gradient, gradient difference and squared Nesterov gradient"
    )
    eps: float = param(1e-8, "added to the root of the second moment", minimum=0.0)
    no_prox: bool = param(False, "decay θ before the step as AdamW, instead of dividing by 1 + ηλ after it")


class Adan(FrankensteinOptimizer):
    """Nesterov momentum from gradient differences (arXiv 2208.06677, algorithm 1), with Δ = g − g_prev:

        m ← β₁ m + (1 − β₁) g;  v ← β₂ v + (1 − β₂) Δ;  n ← β₃ n + (1 − β₃) (g + β₂ Δ)²
        θ ← (θ − η (m̂ + β₂ v̂) / (√n̂ + ε)) / (1 + η λ)

    Rates as in the authors' code, whose β is the paper's 1 − β, with its bias corrections; Δ is 0 in the first step.
    """

    params_class = AdanParams
    elementwise = True

    def init_state(self, p: Tensor, g: Tensor, group: ParamGroup) -> dict[str, Any]:
        return {"m": zeros(p), "v": zeros(p), "n": zeros(p), "g_prev": g.clone()}

    def update(self, batch: Batch, group: ParamGroup) -> None:
        beta1, beta2, beta3 = group["betas"]
        lr, wd, t, g, n = group["lr"], group["weight_decay"], batch.step, batch.grads, batch["n"]
        difference = torch._foreach_sub(g, batch["g_prev"])
        torch._foreach_copy_(batch["g_prev"], g)
        torch._foreach_lerp_(batch["m"], g, 1 - beta1)
        torch._foreach_lerp_(batch["v"], difference, 1 - beta2)
        torch._foreach_mul_(difference, beta2)
        torch._foreach_add_(difference, g)
        torch._foreach_mul_(n, beta3)
        torch._foreach_addcmul_(n, difference, difference, 1 - beta3)
        denominator = adam_denominator(n, beta3, group["eps"], t)
        if group["no_prox"]:
            batch.decay(lr * wd)
        torch._foreach_addcdiv_(batch.params, batch["m"], denominator, -lr / (1 - beta1**t))
        torch._foreach_addcdiv_(batch.params, batch["v"], denominator, -lr * beta2 / (1 - beta2**t))
        if wd and not group["no_prox"]:
            torch._foreach_div_(batch.params, 1 + lr * wd)


# ---------------------------------------------------------------------- AdEMAMix


@dataclass(frozen=True, kw_only=True)
class AdEMAMixParams(OptimizerParams):
    """Parameters of `ademamix`."""

    betas: tuple[float, float, float] = below_one(
        (0.9, 0.999, 0.9999), "decay rates of the fast average, the second moment and the slow average"
    )
    eps: float = param(1e-8, "added to the root of the second moment", minimum=0.0)
    alpha: float = param(2.0, "weight of the slow average", minimum=0.0)
    alpha_warmup: int = param(0, "steps in which α rises linearly from 0; 0: none", minimum=0)
    beta3_warmup: int = param(0, "steps in which the half-life of the slow average rises from β₁'s; 0: none", minimum=0)


class AdEMAMix(FrankensteinOptimizer):
    """A fast and a slow average of the gradient (arXiv 2409.03137, algorithm 1):

        m₁ ← β₁ m₁ + (1 − β₁) g;  m₂ ← β₃(t) m₂ + (1 − β₃(t)) g;  θ ← θ − η ((m̂₁ + α(t) m₂) / (√v̂ + ε) + λ θ)

    Only m₁ and v have bias corrections. α's default is that of the authors' code; the paper's runs use 5 to 10 with
    both warm-ups over the whole training.
    """

    params_class = AdEMAMixParams
    elementwise = True

    def init_state(self, p: Tensor, g: Tensor, group: ParamGroup) -> dict[str, Any]:
        return {"m": zeros(p), "m_slow": zeros(p), "v": zeros(p)}

    def update(self, batch: Batch, group: ParamGroup) -> None:
        (beta1, beta2, _), lr, t = group["betas"], group["lr"], batch.step
        alpha, beta3 = slow_weights(group, t)
        batch.decay(lr * group["weight_decay"])
        adam_moments(batch, beta1, beta2)
        torch._foreach_lerp_(batch["m_slow"], batch.grads, 1 - beta3)
        denominator = adam_denominator(batch["v"], beta2, group["eps"], t)
        torch._foreach_addcdiv_(batch.params, batch["m"], denominator, -lr / (1 - beta1**t))
        if alpha:
            torch._foreach_addcdiv_(batch.params, batch["m_slow"], denominator, -lr * alpha)


def slow_weights(group: ParamGroup, t: int) -> tuple[float, float]:
    """α(t), linear, and β₃(t), whose half-life is linear in t (paper, appendix A.1)."""
    alpha, (beta1, _, beta3) = group["alpha"], group["betas"]
    if t < group["alpha_warmup"]:
        alpha *= t / group["alpha_warmup"]
    if t < group["beta3_warmup"]:
        half_life = [math.log(0.5) / math.log(beta + 1e-8) - 1 for beta in (beta1, beta3)]
        share = t / group["beta3_warmup"]
        beta3 = 0.5 ** (1 / ((1 - share) * half_life[0] + share * half_life[1] + 1))
    return alpha, beta3


# ---------------------------------------------------------------------- MARS


@dataclass(frozen=True, kw_only=True)
class MarsParams(HybridParams):
    """Parameters of `mars_adamw`."""

    lr: float = param(3e-3, "learning rate", minimum=0.0)
    betas: tuple[float, float] = below_one((0.95, 0.99), "decay rates of the first and second moment")
    eps: float = param(1e-8, "added to the root of the second moment", minimum=0.0)
    gamma: float = param(0.025, "γ, strength of the variance reduction", minimum=0.0)
    clip_norm: float | None = param(1.0, "largest norm of a corrected gradient; None: no clipping", minimum=0.0)
    recursive: bool = param(False, "c ← g + γ (c − g_prev) instead of the correction by a difference of gradients")
    adamw_lr: float = param(3e-3, "learning rate of the parameters AdamW trains", minimum=0.0)


class MarsAdamW(FrankensteinOptimizer):
    """AdamW on gradients with reduced variance (arXiv 2411.10438, algorithm 2, MARS-approx):

        c = g + γ β₁/(1 − β₁) (g − g_prev), scaled down to norm 1 where it is longer;  then AdamW with c for g

    As in the authors' code, g_prev is 0 before the first step, and 1-D parameters (here: all of kind "vector") are
    trained by plain AdamW. The state "previous" is g_prev, or c − g of the recursive form.
    """

    params_class = MarsParams
    elementwise = True
    needs_kind = True

    def init_state(self, p: Tensor, g: Tensor, group: ParamGroup) -> dict[str, Any]:
        return {"m": zeros(p), "v": zeros(p), "previous": zeros(p)}

    def update(self, batch: Batch, group: ParamGroup) -> None:
        (beta1, beta2), t, g, previous = group["betas"], batch.step, batch.grads, batch["previous"]
        if group["recursive"]:
            c = list(torch._foreach_add(g, previous, alpha=group["gamma"]))
        else:
            c = list(torch._foreach_lerp(g, previous, -group["gamma"] * beta1 / (1 - beta1)))
            torch._foreach_copy_(previous, g)
        if group["clip_norm"] is not None:
            norms = list(torch._foreach_norm(c))
            torch._foreach_div_(norms, group["clip_norm"])
            torch._foreach_clamp_min_(norms, 1.0)
            torch._foreach_div_(c, norms)
        if group["recursive"]:
            torch._foreach_copy_(previous, c)
            torch._foreach_sub_(previous, g)
        batch.decay(group["lr"] * group["weight_decay"])
        adam_moments(batch, beta1, beta2, c)
        denominator = adam_denominator(batch["v"], beta2, group["eps"], t)
        torch._foreach_addcdiv_(batch.params, batch["m"], denominator, -group["lr"] / (1 - beta1**t))


SPECS = (
    OptimizerSpec(
        name="adan",
        family="variance-reduction",
        summary="Adam with Nesterov momentum estimated from gradient differences.",
        reference="Adan: Adaptive Nesterov Momentum Algorithm for Faster Optimizing Deep Models, arXiv 2208.06677",
        params=AdanParams,
        implementation="variance_reduction:Adan",
        state_bytes=floats(4),
    ),
    OptimizerSpec(
        name="ademamix",
        family="variance-reduction",
        summary="Adam with a second, very slow average of the gradient.",
        reference="The AdEMAMix Optimizer: Better, Faster, Older, arXiv 2409.03137",
        params=AdEMAMixParams,
        implementation="variance_reduction:AdEMAMix",
        state_bytes=floats(3),
        small_params={"alpha_warmup": 4, "beta3_warmup": 7},
    ),
    OptimizerSpec(
        name="mars_adamw",
        family="variance-reduction",
        summary="AdamW on gradients corrected by their change since the last step; vectors by plain AdamW.",
        reference="MARS: Unleashing the Power of Variance Reduction for Training Large Models, arXiv 2411.10438",
        params=MarsParams,
        implementation="variance_reduction:MarsAdamW",
        state_bytes=or_adamw(floats(3), frozenset({"vector"})),
        fallback=frozenset({"vector"}),
    ),
)
