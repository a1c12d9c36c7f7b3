"""Callbacks of the training programs: a calm progress display, and Ctrl-C that keeps what was learned."""

import signal
import sys
import threading
from types import FrameType
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback


class StopOnInterrupt(TrainerCallback):
    """While the context is open, the first Ctrl-C ends training after the current step with a checkpoint.

    A second one interrupts at once. Outside the main thread signals are left alone.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None
        self._installed = False

    def __enter__(self) -> "StopOnInterrupt":
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._request)
            self._installed = True
        return self

    def __exit__(self, *error: Any) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._previous)
            self._installed = False

    def _request(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print("\nStopping after this step, with a checkpoint. Ctrl-C again stops at once.", file=sys.stderr, flush=True)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Save and stop if asked to."""
        if self.requested and state.global_step < state.max_steps:
            control.should_save = True
            control.should_evaluate = False
            control.should_training_stop = True
        return control


class Progress(ProgressCallback):
    """transformers' bars with the loss beside them; where there is no terminal, a line for every log instead."""

    def __init__(self, bars: bool) -> None:
        super().__init__()
        self.bars = bars

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the bar, at the step training resumes from."""
        if self.bars:
            super().on_train_begin(args, state, control, **kwargs)
            if self.training_bar is not None:
                self.training_bar.set_description("Training")
                self.training_bar.initial = state.global_step
                self.training_bar.update(state.global_step)
                self.current_step = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the bar."""
        if self.bars:
            super().on_step_end(args, state, control, **kwargs)

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Move the bar of an evaluation, which disappears when it is done."""
        if self.bars:
            super().on_prediction_step(args, state, control, eval_dataloader=eval_dataloader, **kwargs)
            if self.prediction_bar is not None:
                self.prediction_bar.leave = False
                self.prediction_bar.set_description("Evaluating", refresh=False)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show the loss."""
        if not state.is_world_process_zero or not logs:
            return
        if "loss" in logs and self.training_bar is not None:
            self.training_bar.set_postfix(loss=f"{float(logs['loss']):.3f}")
        elif "loss" in logs:
            print(f"  step {state.global_step}/{state.max_steps}: training loss {float(logs['loss']):.3f}", flush=True)
        if "eval_loss" in logs and state.global_step and state.global_step != state.max_steps:
            line = f"  step {state.global_step}/{state.max_steps}: held-out loss {float(logs['eval_loss']):.3f}"
            self.training_bar.write(line) if self.training_bar is not None else print(line, flush=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the bar."""
        if self.bars:
            super().on_train_end(args, state, control, **kwargs)


def use_progress(trainer: Trainer) -> None:
    """Replace the trainer's display by `Progress`."""
    for stock in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(stock)
    trainer.add_callback(Progress(bars=not trainer.args.disable_tqdm and sys.stderr.isatty()))
