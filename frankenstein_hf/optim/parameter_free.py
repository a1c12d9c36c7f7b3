"""Methods that choose the size of the step themselves: LAMB per tensor, Prodigy for the whole model."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..configuration.component import param
from .base import Batch, FrankensteinOptimizer, ParamGroup, adam_moments, zeros
from .spec import AdamParams, OptimizerSpec, floats

# ---------------------------------------------------------------------- LAMB


@dataclass(frozen=True, kw_only=True)
class LambParams(AdamParams):
    """Parameters of `lamb`."""

    lr: float = param(1e-2, "learning rate, relative to the norm of the tensor", minimum=0.0)
    weight_decay: float = param(0.01, "λ, added to the normalised step before its norm is taken", minimum=0.0)
    eps: float = param(1e-6, "added to the root of the second moment", minimum=0.0)
    adapt_vectors: bool = param(False, "scale the steps of 1-D tensors by their norms too")


class Lamb(FrankensteinOptimizer):
    """Adam's step scaled to the norm of each tensor (arXiv 1904.00962, algorithm 2):

        r = m̂ / (√v̂ + ε) + λ θ;  θ ← θ − η ‖θ‖/‖r‖ r

    The ratio is 1 where a norm is 0, and for 1-D tensors unless `adapt_vectors`: the authors' code leaves norms and
    biases out, whose norms say nothing.
    """

    params_class = LambParams
    elementwise = True

    def init_state(self, p: Tensor, g: Tensor, group: ParamGroup) -> dict[str, Any]:
        return {"m": zeros(p), "v": zeros(p)}

    def update(self, batch: Batch, group: ParamGroup) -> None:
        (beta1, beta2), lr, t = group["betas"], group["lr"], batch.step
        adam_moments(batch, beta1, beta2)
        correction = 1 - beta1**t
        r = list(torch._foreach_sqrt(batch["v"]))
        torch._foreach_mul_(r, correction * (1 - beta2**t) ** -0.5)
        torch._foreach_add_(r, correction * group["eps"])
        r = list(torch._foreach_div(batch["m"], r))
        if group["weight_decay"]:
            torch._foreach_add_(r, batch.params, alpha=group["weight_decay"])
        norms = zip(torch._foreach_norm(batch.params), torch._foreach_norm(r))
        ratios = [
            torch.where((w > 0) & (u > 0), w / u, 1.0) if p.dim() > 1 or group["adapt_vectors"] else torch.ones_like(w)
            for p, (w, u) in zip(batch.params, norms)
        ]
        torch._foreach_addcmul_(batch.params, r, ratios, -lr)


# ---------------------------------------------------------------------- Prodigy


@dataclass(frozen=True, kw_only=True)
class ProdigyParams(AdamParams):
    """Parameters of `prodigy`."""

    lr: float = param(1.0, "factor on the estimated step; schedules act on it", minimum=0.0)
    beta3: float | None = param(None, "decay rate of the sums behind the estimate; None: √β₂", minimum=0.0, maximum=1.0)
    d0: float = param(1e-6, "first estimate of the distance to the solution", minimum=1e-30)
    d_coef: float = param(1.0, "factor on the estimate", minimum=0.0)
    growth_rate: float = param(math.inf, "largest factor by which the estimate grows in one step", minimum=1.0)
    use_bias_correction: bool = param(False, "Adam's bias corrections")
    safeguard_warmup: bool = param(False, "leave the learning rate out of the denominator; for long warm-ups")


class Prodigy(FrankensteinOptimizer):
    """Adam whose step size is an estimate d of the distance to the solution (arXiv 2306.06101, algorithm 4):

        r ← β₃ r + (1 − β₃) η d² ⟨g, θ₀ − θ⟩;  s ← β₃ s + (1 − β₃) η d² g;  d ← max(d, d_coef r/‖s‖₁)
        m ← β₁ m + (1 − β₁) d g;  v ← β₂ v + (1 − β₂) d² g²;  θ ← θ − η d (m/(√v + d ε) + λ θ)

    in the arrangement of the authors' code: sums without the factor (1 − β₃) and divided by d₀, the step taken with
    the d of before. d belongs to the whole model; groups may have different learning rates.
    """

    params_class = ProdigyParams

    def init_state(self, p: Tensor, g: Tensor, group: ParamGroup) -> dict[str, Any]:
        return {"m": zeros(p), "v": zeros(p), "s": zeros(p), "p0": p.clone()}

    def prepare(self, batches: list[tuple[Batch, ParamGroup]]) -> None:
        """Accumulate the moments and sums of all parameters, then renew d."""
        moving = [(batch, group) for batch, group in batches if group["lr"] > 0]
        if not batches:
            return
        first, settings = batches[0][0].params[0], batches[0][1]
        shared = self.shared_state()
        if "d" not in shared:
            d = first.new_tensor(settings["d0"])
            shared.update(d=d, d_max=d.clone(), r=torch.zeros_like(d), k=0)
        # for `update`: the step is taken with the estimate of before
        self._d, self._correction = shared["d"], 1.0
        if not moving:
            return
        shared["k"] += 1
        if settings["use_bias_correction"]:
            beta1, beta2 = settings["betas"]
            self._correction = (1 - beta2 ** shared["k"]) ** 0.5 / (1 - beta1 ** shared["k"])
        d, d0 = shared["d"], settings["d0"]
        r, s_norm = shared["r"] * _beta3(settings), torch.zeros_like(d)
        for batch, group in moving:
            lr, s = group["lr"] * self._correction, batch["s"]
            gd = list(torch._foreach_mul(batch.grads, d))
            dots = [((p0 - p) * g).sum().to(d) for p0, p, g in zip(batch["p0"], batch.params, gd)]
            r = r + torch.stack(dots).sum() * (d * lr / d0)
            adam_moments(batch, group["betas"][0], group["betas"][1], gd)
            torch._foreach_mul_(gd, d / d0 if group["safeguard_warmup"] else d * lr / d0)
            torch._foreach_mul_(s, _beta3(group))
            torch._foreach_add_(s, gd)
            s_norm = s_norm + torch.stack([x.to(d) for x in torch._foreach_norm(s, 1)]).sum()
        found = torch.where(s_norm > 0, settings["d_coef"] * r / s_norm, d)
        d_max = torch.maximum(shared["d_max"], found)
        d = torch.where(d == d0, torch.maximum(d, found), d)
        shared.update(r=r, d_max=d_max, d=torch.minimum(d_max, d * settings["growth_rate"]))

    def update(self, batch: Batch, group: ParamGroup) -> None:
        lr, d = group["lr"] * self._correction, self._d
        if lr == 0:
            return
        if group["weight_decay"]:
            torch._foreach_mul_(batch.params, 1 - group["weight_decay"] * lr * d)
        denominator = list(torch._foreach_sqrt(batch["v"]))
        torch._foreach_add_(denominator, self.shared_state()["d"] * group["eps"])
        torch._foreach_div_(denominator, d)
        torch._foreach_addcdiv_(batch.params, batch["m"], denominator, -lr)


def _beta3(group: ParamGroup) -> float:
    return group["beta3"] if group["beta3"] is not None else group["betas"][1] ** 0.5


SPECS = (
    OptimizerSpec(
        name="lamb",
        family="parameter-free",
        summary="AdamW whose step is scaled to the norm of each tensor; for large batches.",
        reference="Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, arXiv 1904.00962",
        params=LambParams,
        implementation="parameter_free:Lamb",
        state_bytes=floats(2),
    ),
    OptimizerSpec(
        name="prodigy",
        family="parameter-free",
        summary="Adam that estimates its own step size from the distance travelled.",
        reference="Prodigy: An Expeditiously Adaptive Parameter-Free Learner, arXiv 2306.06101",
        params=ProdigyParams,
        implementation="parameter_free:Prodigy",
        state_bytes=floats(4),
        shared_state_bytes=lambda params, shapes: 12,
    ),
)
