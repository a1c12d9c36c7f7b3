"""Callbacks of the training programs: a calm progress display, and signals that keep what was learned."""

import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from .failures import Terminated


class StopOnInterrupt(TrainerCallback):
    """While the context is open, the first Ctrl-C or SIGTERM ends training after the current step with a checkpoint.

    A second one interrupts at once. Outside the main thread signals are left alone.

    Attributes:
        requested: The signal that came, or None.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.requested: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopOnInterrupt":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._request) for number in self.SIGNALS}
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _request(self, signum: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            raise self.interrupt(signum)
        self.requested = signum
        again = "Ctrl-C again" if signum == signal.SIGINT else "A second signal"
        print(f"\nStopping after this step, with a checkpoint. {again} stops at once.", file=sys.stderr, flush=True)

    @staticmethod
    def interrupt(signum: int) -> KeyboardInterrupt:
        """The exception that a signal stands for."""
        return Terminated() if signum == signal.SIGTERM else KeyboardInterrupt()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Save and stop if asked to."""
        if self.requested is not None and state.global_step < state.max_steps:
            control.should_save = True
            control.should_evaluate = False
            control.should_training_stop = True
        return control


class Progress(ProgressCallback):
    """transformers' bars with the loss beside them; where there is no terminal, a line every few seconds instead.

    Attributes:
        bars: Whether somebody sees bars.
        every: Seconds between lines.
    """

    every = 5.0

    def __init__(self, bars: bool) -> None:
        super().__init__()
        self.bars = bars
        self.loss: float | None = None
        self._first = self._last = (0, 0.0)  # (step, when) of the beginning and of the last line

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the bar, at the step training resumes from."""
        self._first = self._last = (state.global_step, time.monotonic())
        if self.bars:
            super().on_train_begin(args, state, control, **kwargs)
            if self.training_bar is not None:
                self.training_bar.set_description("Training")
                self.training_bar.initial = state.global_step
                self.training_bar.update(state.global_step)
                self.current_step = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the bar, or say how far training is."""
        if self.bars:
            super().on_step_end(args, state, control, **kwargs)
        elif state.is_world_process_zero:
            now, ends = time.monotonic(), state.global_step >= state.max_steps
            wait = max(self.every, min((now - self._first[1]) / 60, 6 * self.every))  # longer runs are told less often
            if now - self._last[1] >= wait and not ends:
                print(self._line(state, now), flush=True)
                self._last = (state.global_step, now)

    def _line(self, state: Any, now: float) -> str:
        step, total = state.global_step, state.max_steps
        parts = [f"step {step:,} of {total:,}"]
        if self.loss is not None:
            parts.append(f"training loss {self.loss:.3f}")
        speed = (step - self._last[0]) / max(now - self._last[1], 1e-9)
        parts.append(f"{speed:.3g} steps/s" if speed >= 1 else f"{1 / max(speed, 1e-9):.3g} s a step")
        overall = (step - self._first[0]) / max(now - self._first[1], 1e-9)
        parts.append(f"{duration((total - step) / max(overall, 1e-9))} left")
        return f"  {', '.join(parts)}"

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
        """Show the loss, and keep it for the next line."""
        if not state.is_world_process_zero or not logs:
            return
        if "loss" in logs:
            self.loss = float(logs["loss"])
            if self.training_bar is not None:
                self.training_bar.set_postfix(loss=f"{self.loss:.3f}")
            elif not self.bars and state.global_step >= state.max_steps:
                print(self._line(state, time.monotonic()), flush=True)
        if "eval_loss" in logs and state.global_step and state.global_step != state.max_steps:
            line = f"  step {state.global_step:,} of {state.max_steps:,}: held-out loss {float(logs['eval_loss']):.3f}"
            self.training_bar.write(line) if self.training_bar is not None else print(line, flush=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the bar."""
        if self.bars:
            super().on_train_end(args, state, control, **kwargs)


def duration(seconds: float) -> str:
    """A length of time in words: "40 s", "3 min 20 s", "2 h 5 min"."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def use_progress(trainer: Trainer) -> None:
    """Replace the trainer's display by `Progress`."""
    for stock in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(stock)
    trainer.add_callback(Progress(bars=not trainer.args.disable_tqdm and sys.stderr.isatty()))
