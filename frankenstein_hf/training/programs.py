"""What the training programs in `scripts/` share: checks, tokenizer, model, and the run itself."""

import abc
import contextlib
import dataclasses
import json
import logging
import math
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, Trainer, TrainerState, set_seed

from ..configuration.configuration_frankenstein import FRANKENSTEIN_VERSION, FrankensteinConfig
from ..data.atomic import write_json
from ..data.tokenization import Objective, train_tokenizer
from ..hub.cards import render
from .arguments import BadInput, ModelArguments, ProgramArguments, SourceArguments
from .callbacks import StopOnInterrupt, use_progress
from .checkpoints import (
    STATE,
    check_optimizer,
    checkpoint_to_resume,
    checkpoints,
    remove_incomplete,
    save_atomically,
)
from .results import LOSS_PICTURE, Results, draw_loss, loss_curve
from .sources import Source, load_source

METRICS = "metrics.json"
TOKEN_IDS = ("pad", "bos", "eos", "mask", "cls", "sep")


class Run(abc.ABC):
    """One run of a training program. Everything that can be checked is checked when it is built.

    A program derives from it and says what its data is (`prepare_data`), what its results mean (`baseline`,
    `result_line`) and, where the loss is not all, how it evaluates (`evaluate`).

    Args:
        objective: What is learned, for `metrics.json`.
        auto_class: The Auto class of the model.
        model_args, data_args, training_args: What the user asked for.
        config: Keys of a new model's config that the program decides.

    Attributes:
        checkpoint: The checkpoint training resumes from, or None.
        metrics: What `metrics.json` will hold.
        source: The data, once `read` was called.
        tokenizer: The tokenizer, once `make_tokenizer` was called.
        labels: Keys about labels, for the config of a new model and of one that is loaded.

    Raises:
        BadInput: Anything that cannot work; nothing has been written then.
    """

    task: str  # what the Hub calls it
    tokenizer_kind: Objective = "mlm"  # the special tokens of a tokenizer trained here
    baseline_name: str  # key of the baseline in `metrics`
    baseline_words: str

    def __init__(
        self,
        objective: str,
        auto_class: Any,
        model_args: ModelArguments,
        data_args: SourceArguments,
        training_args: ProgramArguments,
        **config: Any,
    ) -> None:
        self.objective, self.auto_class, self.fixed = objective, auto_class, config
        self.model_args, self.data_args, self.args = model_args, data_args, training_args
        self.labels: dict[str, Any] = {}
        data_args.check()
        self.overrides = model_args.overrides()
        if model_args.model_name_or_path:
            if self.overrides:
                raise BadInput(
                    f"{', '.join(self.overrides)} cannot be chosen with --model_name_or_path, which has its own."
                )
            self.pretrained_config = self._read_config()
        else:
            with torch.device("meta"):  # finds a mixer that cannot do it before any work is done
                good(lambda: auto_class.from_config(self._config(model_args.vocab_size), **self._computation()))
        self.checkpoint = checkpoint_to_resume(training_args)
        if self.checkpoint is not None and not model_args.model_name_or_path:
            self._check_same_model(self.checkpoint)
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.source: Source | None = None
        self.metrics: dict[str, Any] = {}
        self._start = time.monotonic()
        transformers.logging.set_verbosity(training_args.get_process_log_level())

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

    # ------------------------------------------------------------------ checks

    def _read_config(self) -> Any:
        """The config of the checkpoint to continue from."""
        name = str(self.model_args.model_name_or_path)
        revision, trust = self.model_args.model_revision, self.model_args.trust_remote_code
        return readable(
            name, lambda: AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust)
        )  # fmt: skip

    def _check_same_model(self, checkpoint: Path) -> None:
        """The checkpoint's config must be the one asked for; else its weights would be dropped or misread."""
        saved = good(lambda: FrankensteinConfig.from_pretrained(checkpoint))
        asked = self._config(saved.vocab_size)
        decided_later = {
            "vocab_size",
            "is_causal",
            "frankenstein_version",
            "dtype",
            *(f"{x}_token_id" for x in TOKEN_IDS),
        }
        names = [f.name for f in dataclasses.fields(FrankensteinConfig) if f.name in self.overrides]
        names += ["layer_pattern", "mixer_params", "hidden_size", "num_hidden_layers", "num_attention_heads"]
        for name in dict.fromkeys(names):
            if name not in decided_later and getattr(saved, name) != getattr(asked, name):
                raise BadInput(
                    f"{checkpoint} belongs to another model: {name} is {getattr(saved, name)!r} there, and "
                    f"{getattr(asked, name)!r} was asked for. Choose another --output_dir or --overwrite_output_dir."
                )

    def _config(self, vocab_size: int) -> FrankensteinConfig:
        keys = {**self.fixed, **self.labels, **self.overrides, "vocab_size": vocab_size}
        keys.setdefault("max_position_embeddings", max(2048, self.data_args.block_size))
        tokenizer = getattr(self, "tokenizer", None)
        ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id", None) for name in TOKEN_IDS}
        keys.update({key: value for key, value in ids.items() if value is not None})
        return good(lambda: FrankensteinConfig(**keys))

    def _computation(self) -> dict[str, Any]:
        name = self.model_args.attn_implementation
        return {} if name is None else {"attn_implementation": name}

    # ------------------------------------------------------------------ data

    def read(self, embedded: Callable[[float], Any], **reader: Any) -> Source:
        """The data, as `load_source`."""
        set_seed(self.args.seed)
        self.source = load_source(self.data_args, self.args.seed, embedded, **reader)
        return self.source

    def describe_data(self, **counts: Any) -> None:
        """Put the data into `metrics` and on the screen."""
        assert self.source is not None
        self.metrics["data"] = {"origin": self.source.origin, **counts, "block_size": self.data_args.block_size}
        self.say(f"Data:   {self.source.origin}")

    def make_tokenizer(self, texts: Iterable[str], **options: Any) -> PreTrainedTokenizerBase:
        """The tokenizer asked for, that of the checkpoint, or one trained on `texts` with `train_tokenizer`."""
        model_args = self.model_args
        name = model_args.tokenizer_name or self.checkpoint or model_args.model_name_or_path
        if name is not None:
            tokenizer = AutoTokenizer.from_pretrained(
                str(name),
                revision=model_args.model_revision if name == model_args.model_name_or_path else "main",
                trust_remote_code=model_args.trust_remote_code,
            )
        else:
            length = max(2048, self.data_args.block_size)
            tokenizer = good(
                lambda: train_tokenizer(texts, model_args.vocab_size, self.tokenizer_kind, length, **options)
            )
        if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
            tokenizer.pad_token = tokenizer.eos_token
        self.tokenizer = tokenizer
        return tokenizer

    @contextlib.contextmanager
    def bars(self) -> Iterator[None]:
        """A stretch of work with progress bars of `datasets` only where somebody sees them."""
        import datasets

        shown = datasets.is_progress_bar_enabled()
        if self.args.disable_tqdm or not sys.stderr.isatty():
            datasets.disable_progress_bars()
        try:
            yield
        finally:
            if shown:
                datasets.enable_progress_bars()

    # ------------------------------------------------------------------ model

    def build_model(self) -> Any:
        """The new model, or the checkpoint to continue from, fitting the tokenizer."""
        assert self.tokenizer is not None, "prepare_data comes first"
        set_seed(self.args.seed)
        model_args = self.model_args
        if model_args.model_name_or_path:
            model = self.auto_class.from_pretrained(
                model_args.model_name_or_path,
                revision=model_args.model_revision,
                trust_remote_code=model_args.trust_remote_code,
                **self._computation(),
                **self.labels,
                **({"ignore_mismatched_sizes": True} if self.labels else {}),  # a head for other labels is new
            )
            for key, value in self.fixed.items():
                if hasattr(model.config, key):
                    setattr(model.config, key, value)
            if getattr(model.config, "pad_token_id", None) is None:  # some classifiers look for their last real token
                model.config.pad_token_id = self.tokenizer.pad_token_id
            if len(self.tokenizer) > model.get_input_embeddings().num_embeddings:
                model.resize_token_embeddings(len(self.tokenizer))
        else:
            model = self.auto_class.from_config(self._config(len(self.tokenizer)), **self._computation())
        self.describe_model(model, model.config)
        return model

    def describe_model(self, model: Any, config: Any) -> None:
        """Put the model into `metrics` and on the screen."""
        parameters = sum(p.numel() for p in model.parameters())
        mixers = getattr(config, "mixer_names", [config.model_type])
        self.metrics["model"] = {"parameters": parameters, "layers": mixers, "vocab_size": config.vocab_size}
        self.say(f"Model:  {parameters:,} parameters, layers: {', '.join(mixers)}")

    # ------------------------------------------------------------------ the run

    def train_and_evaluate(self, trainer: Trainer) -> dict[str, Any]:
        """Evaluate, train, save, evaluate again, write `metrics.json`; returns what it holds.

        Raises:
            KeyboardInterrupt: Ctrl-C; a complete checkpoint has been written unless it was pressed twice.
        """
        args, output = self.args, Path(self.args.output_dir or "")
        use_progress(trainer)
        if args.do_train and self.checkpoint is not None:
            check_optimizer(trainer, self.checkpoint)
        transformers.logging.disable_progress_bar()  # one per checkpoint, through the middle of the training bar
        if args.do_train:
            if args.overwrite_output_dir:
                for path in checkpoints(output):
                    shutil.rmtree(path)
                for name in (METRICS, LOSS_PICTURE):
                    (output / name).unlink(missing_ok=True)
            for removed in remove_incomplete(output):
                self.say(f"Removed {removed}")
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
                card |= {"dataset_tags": data.dataset_name, "dataset": data.dataset_name}
            trainer.push_to_hub(**card)
        return self.metrics

    def _write_results(self, trainer: Trainer, output: Path) -> None:
        """`metrics.json`, the loss curve, and both in the card of a model that was trained."""
        assert self.source is not None
        picture = None
        if self.args.do_train:
            self.metrics["curve"] = loss_curve(trainer.state.log_history, self.metrics)
            picture, missing = draw_loss(self.metrics["curve"], output / LOSS_PICTURE)
            if missing:
                self.say(missing)
        write_json(output / METRICS, self.metrics)
        if self.args.do_train:
            results = Results(
                self.metrics, self.baseline_name, self.baseline_words, self.task, self.source.name,
                self.data_args.dataset_name, picture,
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
        steps = self.args.max_steps
        if steps <= 0:
            batches = len(trainer.get_train_dataloader())
            steps = math.ceil(self.args.num_train_epochs * max(1, -(-batches // self.args.gradient_accumulation_steps)))
        return TrainerState.load_from_json(str(self.checkpoint / STATE)).global_step >= steps

    def _take_up(self, trainer: Trainer) -> None:
        """The checkpoint's weights and history, and what was noted about the training."""
        assert self.checkpoint is not None
        trainer._load_from_checkpoint(str(self.checkpoint))
        trainer.state = TrainerState.load_from_json(str(self.checkpoint / STATE))
        noted = Path(self.args.output_dir or "") / METRICS
        before = json.loads(noted.read_text(encoding="utf-8")) if noted.is_file() else {}
        self.metrics["train"] = before.get("train", {"steps": trainer.state.global_step})
        self.say(
            f"{self.checkpoint} has all {trainer.state.global_step} steps already: nothing to train. Ask for more with "
            "--max_steps or --num_train_epochs, or start over with --overwrite_output_dir."
        )

    def _train(self, trainer: Trainer) -> None:
        output = Path(self.args.output_dir or "")
        trainer_logger = logging.getLogger("transformers.trainer")
        with StopOnInterrupt() as stop:
            trainer.add_callback(stop)
            if getattr(getattr(trainer.model, "config", None), "tie_word_embeddings", False):
                trainer_logger.addFilter(_not_about_tied_weights)
            try:
                result = trainer.train(resume_from_checkpoint=None if self.checkpoint is None else str(self.checkpoint))
            except KeyboardInterrupt:
                remove_incomplete(output)
                raise
            finally:
                trainer.remove_callback(stop)
                trainer_logger.removeFilter(_not_about_tied_weights)
        if stop.requested and trainer.state.global_step < trainer.state.max_steps:
            self.say(
                f"Stopped at step {trainer.state.global_step} of {trainer.state.max_steps}; run again to continue."
            )
            raise KeyboardInterrupt
        self.metrics["train"] = {
            "steps": trainer.state.global_step,
            **{key.removeprefix("train_"): value for key, value in result.metrics.items()},
        }

    def say(self, line: str) -> None:
        """Print a line, once in a distributed run."""
        if self.args.process_index == 0:
            print(line, flush=True)


def _not_about_tied_weights(record: logging.LogRecord) -> bool:
    """A tied head has no weight of its own in a checkpoint; transformers reports it missing at every resume."""
    return "missing keys in the checkpoint model loaded: ['lm_head.weight']." not in record.getMessage()


def good(make: Callable[[], Any]) -> Any:
    """`make()`, its ValueErrors as `BadInput`."""
    try:
        return make()
    except ValueError as error:
        raise error if isinstance(error, BadInput) else BadInput(str(error)) from error


def readable(name: str | None, read: Callable[[], Any]) -> Any:
    """`read()`, its errors as `BadInput` about the checkpoint called `name`."""
    try:
        return read()
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise BadInput(f"Cannot read --model_name_or_path {name}: {reason}") from error


def run_main(main: Callable[[], Any]) -> None:
    """Run a program: bad input becomes one line on stderr and exit status 2, Ctrl-C exit status 130."""
    try:
        main()
    except BadInput as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        raise SystemExit(130) from None
