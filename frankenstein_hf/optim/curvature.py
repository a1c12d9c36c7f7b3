"""Sophia: momentum divided by an estimate of the Hessian's diagonal, which the training loop supplies."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import cross_entropy
from transformers.utils import logging

from ..configuration.component import param
from .base import Batch, FrankensteinOptimizer, ParamGroup, zeros
from .exact_state import seeded_generator
from .low_precision import DTYPES
from .screening import usable
from .spec import OptimizerParams, OptimizerSpec, below_one, floats

logger = logging.get_logger(__name__)

IGNORED = -100  # label of positions that do not count


@dataclass(frozen=True, kw_only=True)
class SophiaParams(OptimizerParams):
    """Parameters of `sophia`."""

    lr: float = param(6e-4, "learning rate", minimum=0.0)
    betas: tuple[float, float] = below_one((0.96, 0.99), "decay rates of momentum and curvature")
    eps: float = param(1e-12, "least denominator", minimum=1e-30)
    rho: float = param(0.05, "γ, share of the curvature that divides; 0.01 for Hutchinson's estimate", minimum=0.0)
    update_k: int = param(10, "k, steps between estimates of the curvature", minimum=1)
    estimator: str = param(
        "gauss_newton", "Gauss–Newton–Bartlett or Hutchinson", choices=("gauss_newton", "hutchinson")
    )
    seed: int = param(0, "of the estimates", minimum=0)


class Sophia(FrankensteinOptimizer):
    """Clipped, curvature-scaled momentum (arXiv 2305.14342, algorithm 3):

        m ← β₁ m + (1 − β₁) g;  every k steps  h ← β₂ h + (1 − β₂) ĥ;  θ ← θ − η λ θ − η clip(m / max(γ h, ε), ±1)

    ĥ comes from `estimate(model, inputs)` before `step()`: transformers' `Trainer` does that with
    `callbacks=fhf.trainer_callbacks("sophia")`, any other loop by itself. Until it has been called h is 0 and every
    entry moves by η along the sign of its momentum, as in the authors' code; after k such steps a warning says so.
    """

    params_class = SophiaParams
    elementwise = True

    def init_state(self, p: Tensor, g: Tensor, group: ParamGroup) -> dict[str, Any]:
        return {"m": zeros(p), "h": zeros(p)}

    def update(self, batch: Batch, group: ParamGroup) -> None:
        batch.decay(group["lr"] * group["weight_decay"])
        torch._foreach_lerp_(batch["m"], batch.grads, 1 - group["betas"][0])
        denominator = list(torch._foreach_mul(batch["h"], group["rho"]))
        torch._foreach_maximum_(denominator, group["eps"])
        if batch.step == group["update_k"] and not any(h.any() for h in batch["h"]):
            logger.warning_once(
                "sophia has had no estimate of the curvature so far and only follows the sign of its momentum: call "
                "optimizer.estimate(model, inputs) before steps, or give transformers' Trainer "
                "callbacks=frankenstein_hf.trainer_callbacks('sophia')."
            )
        ratio = list(torch._foreach_div(batch["m"], denominator))
        torch._foreach_maximum_(ratio, -1.0)
        torch._foreach_minimum_(ratio, 1.0)
        torch._foreach_add_(batch.params, ratio, alpha=-group["lr"])

    def due(self, step: int) -> bool:
        """Whether to call `estimate` before the update number `step`, from 0."""
        return step % self.param_groups[0]["update_k"] == 0

    def estimate(self, model: nn.Module, inputs: Mapping[str, Any], step: int) -> None:
        """Let ĥ on `inputs` enter h; after `backward()`, before `step()`.

        Args:
            model: Of whose parameters these are; called as `model(**inputs)`, returns `logits` (and `loss` if
                Hutchinson's estimate is wanted).
            inputs: A batch. Positions whose label is −100, or whose attention mask is 0, are left out.
            step: Number of updates so far; decides the random numbers.
        """
        first, rank = self.param_groups[0], distributed.get_rank() if distributed.is_initialized() else 0
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not params:
            return
        generator = seeded_generator(first["seed"], step, rank, device=params[0].device)
        function = hutchinson if first["estimator"] == "hutchinson" else gauss_newton_bartlett
        with torch.enable_grad():
            estimates = dict(zip(params, function(model, inputs, params, generator)))
        self.supply(estimates)

    @torch.no_grad()
    def supply(self, estimates: Mapping[Tensor, Tensor | None]) -> None:
        """h ← β₂ h + (1 − β₂) ĥ with estimates by parameter, averaged over processes; None counts as 0.

        Estimates that are not finite are left out, as gradients are: see `screen`.
        """
        places = [(index, group, p) for group in self.param_groups for index, p in enumerate(group["params"])]
        found = []
        for position, (index, group, p) in enumerate(places):
            if p not in estimates or p.grad is None:
                continue
            h_hat = torch.zeros_like(p) if (estimate := estimates[p]) is None else estimate
            h_hat = (h_hat.float() if h_hat.dtype in DTYPES else h_hat.clone()).contiguous()
            if distributed.is_initialized():
                distributed.all_reduce(h_hat)
                h_hat /= distributed.get_world_size()
            found.append((position, index, group, p, h_hat))
        good = usable([h_hat for *_, h_hat in found])
        bad = [place for place, ok in zip(found, good) if not ok and place[2]["nonfinite"] != "take"]
        self.leave_out([place[:3] for place in bad], "curvature")
        for _, _, group, p, h_hat in (place for place in found if not any(place is one for one in bad)):
            h = self.state_of(p, group)["h"]
            h.lerp_(h_hat.to(h), 1 - group["betas"][1])


def gauss_newton_bartlett(
    model: nn.Module, inputs: Mapping[str, Any], params: list[Tensor], generator: torch.Generator
) -> list[Tensor | None]:
    """B ∇L̂ ⊙ ∇L̂ with L̂ the mean loss of B labels drawn from the model's own prediction (algorithm 2)."""
    logits = model(
        **{key: value for key, value in inputs.items() if key not in ("labels", "num_items_in_batch")}
    ).logits
    logits = logits.float().flatten(0, -2)
    drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator).squeeze(1)
    for name, absent in (("labels", IGNORED), ("attention_mask", 0)):
        marks = inputs.get(name)
        if marks is not None and marks.numel() == drawn.numel():
            drawn = drawn.masked_fill(marks.flatten() == absent, IGNORED)
    counted = (drawn != IGNORED).sum()
    loss = cross_entropy(logits, drawn, ignore_index=IGNORED, reduction="sum") / counted.clamp(min=1)
    gradients = torch.autograd.grad(loss, params, allow_unused=True)
    return [None if g is None else g.square() * counted for g in gradients]


