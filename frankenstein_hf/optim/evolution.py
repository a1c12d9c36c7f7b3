"""What methods that evaluate the loss themselves share, and EA4LLM: an evolution strategy that needs no gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from ..configuration.component import param
from .base import FrankensteinOptimizer, seeded_generator
from .spec import OptimizerParams, OptimizerSpec, floats


class ClosureMethod(FrankensteinOptimizer):
    """A method whose `step` needs a closure that evaluates the loss of one batch, as often as asked.

    Called with gradients enabled, the closure must compute them too; called without, the loss is enough. Dropout makes
    the evaluations of a batch differ; leave it off.
    """

    closure: Callable[[], Any] | None = None  # for callers of `step` that have none: transformers' Trainer

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
    population, and rewards that are all equal move nothing. Weight decay is an addition of the project's source.
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
        everything = [(p, group) for group in self.param_groups for p in group["params"]]
        params = [(i, p, group) for i, (p, group) in enumerate(everything) if p.requires_grad]
        first, shared = self.param_groups[0], self.shared_state()
        t = shared["step"] = shared.get("step", 0) + 1
        originals = [p.clone() for _, p, _ in params]
        try:
            losses = []
            for j in range(first["population"]):
                for (i, p, group), original in zip(params, originals):
                    p.copy_(original + group["sigma"] * noise(original, first, t, j, i))
                losses.append(torch.as_tensor(closure(), device=everything[0][0].device).detach())
        finally:
            for (_, p, _), original in zip(params, originals):
                p.copy_(original)
        rewards = -torch.stack(losses)
        rewards = averaged(rewards.to(torch.promote_types(rewards.dtype, torch.float32)))
        weights = shape(rewards, first["shaping"])
        for (i, p, group), original in zip(params, originals):
            direction = torch.zeros_like(original, dtype=torch.promote_types(original.dtype, torch.float32))
            for j in range(first["population"]):
                direction += weights[j] * noise(original, first, t, j, i)
            alpha = group["lr"] / first["population"] / (group["sigma"] if group["nes"] else 1.0)
            p.copy_(original * (1 - group["lr"] * group["weight_decay"]) + alpha * direction)
        return -rewards.mean()


def noise(p: Tensor, group: dict[str, Any], t: int, j: int, i: int) -> Tensor:
    """ε of member j for parameter i in step t, in fp32 or wider."""
    dtype = torch.promote_types(p.dtype, torch.float32)
    member, sign = (j // 2, 1 - 2 * (j % 2)) if group["antithetic"] else (j, 1)
    generator = seeded_generator(group["seed"], t, member, i, device=p.device)
    return torch.randn(p.shape, generator=generator, dtype=dtype, device=p.device).mul_(sign)


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
        summary="An evolution strategy: forward passes of perturbed models, no gradients, no state.",
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
