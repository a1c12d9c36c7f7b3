"""`max_stable_lr` while transformers' `Trainer` trains."""

import math
from statistics import median
from typing import Any

from ..optim._supply import WatchInputs
from .curvature import METHODS, Loss, StableStep, rehearsed, stable_step
from .snapshot import unchanged


class StableLearningRate(WatchInputs):
    """Probes the largest stable learning rate along the optimizer's own update every few steps, and logs it.

    The update is what the optimizer makes of the gradients it is about to use, clipped and accumulated as they are;
    slope and curvature are those of the batch the model has seen last, without dropout. Training goes on as it would
    have. A probe costs about as much as three to five steps.

    With every log of the Trainer, of the probes since the last one: `max_stable_lr` (median), `stable_share` (of probes
    whose stable learning rate was above the one in use) and `ascent_share` (of probes whose update did not descend;
    they count as 0 and as not stable).

    Args:
        every: Optimizer steps from one probe to the next.
        method: See `max_stable_lr`.
        loss: `(model, inputs) -> loss`, for models whose own is not what the Trainer minimises.

    Attributes:
        probes: All of them, as (global step, StableStep).
    """

    def __init__(self, every: int = 10, method: str = "auto", loss: Loss | None = None) -> None:
        super().__init__()
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a whole number of steps from 1, got {every!r}.")
        if method not in METHODS:
            raise ValueError(f"method must be one of {METHODS}, got {method!r}.")
        self.every, self.method, self.loss = every, method, loss
        self.probes: list[tuple[int, StableStep]] = []
        self._logged = 0

    def watches(self, inputs: dict[str, Any]) -> bool:
        """Some optimizers call the model too, for curvature, without labels."""
        return self.loss is not None or inputs.get("labels") is not None

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Gradients are there, the update is not."""
        inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper
        if state.global_step % self.every or not any(group["lr"] > 0 for group in inner.param_groups):
            return
        if not self._inputs:
            raise ValueError(
                "StableLearningRate has seen no call of the model with labels, which label_smoothing_factor and "
                "compute_loss_func take away: give it loss=(model, inputs) -> loss."
            )
        inputs = {key: value for key, value in self._inputs.items() if key != "num_items_in_batch"}
        with unchanged(model, inner):
            update, lr = rehearsed(inner, inner.closure if hasattr(inner, "closure") else None)
        found = stable_step(model, update, lr, inputs, loss=self.loss, method=self.method)
        self.probes.append((state.global_step, found))

    def summary(self, since: int = 0) -> dict[str, float]:
        """Median and shares of the probes from number `since` on; empty without probes."""
        steps = [step for _, step in self.probes[since:]]
        if not steps:
            return {}
        return {
            "max_stable_lr": median(step.max_lr for step in steps),
            "stable_share": sum(step.is_stable for step in steps) / len(steps),
            "ascent_share": sum(not step.descends for step in steps) / len(steps),
        }

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the probes since the last log."""
        found, self._logged = self.summary(self._logged), len(self.probes)
        # JSON, which the Trainer's state is saved as, has no infinity
        found = {key: value for key, value in found.items() if math.isfinite(value)}
        for target in (logs, state.log_history[-1] if state.log_history else None):
            if target is not None:
                target.update(found)