def hutchinson(
    model: nn.Module, inputs: Mapping[str, Any], params: list[Tensor], generator: torch.Generator
) -> list[Tensor | None]:
    """u ⊙ (∇²L u) with u ~ N(0, I) (algorithm 1); needs a model that can be differentiated twice."""
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        loss = model(**{key: value for key, value in inputs.items() if key != "num_items_in_batch"}).loss
        gradients = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
        us = [torch.randn(p.shape, generator=generator, dtype=p.dtype, device=p.device) for p in params]
        product = sum((g * u).sum() for g, u in zip(gradients, us) if g is not None and g.requires_grad)
        products = torch.autograd.grad(product, params, allow_unused=True)  # type: ignore[arg-type]
    return [None if h is None else u * h for u, h in zip(us, products)]


SPECS = (
    OptimizerSpec(
        name="sophia",
        family="second-order",
        summary="Momentum divided by an estimate of the Hessian's diagonal, clipped element by element.",
        reference="Sophia: A Scalable Stochastic Second-order Optimizer for Language Model Pre-training, "
        "arXiv 2305.14342",
        params=SophiaParams,
        implementation="curvature:Sophia",
        state_bytes=floats(2),
        needs="callback",
        callback="_supply:SupplyCurvature",
        small_params={"update_k": 2},
    ),
)
