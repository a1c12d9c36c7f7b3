"""What the training programs in `scripts/` share: the run itself, its results and what it leaves."""

import abc
import contextlib
import json
import logging
import math
import platform
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase, Trainer, TrainerState

from ..configuration.stack import FRANKENSTEIN_VERSION
from ..data.atomic import write_json, write_text
from ..hub.cards import is_hub_name, render
from ..hub.foreign import Markdown, python
from .callbacks import StopOnInterrupt, use_progress
from .checkpoints import (
    STATE,
    Manifests,
    check_optimizer,
    checkpoints,
    clear_away,
    last_complete_checkpoint,
    save_atomically,
)
from .failures import RunFailed, no_room
from .preparation import Preparation
from .recipe import recipe
from .results import LOSS_PICTURE, Results, draw_loss, loss_curve

METRICS = "metrics.json"


class Run(Preparation):
    """One run of a training program. All that can be checked is checked when it is built.

    A program derives from it and says what its data is (`prepare_data`), what its results mean (`baseline`,
    `result_line`) and, where the loss is not all, how it evaluates (`evaluate`).
    """

    baseline_name: str  # key of the baseline in `metrics`
    baseline_words: str
    embedded_language: str | None = None  # of the data that is used when none is named

    # ------------------------------------------------------------------ what a program says

    @abc.abstractmethod
    def prepare_data(self) -> tuple[PreTrainedTokenizerBase, Any, Any]:
        """The tokenizer, and the datasets to train and evaluate on."""

    @abc.abstractmethod
    def baseline(self, trainer: Trainer) -> dict[str, float]:
        """What the evaluation gives for knowing next to nothing."""

    def evaluate(self, trainer: Trainer) -> dict[str, float]:
        """The results on the held-out data, "loss" among them."""
        skipped = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
        metrics = {key.removeprefix("eval_"): value for key, value in trainer.evaluate().items() if key != "epoch"}
        return {key: value for key, value in metrics.items() if key not in skipped}

    def result_line(self, metrics: dict[str, Any]) -> str:
        """Results in words."""
        words = {"loss": "held-out loss"}
        return ", ".join(f"{words.get(key, key.replace('_', ' '))} {value:.3f}" for key, value in metrics.items())

    def trainer(self, model: Any, train: Any, held_out: Any, **more: Any) -> Trainer:
        """What trains the model; `more` are further arguments of transformers' `Trainer`."""
        return Trainer(
            model=model,
            args=self.args,
            train_dataset=train,
            eval_dataset=held_out,
            processing_class=self.tokenizer,
            **more,
        )

    # ------------------------------------------------------------------ the run

    def execute(self) -> dict[str, Any]:
        """All of the run: data, model, training, results; see `train_and_evaluate`."""
        _, train, held_out = self.prepare_data()
        return self.train_and_evaluate(self.trainer(self.build_model(), train, held_out))

    def train_and_evaluate(self, trainer: Trainer) -> dict[str, Any]:
        """Evaluate, train, save, evaluate again, write `metrics.json`; returns what it holds.

        Raises:
            BadInput: Another run writes into the output folder.
            KeyboardInterrupt: Ctrl-C or SIGTERM (`Terminated`); a complete checkpoint has been written unless it came
                twice.
            RunFailed: The disk is full.
        """
        output = Path(self.args.output_dir or "")
        with self.lock if self.args.process_index == 0 else contextlib.nullcontext():
            if self.lock.left:
                self.say(f"An earlier run was killed here: {self.lock.left}.")
            try:
                return self._train_and_evaluate(trainer, output)
            except Exception as error:
                if not no_room(error, output):
                    raise
                raise RunFailed(self._full_disk(output)) from error

    def _full_disk(self, output: Path) -> str:
        """Clear away what did not fit; what to say about it."""
        said = [f"The disk (or the quota) of {output} is full."]
        if self.args.process_index == 0:
            said += [f"{line}." for line in clear_away(output)]
        last = last_complete_checkpoint(output)
        said.append(f"Safe is {last.name}." if last else "There was no complete checkpoint yet.")
        return " ".join((*said, "Make room and run again" + (" to continue from there." if last else ".")))

    def _train_and_evaluate(self, trainer: Trainer, output: Path) -> dict[str, Any]:
        args = self.args
        use_progress(trainer)
        trainer.add_callback(Manifests())
        if args.do_train and self.checkpoint is not None:
            check_optimizer(trainer, self.checkpoint)
        transformers.logging.disable_progress_bar()  # one per checkpoint, through the middle of the training bar
        if args.do_train and args.process_index == 0:
            if args.overwrite_output_dir:
                for path in checkpoints(output):
                    shutil.rmtree(path)
                for name in (METRICS, LOSS_PICTURE):
                    (output / name).unlink(missing_ok=True)
            for line in clear_away(output):
                self.say(line)
        if args.process_index == 0:
            for name, text in self.leaves.items():
                write_text(output / name, text)
        if args.do_eval:
            self.metrics[self.baseline_name] = self.baseline(trainer)
            self.metrics["before"] = self.evaluate(trainer)
            self.say(f"Before: {self.result_line(self.metrics['before'])}")
        if args.do_train:
            if self._is_finished(trainer):
                self._take_up(trainer)
            else:
                if self.checkpoint is not None:
                    self.say(f"Resuming from {self.checkpoint}")
                self._train(trainer)
            save_atomically(trainer, output)
        if args.do_eval:
            if args.do_train:
                self.metrics["after"] = self.evaluate(trainer)
                self.say(f"After:  {self.result_line(self.metrics['after'])}")
            self.say(f"        {self.baseline_words}: {self.result_line(self.metrics[self.baseline_name])}")
        if args.do_train:
            self.metrics["recipe"] = recipe(trainer)
        self.metrics["objective"] = self.objective
        self.metrics["seconds"] = round(time.monotonic() - self._start, 1)
        self.metrics["versions"] = {
            "frankenstein_hf": FRANKENSTEIN_VERSION,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        }
        if trainer.is_world_process_zero():
            self._write_results(trainer, output)
        if args.push_to_hub:
            data = self.data_args
            card: dict[str, Any] = {"tasks": self.task}
            if self.model_args.model_name_or_path:
                card["finetuned_from"] = self.model_args.model_name_or_path
            if data.dataset_name:
                card |= {"dataset": data.dataset_name}
                card |= {"dataset_tags": data.dataset_name} if is_hub_name(data.dataset_name) else {}
            trainer.push_to_hub(**card)
        if args.do_train:
            self.say(f"The model is in {output}. To use it:\n{self.usage(output)}")
        return self.metrics

    def languages(self) -> tuple[str, ...]:
        """The languages the user named, or that of the data that comes along."""
        named, data = self.model_args.languages(), self.data_args
        embedded = not (data.dataset_name or data.train_file) and self.embedded_language
        return named or ((embedded,) if embedded else ())

    def usage(self, output: Path) -> str:
        """A command that uses the model."""
        return in_shell(
            f"import frankenstein_hf; from transformers import pipeline; "
            f"print(pipeline({python(self.task)}, {python(str(output))})({_literal(self.example())}))"
        )

    def example(self) -> Any:
        """What to try the model on."""
        return "Try it on a text of your own."

    def sample(self, trainer: Trainer) -> Markdown:
        """What the model makes of held-out data, for the card; "" for nothing to show."""
        return Markdown("")

    def _write_results(self, trainer: Trainer, output: Path) -> None:
        """`metrics.json`, the loss curve, and both in the card of a model that was trained."""
        assert self.source is not None
        picture = None
        if self.args.do_train:
            self.metrics["curve"] = loss_curve(trainer.state.log_history, self.metrics)
            title = f"{self.task}, trained on {self.source.name.partition(', sha256')[0]}"
            baseline = self.metrics.get(self.baseline_name, {}).get("loss")
            picture, missing = draw_loss(
                self.metrics["curve"], output / LOSS_PICTURE, title, baseline, self.baseline_words
            )
            if missing:
                self.say(missing)
        write_json(output / METRICS, self.metrics)
        if self.args.do_train:
            source, model_args = self.source, self.model_args
            results = Results(
                self.metrics, self.baseline_name, self.baseline_words, self.task, source.name,
                self.data_args.dataset_name, picture, source.words, source.held_out, self.sample(trainer),
                model_args.license, self.languages(),
            )  # fmt: skip
            self.add_to_card(trainer, output, results)

    def add_to_card(self, trainer: Trainer, output: Path, results: Results) -> None:
        """Put the results into the model card, unless somebody wrote one."""
        model = trainer.accelerator.unwrap_model(trainer.model)
        if hasattr(model, "create_or_update_model_card") and hasattr(model.config, "mixer_names"):
            render(model, output, self.args.hub_model_id, results=results)

    def _is_finished(self, trainer: Trainer) -> bool:
        """Whether the checkpoint has all steps that were asked for; `Trainer` would take one more."""
        if self.checkpoint is None:
            return False
        return TrainerState.load_from_json(str(self.checkpoint / STATE)).global_step >= self._total_steps(trainer)

    def _total_steps(self, trainer: Trainer) -> int:
        if self.args.max_steps > 0:
            return self.args.max_steps
        batches = len(trainer.get_train_dataloader())
        return math.ceil(self.args.num_train_epochs * max(1, -(-batches // self.args.gradient_accumulation_steps)))

    def _take_up(self, trainer: Trainer) -> None:
        """The checkpoint's weights and history, and what was noted about the training."""
        assert self.checkpoint is not None
        trainer._load_from_checkpoint(str(self.checkpoint))
        trainer.state = TrainerState.load_from_json(str(self.checkpoint / STATE))
        noted = Path(self.args.output_dir or "") / METRICS
        before: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):  # it is only missing then, or damaged
            before = json.loads(noted.read_text(encoding="utf-8"))
        self.metrics["train"] = before.get("train", {"steps": trainer.state.global_step})
        self.say(
            f"{self.checkpoint} has all {trainer.state.global_step} steps already: nothing to train. Ask for more with "
            "--max_steps or --num_train_epochs, or start over with --overwrite_output_dir."
        )

    def _train(self, trainer: Trainer) -> None:
        output, steps = Path(self.args.output_dir or ""), self._total_steps(trainer)
        for name in ("logging_steps", "eval_steps", "save_steps"):  # Trainer does so too, but warns at every resume
            if 0 < getattr(self.args, name) < 1:
                setattr(self.args, name, math.ceil(steps * getattr(self.args, name)))
        trainer_logger = logging.getLogger("transformers.trainer")
        with StopOnInterrupt() as stop:
            trainer.add_callback(stop)
            if getattr(getattr(trainer.model, "config", None), "tie_word_embeddings", False):
                trainer_logger.addFilter(_not_about_tied_weights)
            try:
                result = trainer.train(resume_from_checkpoint=None if self.checkpoint is None else str(self.checkpoint))
            except KeyboardInterrupt:
                clear_away(output)
                raise
            finally:
                trainer.remove_callback(stop)
                trainer_logger.removeFilter(_not_about_tied_weights)
        if stop.requested is not None and trainer.state.global_step < trainer.state.max_steps:
            self.say(
                f"Stopped at step {trainer.state.global_step} of {trainer.state.max_steps}; run again to continue."
            )
            raise stop.interrupt(stop.requested)
        self.metrics["train"] = {
            "steps": trainer.state.global_step,
            **{key.removeprefix("train_"): value for key, value in result.metrics.items()},
        }


def _not_about_tied_weights(record: logging.LogRecord) -> bool:
    """A tied head has no weight of its own in a checkpoint; transformers reports it missing at every resume."""
    return "missing keys in the checkpoint model loaded: ['lm_head.weight']." not in record.getMessage()


def _literal(value: Any) -> str:
    return python(value) if isinstance(value, str) else repr(value)


def in_shell(program: str) -> str:
    """A command line that runs a line of Python."""
    return f"python -c {shlex.quote(program)}"
