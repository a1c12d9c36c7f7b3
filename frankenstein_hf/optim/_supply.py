"""Batches for optimizers that evaluate the model themselves, in transformers' `Trainer`.

Imported on demand, and skipped when specs are discovered, like `_callbacks`.
"""

from typing import Any

from transformers import TrainerCallback


class WatchInputs(TrainerCallback):
    """Keeps what the model was last called with while training."""

    def __init__(self) -> None:
        self._inputs: dict[str, Any] = {}
        self._hook: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Watch the model."""

        def keep(module: Any, positional: Any, inputs: dict[str, Any]) -> None:
            if module.training:
                self._inputs = inputs

        self._hook = model.register_forward_pre_hook(keep, with_kwargs=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop watching."""
        if self._hook is not None:
            self._hook.remove()
        self._inputs, self._hook = {}, None


class SupplyCurvature(WatchInputs):
    """Call `optimizer.estimate` before the updates where it is due, on the batch the model has just seen.

    With gradient accumulation that is the last of the accumulated batches.
    """

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Gradients are there, the update is not."""
        optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper
        if hasattr(optimizer, "estimate") and self._inputs and optimizer.due(state.global_step):
            optimizer.estimate(model, self._inputs, state.global_step)


class SupplyClosure(WatchInputs):
    """Set `optimizer.closure` to the loss on the batch the model has just seen, since `Trainer` passes none.

    `Trainer` also computes the gradients, which go unused.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Refuse gradient accumulation: the closure sees one batch."""
        if args.gradient_accumulation_steps > 1:
            raise ValueError(
                "This optimizer evaluates the loss of one batch many times and cannot accumulate gradients: set "
                f"gradient_accumulation_steps=1 instead of {args.gradient_accumulation_steps}."
            )
        super().on_train_begin(args, state, control, model=model, **kwargs)

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """The closure of this step."""
        inputs = self._inputs
        getattr(optimizer, "optimizer", optimizer).closure = lambda: model(**inputs).loss
