"""Schedule-free AdamW, and the callback that has `Trainer` save its averaged weights."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from ..configuration.component import param
from .base import Batch, FrankensteinOptimizer, ParamGroup, adam_denominator, zeros
from .low_precision import widen
from .spec import AdamParams, OptimizerSpec, below_one, floats

logger = logging.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class ScheduleFreeParams(AdamParams):
    """Parameters of `schedulefree_adamw`."""

    lr: float = param(2.5e-3, "learning rate; use no schedule", minimum=0.0)
    betas: tuple[float, float] = below_one((0.9, 0.999), "β of y between z and x, and the second moment's rate")
    warmup_steps: int = param(0, "steps in which the learning rate rises linearly", minimum=0)
    r: float = param(0.0, "later steps weigh tʳ in the average", minimum=0.0)
    weight_lr_power: float = param(2.0, "steps weigh as this power of the largest learning rate so far", minimum=0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.betas[0] == 0:
            raise ValueError(f"parameter 'betas' must begin with a number > 0 and < 1, got {self.betas!r}.")


class ScheduleFreeAdamW(FrankensteinOptimizer):
    """AdamW with averaging instead of a schedule (arXiv 2405.15682, algorithm 1):

        ĝ = g(y)/(√v̂ + ε) + λ y;  z ← z − γ ĝ;  x ← (1 − c) x + c z;  y = (1 − β₁) z + β₁ x

    with γ the warmed-up learning rate and c the step's share in Σ tʳ γ_max^p. As in the authors' code the parameters
    hold y while training, x is not stored, and the decay acts at y.

    `eval()` puts x, the weights to evaluate and to save, into the parameters and keeps y; `train()` brings y back, bit
    for bit, also after a resume. A new optimizer is in training mode. With 16-bit parameters y is rounded to them.
    """

    params_class = ScheduleFreeParams
    elementwise = True
    iterates = ("z",)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """The base's, with the group's running sums."""
        super().add_param_group({"train_mode": True, "k": 0, "lr_max": 0.0, "weight_sum": 0.0, **param_group})

    def init_state(self, p: Tensor, g: Tensor, group: ParamGroup) -> dict[str, Any]:
        return {"z": p.clone(), "v": zeros(p)}

    def prepare(self, batches: list[tuple[Batch, ParamGroup]]) -> None:
        """Advance each group's γ and c once, however many batches it has."""
        if not all(group["train_mode"] for group in self.param_groups):
            raise RuntimeError("The parameters hold the averaged weights: call optimizer.train() before stepping.")
        for group in {id(group): group for _, group in batches}.values():
            group["k"] += 1
            t, warmup = group["k"], group["warmup_steps"]
            group["gamma"] = group["lr"] * (t / warmup if t < warmup else 1.0)
            group["lr_max"] = max(group["lr_max"], group["gamma"])
            weight = t ** group["r"] * group["lr_max"] ** group["weight_lr_power"]
            group["weight_sum"] += weight
            group["c"] = weight / group["weight_sum"] if group["weight_sum"] else 0.0

    def update(self, batch: Batch, group: ParamGroup) -> None:
        (beta1, beta2), gamma, c, v, g = group["betas"], group["gamma"], group["c"], batch["v"], batch.grads
        y, z = batch.params, batch["z"]
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, g, g, 1 - beta2)
        denominator = adam_denominator(v, beta2, group["eps"], batch.step)
        normed = list(torch._foreach_div(g, denominator))
        if group["weight_decay"]:
            torch._foreach_add_(normed, y, alpha=group["weight_decay"])
        torch._foreach_lerp_(y, z, c)
        torch._foreach_add_(y, normed, alpha=gamma * (beta1 * (1 - c) - 1))
        torch._foreach_add_(z, normed, alpha=-gamma)

    # ------------------------------------------------------------------ which weights the parameters hold

    @torch.no_grad()
    def eval(self) -> None:
        """Put the averaged weights x into the parameters."""
        for group in self.param_groups:
            if not group["train_mode"]:
                continue
            group["train_mode"] = False
            for p in group["params"]:
                if state := self.state.get(p):
                    state["y"] = p.detach().clone()
                    # x = y + (1 − 1/β₁)(z − y)
                    p.copy_(widen(p, state).lerp(state["z"], 1 - 1 / group["betas"][0]))

    @torch.no_grad()
    def train(self) -> None:
        """Bring the training weights y back."""
        for group in self.param_groups:
            group["train_mode"] = True
            for p in group["params"]:
                if "y" in (state := self.state.get(p) or {}):
                    p.copy_(state.pop("y"))

    def state_dict(self) -> dict[str, Any]:
        """The base's; warns when the weights that would be saved beside it are not the averaged ones."""
        if self.state and any(group["train_mode"] for group in self.param_groups):
            logger.warning_once(
                "Schedule-free training is being saved while the parameters hold the training weights y. To save the "
                "averaged weights, call optimizer.eval() first, or give Trainer "
                "callbacks=frankenstein_hf.trainer_callbacks('schedulefree_adamw'). Resuming works either way."
            )
        return super().state_dict()


SPECS = (
    OptimizerSpec(
        name="schedulefree_adamw",
        family="schedule-free",
        summary="AdamW with an average of iterates instead of a learning-rate schedule.",
        reference="The Road Less Scheduled, arXiv 2405.15682",
        params=ScheduleFreeParams,
        implementation="schedule_free:ScheduleFreeAdamW",
        state_bytes=floats(2),
        needs="callback",
        callback="_callbacks:EvaluationWeights",
        small_params={"warmup_steps": 3, "r": 1.0},
    ),
)
