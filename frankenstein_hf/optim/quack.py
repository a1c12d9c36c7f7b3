"""QuacK: learning rates of query and key weights that shrink as the other side grows."""

from dataclasses import dataclass
from typing import Any

import torch

from ..configuration.component import Params, param
from .spec import StabilizerSpec
from .stabilizer import ParamGroups, Stabilizer


@dataclass(frozen=True, kw_only=True)
class QuacKParams(Params):
    """Parameters of `quack`."""

    tau: float = param(1.0, "τ, learning rate of query and key weights relative to the others'", minimum=0.0)


class QuacK(Stabilizer):
    """Before every step, in every layer (arXiv 2511.21377):

        η_Q = τ η ‖W_K‖₀/‖W_K‖;  η_K = τ η ‖W_Q‖₀/‖W_Q‖

    with Frobenius norms, ‖·‖₀ those at the start. That keeps the first-order change of a logit,
    (q Δkᵀ + Δq kᵀ)/√d, from growing with the weights.

    Each such weight has a parameter group of its own, whose `lr` is η between steps, where schedulers act on it,
    and the rate above during one (also after an error in one, until the next). The groups also keep ‖·‖₀ as
    "initial_norm" and are saved with the optimizer. A weight that is or was all zeros leaves the other's learning
    rate at τ η. Reading the norms waits for the device once a step.
    """

    name = "quack"

    def regroup(self, groups: ParamGroups) -> ParamGroups:
        """Every query and key weight in a group of its own, "partner" of it being the other side's number."""
        paired = {
            id(weight): (2 * n + side, 2 * n + 1 - side)
            for n, layer in enumerate(self.layers)
            for side, weight in enumerate((layer.query.weight, layer.key.weight))
        }
        result = []
        for group in groups:
            if rest := [(name, p) for name, p in group["params"] if id(p) not in paired]:
                result.append({**group, "params": rest})
            for name, p in group["params"]:
                if id(p) in paired:
                    side, partner = paired[id(p)]
                    own = {"side": side, "partner": partner, "initial_norm": norm(p).item()}
                    result.append({**group, "params": [(name, p)], **own})
        return result

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        self._rates: list[tuple[dict[str, Any], float, float]] = []  # group, η, and what it is during the step
        optimizer.register_step_pre_hook(self._balance)
        optimizer.register_step_post_hook(self._restore)

    @torch.no_grad()
    def _balance(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._restore()  # if the last step was left with an error
        sides = {group["side"]: group for group in optimizer.param_groups if "side" in group}
        now = torch.stack([norm(group["params"][0]).cpu() for group in sides.values()]).tolist()
        growth = {
            side: new / group["initial_norm"]
            for (side, group), new in zip(sides.items(), now)
            if new > 0 and group["initial_norm"] > 0
        }
        for group in sides.values():
            during = group["lr"] * self.params.tau / growth.get(group["partner"], 1.0)
            self._rates.append((group, group["lr"], during))
            group["lr"] = during

    def _restore(self, *_: Any) -> None:
        for group, lr, during in self._rates:
            if group["lr"] == during:  # else, after an error, somebody has set it since
                group["lr"] = lr
        self._rates = []


def norm(weight: torch.Tensor) -> torch.Tensor:
    """‖W‖_F in fp64."""
    return torch.linalg.vector_norm(weight.detach(), dtype=torch.float64)


STABILIZER_SPECS = (
    StabilizerSpec(
        name="quack",
        family="stabilizer",
        summary="Learning rates of query and key weights that fall as the norm of the other side grows.",
        reference="Controlling changes to attention logits, arXiv 2511.21377",
        params=QuacKParams,
        implementation="quack:QuacK",
    ),
)
