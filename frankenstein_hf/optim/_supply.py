"""Batches for optimizers that evaluate the model themselves, in transformers' `Trainer`.

Imported on demand, and skipped when specs are discovered, like `_callbacks`.
"""

from typing import Any

import torch
from transformers import TrainerCallback


class WatchInputs(TrainerCallback):
    """Keeps what the model was last called with while training."""

    def __init__(self) -> None:
        self._inputs: dict[str, Any] = {}
        self._hook: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Watch the model."""

        def keep(module: Any, positional: Any, inputs: dict[str, Any]) -> None:
            if module.training and self.watches(inputs):
                self._inputs = inputs

        self._hook = model.register_forward_pre_hook(keep, with_kwargs=True)

    def watches(self, inputs: dict[str, Any]) -> bool:
        """Whether a call with these inputs is one to keep."""
        return True

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

    That is the loss the model returns; a `compute_loss` of the Trainer's subclass plays no part. The closure computes
    gradients where these are enabled. Those that `Trainer` has computed say which parameters the
    loss depends on and go unused otherwise, clipped or not.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Refuse gradient accumulation (the closure sees one batch) and fp16 (nor does it see the loss scaling)."""
        if args.gradient_accumulation_steps > 1:
            raise ValueError(
                "This optimizer evaluates the loss of one batch many times and cannot accumulate gradients: set "
                f"gradient_accumulation_steps=1 instead of {args.gradient_accumulation_steps}."
            )
        if args.fp16:
            raise ValueError(
                "This optimizer evaluates the loss itself, without the loss scaling of fp16=True: use bf16."
            )
        super().on_train_begin(args, state, control, model=model, **kwargs)

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """The closure of this step."""
        inputs, optimizer = self._inputs, getattr(optimizer, "optimizer", optimizer)
        # `Trainer` divides the sum over this process by the tokens of all; the optimizer then averages over processes
        shared = args.average_tokens_across_devices and inputs.get("num_items_in_batch") is not None
        factor = args.world_size if shared else 1

        def closure() -> Any:
            loss = model(**inputs).loss
            if loss is None:
                raise ValueError(
                    "The model returned no loss for this optimizer to evaluate: labels must be among its inputs, which "
                    "label_smoothing_factor and compute_loss_func take away."
                )
            if torch.is_grad_enabled():
                optimizer.zero_grad()
                (loss * factor).backward()
            return loss.detach() * factor

        optimizer.closure = closure
