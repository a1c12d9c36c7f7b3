"""What methods that evaluate the loss themselves share, and EA4LLM: an evolution strategy that needs no gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from transformers.utils import logging

from ..configuration.component import param
from .base import FrankensteinOptimizer
from .exact_state import seeded_generator
from .low_precision import widen
from .spec import OptimizerParams, OptimizerSpec, floats

logger = logging.get_logger(__name__)


class ClosureMethod(FrankensteinOptimizer):
    """A method whose `step` needs a closure that evaluates the loss of one batch, as often as asked.

    torch's usual closure will do: zero the gradients, compute the loss, call backward, return the loss. It is called
    often, and mostly for the loss alone; one that calls backward only if `torch.is_grad_enabled()` saves that time.
    Dropout makes the evaluations of a batch differ; leave it off.
    """

    closure: Callable[[], Any] | None = None  # for callers of `step` that have none: transformers' Trainer
    _always_differentiates = False  # whether the closure has turned out to call backward in any case

    def evaluate(self, closure: Callable[[], Any]) -> Tensor:
        """The loss, without gradients if the closure can do without."""
        if not self._always_differentiates:
            try:
                with torch.no_grad():
                    return torch.as_tensor(closure()).detach()
            except RuntimeError as error:
                if "does not require grad" not in str(error):  # what autograd says to backward() without a graph
                    raise
            self._always_differentiates = True
            logger.warning_once(
                f"{type(self).__name__} often needs the loss alone, but the closure always calls backward(). Put that "
                "behind `if torch.is_grad_enabled():` to save its time."
            )
        with torch.enable_grad():
            return torch.as_tensor(closure()).detach()

    def required(self, closure: Callable[[], Any] | None) -> Callable[[], Any]:
        """The closure given to `step`, else the attribute.

        Raises:
            RuntimeError: Neither is there.
        """
        closure = closure or self.closure
        if closure is None:
            name = type(self).__name__.lower()
            raise RuntimeError(
                f"{name} evaluates the loss many times a step: call optimizer.step(closure), or give transformers' "
                f"Trainer callbacks=frankenstein_hf.trainer_callbacks({name!r})."
            )
        return closure


def averaged(x: Tensor) -> Tensor:
    """`x`, averaged over processes in place."""
    if distributed.is_initialized():
        distributed.all_reduce(x)
        x /= distributed.get_world_size()
    return x


@dataclass(frozen=True, kw_only=True)
class EA4LLMParams(OptimizerParams):
    """Parameters of `ea4llm`."""

    lr: float = param(5e-4, "α, step size", minimum=0.0)
    population: int = param(30, "N, perturbed models evaluated in a step", minimum=2)
    sigma: float = param(1e-3, "σ, standard deviation of a perturbation", minimum=1e-12)
    shaping: str = param("zscore", "rewards to weights: standardised, or centred ranks", choices=("zscore", "rank"))
    antithetic: bool = param(False, "evaluate every noise with both signs; N/2 noises")
    nes: bool = param(False, "divide the direction by σ")
    seed: int = param(0, "of the noises", minimum=0)


class EA4LLM(ClosureMethod):
    """Noises weighted by how well they do (EA4LLM, zeroth-order pre-training), for fitness F = −loss:

        r_j = F(θ + σ ε_j), ε_j ~ N(0, I), j = 1 … N
        w_j = (r_j − r̄)/std(r), or rank(r_j) − (N − 1)/2;  θ ← (1 − α λ) θ + α/N Σ_j w_j ε_j

    The loss is that of the closure, which is called N times without gradients on the same batch; with several processes
    rewards are averaged. Noises are drawn again from the seed for the update, so that no state but a counter remains;
    while a step lasts a copy of the weights does, from which they are restored to the bit. std is that of the
    population, and rewards that are all equal move nothing. A loss that is not finite counts as the worst of the
    others; a step without any other is left out and counted. Weight decay is an addition of the project's source.
    """

    params_class = EA4LLMParams

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step.

        Args:
            closure: Computes and returns the loss of the batch; called N times, with gradients disabled.

        Returns:
            The mean of the losses.

        Raises:
            RuntimeError: No closure.
        """
        closure = self.required(closure)
        everything = [(p, group, index) for group in self.param_groups for index, p in enumerate(group["params"])]
        params = [(i, p, group) for i, (p, group, _) in enumerate(everything) if p.requires_grad]
        first, shared = self.param_groups[0], self.shared_state()
        t = shared["step"] = shared.get("step", 0) + 1
        originals = [p.clone() for _, p, _ in params]
        wides = [widen(original, self.state.get(p, {})) for original, (_, p, _) in zip(originals, params)]
        try:
            losses = []
            for j in range(first["population"]):
                for (i, p, group), wide in zip(params, wides):
                    p.copy_(wide + group["sigma"] * noise(wide, first, t, j, i))
                losses.append(self.evaluate(closure).to(everything[0][0].device))
        finally:
            for (_, p, _), original in zip(params, originals):
                p.copy_(original)
        rewards = -torch.stack(losses)
        rewards = averaged(rewards.to(torch.promote_types(rewards.dtype, torch.float32)))
        mean = -rewards.mean()
        if first["nonfinite"] != "take" and not (finite := rewards.isfinite()).all():
            if not finite.any() or first["nonfinite"] == "raise":
                self.leave_out([(i, index, group) for i, (_, group, index) in enumerate(everything)], "loss around")
                return mean
            rewards = torch.where(finite, rewards, rewards[finite].min())
        weights = shape(rewards, first["shaping"])
        self.count_rounding()
        for (i, p, group), wide in zip(params, wides):
            direction = torch.zeros_like(wide)
            for j in range(first["population"]):
                direction += weights[j] * noise(wide, first, t, j, i)
            alpha = group["lr"] / first["population"] / (group["sigma"] if group["nes"] else 1.0)
            self.write(p, wide * (1 - group["lr"] * group["weight_decay"]) + alpha * direction, group, i)
        return mean


def noise(p: Tensor, group: dict[str, Any], t: int, j: int, i: int) -> Tensor:
    """ε of member j for parameter i in step t, in p's dtype, fp32 or wider."""
    member, sign = (j // 2, 1 - 2 * (j % 2)) if group["antithetic"] else (j, 1)
    generator = seeded_generator(group["seed"], t, member, i, device=p.device)
    return torch.randn(p.shape, generator=generator, dtype=p.dtype, device=p.device).mul_(sign)


def shape(rewards: Tensor, how: str) -> Tensor:
    """Weights of the members from their rewards."""
    if how == "rank":
        return rewards.argsort().argsort().to(rewards.dtype) - (len(rewards) - 1) / 2
    centred = rewards - rewards.mean()
    std = centred.square().mean().sqrt()
    return torch.where(std > 0, centred / std, 0.0)


SPECS = (
    OptimizerSpec(
        name="ea4llm",
        family="evolution",
        summary="An evolution strategy: forward passes of perturbed models, no gradients, no state. Learns very "
        "slowly: a few hundred steps barely move the loss of even a small model.",
        reference="EA4LLM: A Gradient-Free Approach to Large Language Model Optimization via Evolutionary Algorithms, "
        "arXiv 2510.10603",
        params=EA4LLMParams,
        implementation="evolution:EA4LLM",
        state_bytes=floats(0),
        needs="callback",
        callback="_supply:SupplyClosure",
        closure=True,
        gradient=False,
        small_params={"population": 4},
    ),
)
