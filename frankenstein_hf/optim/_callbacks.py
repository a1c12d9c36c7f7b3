"""What some optimizers need from transformers' `Trainer`.

Imported on demand, and skipped when specs are discovered: that may happen while transformers imports its own modules.
"""

from typing import Any

from transformers import TrainerCallback


class EvaluationWeights(TrainerCallback):
    """Have the weights saved that an optimizer evaluates with, if these differ from the ones it trains with.

    The weights of a checkpoint are written between `on_step_end` (or `on_epoch_end`) and `on_save`; `Trainer` itself
    calls `optimizer.eval()` for evaluations and `optimizer.train()` before the next step.
    """

    def _before_saving(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if (control.should_save or control.should_training_stop) and hasattr(optimizer, "eval"):
            optimizer.eval()

    on_step_end = on_epoch_end = _before_saving

    def on_train_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Leave the model with the weights to use."""
        if hasattr(optimizer, "eval"):
            optimizer.eval()
