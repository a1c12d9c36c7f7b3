"""What `scripts/run_mlm.py` and `scripts/run_clm.py` share: checks, data, model, and the run itself."""

import contextlib
import dataclasses
import logging
import math
import os
import pickle
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, Trainer, set_seed

from ..configuration.configuration_frankenstein import FRANKENSTEIN_VERSION, FrankensteinConfig
from ..data.atomic import write_json
from ..data.baseline import unigram_loss
from ..data.corpus import embedded_corpus
from ..data.tokenization import pack, train_tokenizer
from .arguments import FILE_TYPES, BadInput, DataArguments, ModelArguments, ProgramArguments
from .callbacks import StopOnInterrupt, use_progress
from .checkpoints import checkpoint_problem, checkpoints, last_complete_checkpoint, remove_incomplete

METRICS = "metrics.json"
TOKEN_IDS = ("pad", "bos", "eos", "mask", "cls", "sep")


class Run:
    """One run of a training program. Everything that can be checked is checked when it is built.

    Args:
        objective: "mlm" or "clm".
        auto_class: `AutoModelForMaskedLM` or `AutoModelForCausalLM`.
        model_args, data_args, training_args: What the user asked for.
        config: Keys of a new model's config that the program decides.

    Attributes:
        checkpoint: The checkpoint training resumes from, or None.
        metrics: What `metrics.json` will hold.

    Raises:
        BadInput: Anything that cannot work; nothing has been written then.
    """

    def __init__(
        self,
        objective: Literal["mlm", "clm"],
        auto_class: Any,
        model_args: ModelArguments,
        data_args: DataArguments,
        training_args: ProgramArguments,
        **config: Any,
    ) -> None:
        self.objective, self.auto_class, self.fixed = objective, auto_class, config
        self.model_args, self.data_args, self.args = model_args, data_args, training_args
        data_args.check()
        self.overrides = model_args.overrides()
        if model_args.model_name_or_path:
            if self.overrides:
                raise BadInput(
                    f"{', '.join(self.overrides)} cannot be chosen with --model_name_or_path, which has its own."
                )
        else:
            with torch.device("meta"):  # finds a mixer that cannot do it before any work is done
                _good(lambda: auto_class.from_config(self._config(model_args.vocab_size), **self._computation()))
        self.checkpoint = self._find_checkpoint()
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.metrics: dict[str, Any] = {}
        self._start = time.monotonic()
        transformers.logging.set_verbosity(training_args.get_process_log_level())

    # ------------------------------------------------------------------ checks

    def _find_checkpoint(self) -> Path | None:
        args = self.args
        output = Path(args.output_dir or "")
        if output.exists() and not output.is_dir():
            raise BadInput(f"--output_dir {output} is a file.")
        if args.resume_from_checkpoint and str(args.resume_from_checkpoint).lower() not in ("true", "false"):
            if problem := checkpoint_problem(args.resume_from_checkpoint):
                raise BadInput(f"Cannot resume from {args.resume_from_checkpoint}: {problem}.")
            found: Path | None = Path(args.resume_from_checkpoint)
        elif not args.do_train or args.overwrite_output_dir:
            return None
        else:
            found = last_complete_checkpoint(output)
            if found is None and str(args.resume_from_checkpoint).lower() == "true":
                raise BadInput(f"There is no checkpoint to resume from in --output_dir {output}.")
            own = {path.name for path in checkpoints(output)}
            own |= {name for name in os.listdir(output) if name.startswith(".saving-")} if output.is_dir() else set()
            if found is None and output.is_dir() and set(os.listdir(output)) - own:
                raise BadInput(
                    f"--output_dir {output} is not empty and holds no complete checkpoint to resume from; choose "
                    "another folder, or start over with --overwrite_output_dir."
                )
        if found is not None and not self.model_args.model_name_or_path:
            self._check_same_model(found)
        return found

    def _check_same_model(self, checkpoint: Path) -> None:
        """The checkpoint's config must be the one asked for; else its weights would be dropped or misread."""
        saved = _good(lambda: FrankensteinConfig.from_pretrained(checkpoint))
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
        keys = {**self.fixed, **self.overrides, "vocab_size": vocab_size}
        keys.setdefault("max_position_embeddings", max(2048, self.data_args.block_size))
        tokenizer = getattr(self, "tokenizer", None)
        ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id", None) for name in TOKEN_IDS}
        keys.update({key: value for key, value in ids.items() if value is not None})
        return _good(lambda: FrankensteinConfig(**keys))

    def _computation(self) -> dict[str, Any]:
        name = self.model_args.attn_implementation
        return {} if name is None else {"attn_implementation": name}

    # ------------------------------------------------------------------ data

    def prepare_data(self) -> tuple[PreTrainedTokenizerBase, Any, Any]:
        """The tokenizer, and the packed datasets to train and evaluate on."""
        set_seed(self.args.seed)
        data = self.data_args
        with self.bars(), self.args.main_process_first(desc="preparing the data"):
            raw, origin = load_texts(data, self.args.seed)
            column = _text_column(raw["train"], data.text_column)
            for split, limit in (("train", data.max_train_samples), ("validation", data.max_eval_samples)):
                if limit is not None:
                    raw[split] = raw[split].select(range(min(limit, len(raw[split]))))
            self.tokenizer = self._make_tokenizer(raw["train"], column)
            sets = {split: self._pack(raw[split], column, split) for split in ("train", "validation")}
        self.metrics["data"] = {
            "origin": origin,
            "documents": {split: len(raw[split]) for split in sets},
            "rows": {split: len(rows) for split, rows in sets.items()},
            "block_size": data.block_size,
            "packing": data.packing,
        }
        self.say(f"Data:   {origin}")
        self.say(
            f"        {len(raw['train']):,} documents to train on, {len(raw['validation']):,} held out: "
            f"{len(sets['train']):,} + {len(sets['validation']):,} rows of up to {data.block_size} tokens"
        )
        return self.tokenizer, sets["train"], sets["validation"]

    def _pack(self, documents: Any, column: str, split: str) -> Any:
        data, tokenizer = self.data_args, self.tokenizer
        assert tokenizer is not None
        processes = data.preprocessing_num_workers
        return _good(
            lambda: pack(
                documents, tokenizer, data.block_size, data.packing, column, processes, f"Tokenizing {split}"
            )
        )  # fmt: skip

    def _make_tokenizer(self, train: Any, column: str) -> PreTrainedTokenizerBase:
        model_args, tokenizer = self.model_args, None
        name = model_args.tokenizer_name or self.checkpoint or model_args.model_name_or_path
        if name is not None:
            tokenizer = AutoTokenizer.from_pretrained(
                str(name),
                revision=model_args.model_revision if name == model_args.model_name_or_path else "main",
                trust_remote_code=model_args.trust_remote_code,
            )
        else:
            length = max(2048, self.data_args.block_size)
            texts = (text for batch in train.iter(1000) for text in batch[column] if text)
            tokenizer = _good(lambda: train_tokenizer(texts, model_args.vocab_size, self.objective, length))
        if self.objective == "mlm" and tokenizer.mask_token_id is None:
            raise BadInput(
                f"The tokenizer {name} has no mask token, so it cannot be used for masked language modelling."
            )
        if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
            tokenizer.pad_token = tokenizer.eos_token
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

    def build_model(self) -> PreTrainedModel:
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
            )
            for key, value in self.fixed.items():
                if hasattr(model.config, key):
                    setattr(model.config, key, value)
            if len(self.tokenizer) > model.get_input_embeddings().num_embeddings:
                model.resize_token_embeddings(len(self.tokenizer))
        else:
            model = self.auto_class.from_config(self._config(len(self.tokenizer)), **self._computation())
        parameters = sum(p.numel() for p in model.parameters())
        mixers = getattr(model.config, "mixer_names", [model.config.model_type])
        self.metrics["model"] = {"parameters": parameters, "layers": mixers, "vocab_size": model.config.vocab_size}
        self.say(f"Model:  {parameters:,} parameters, layers: {', '.join(mixers)}")
        return model

    # ------------------------------------------------------------------ the run

    def train_and_evaluate(self, trainer: Trainer) -> dict[str, Any]:
        """Evaluate, train, save, evaluate again, write `metrics.json`; returns what it holds.

        Raises:
            KeyboardInterrupt: Ctrl-C; a complete checkpoint has been written unless it was pressed twice.
        """
        args, output = self.args, Path(self.args.output_dir or "")
        use_progress(trainer)
        if args.do_train and self.checkpoint is not None:
            self._check_optimizer(trainer, self.checkpoint)
        transformers.logging.disable_progress_bar()  # one per checkpoint, through the middle of the training bar
        if args.do_train:
            if args.overwrite_output_dir:
                for path in checkpoints(output):
                    shutil.rmtree(path)
                (output / METRICS).unlink(missing_ok=True)
            for removed in remove_incomplete(output):
                self.say(f"Removed {removed}")
        if args.do_eval:
            self._baseline(trainer)
            self.metrics["before"] = self._evaluate(trainer)
            self.say(f"Before: held-out loss {self.metrics['before']['loss']:.3f}")
        if args.do_train:
            if self.checkpoint is not None:
                self.say(f"Resuming from {self.checkpoint}")
            self._train(trainer)
            save_atomically(trainer, output)
        if args.do_eval:
            after = self.metrics["after" if args.do_train else "before"] = self._evaluate(trainer)
            self.say(f"After:  held-out loss {after['loss']:.3f}, perplexity {after['perplexity']:.1f}")
            self.say(f"        token frequencies alone reach {self.metrics['unigram']['loss']:.3f}")
        self.metrics["objective"] = self.objective
        self.metrics["seconds"] = round(time.monotonic() - self._start, 1)
        self.metrics["versions"] = {
            "frankenstein_hf": FRANKENSTEIN_VERSION,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        }
        if trainer.is_world_process_zero():
            write_json(output / METRICS, self.metrics)
        if args.push_to_hub:
            data = self.data_args
            card: dict[str, Any] = {"tasks": "fill-mask" if self.objective == "mlm" else "text-generation"}
            if self.model_args.model_name_or_path:
                card["finetuned_from"] = self.model_args.model_name_or_path
            if data.dataset_name:
                card |= {"dataset_tags": data.dataset_name, "dataset": data.dataset_name}
            trainer.push_to_hub(**card)
        return self.metrics

    def _check_optimizer(self, trainer: Trainer, checkpoint: Path) -> None:
        """Refuse an optimizer state in another order of parameters: torch's fused kernels would read past its end."""
        path = checkpoint / "optimizer.pt"
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or not path.is_file():
            return
        try:
            saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError):
            return  # a kind of state that only Trainer knows how to read
        parameters = [p for group in trainer.create_optimizer().param_groups for p in group["params"]]
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        states = [saved["state"].get(number, {}) for number in numbers]
        fits = len(parameters) == len(states) and all(
            state[name].shape == parameter.shape
            for parameter, state in zip(parameters, states)
            for name in ("exp_avg", "exp_avg_sq", "momentum_buffer")
            if isinstance(state.get(name), torch.Tensor)
        )
        if not fits:
            raise BadInput(
                f"The optimizer state in {checkpoint} does not fit the model: it was written by another version of the "
                "code or for another model. Choose another --output_dir or --overwrite_output_dir."
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

    def _evaluate(self, trainer: Trainer) -> dict[str, float]:
        loss = trainer.evaluate()["eval_loss"]
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}

    def _baseline(self, trainer: Trainer) -> None:
        assert self.tokenizer is not None
        never = self.tokenizer.all_special_ids if self.objective == "mlm" else ()
        train: Any = trainer.train_dataset
        evaluation: Any = trainer.eval_dataset
        self.metrics["unigram"] = {"loss": unigram_loss(train, evaluation, len(self.tokenizer), never)}

    def say(self, line: str) -> None:
        """Print a line, once in a distributed run."""
        if self.args.process_index == 0:
            print(line, flush=True)


def load_texts(data: DataArguments, seed: int) -> tuple[Any, str]:
    """The documents, with splits "train" and "validation", and where they come from, in words."""
    from datasets import DatasetDict, load_dataset
    from datasets.exceptions import DatasetsError

    if not data.dataset_name and not data.train_file:
        raw = embedded_corpus(held_out=data.validation_split_percentage / 100)
        return raw, f"{raw['train'].info.description} ({raw['train'].info.license})"
    try:
        if data.dataset_name:
            loaded = load_dataset(data.dataset_name, data.dataset_config_name)
            origin = " ".join(name for name in (data.dataset_name, data.dataset_config_name) if name)
        else:
            files = {"train": data.train_file, "validation": data.validation_file}
            files = {split: file for split, file in files.items() if file is not None}
            kind = FILE_TYPES[Path(str(data.train_file)).suffix.lower()]
            extra = {"sample_by": data.sample_by} if kind == "text" else {}
            loaded, origin = load_dataset(kind, data_files=files, **extra), " and ".join(map(str, files.values()))
    except (DatasetsError, OSError, ValueError) as error:
        raise BadInput(f"Cannot read {data.dataset_name or data.train_file}: {error}") from error
    if "train" not in loaded:
        raise BadInput(f"{origin} has no split 'train', only {', '.join(loaded)}.")
    held_out = next((name for name in ("validation", "test") if name in loaded), None)
    if held_out is not None:
        return DatasetDict(train=loaded["train"], validation=loaded[held_out]), origin
    if len(loaded["train"]) < 2:
        raise BadInput(
            f"{origin} is a single document, so none can be held out; give --validation_file or --sample_by."
        )
    parts = loaded["train"].train_test_split(test_size=data.validation_split_percentage / 100, seed=seed)
    return DatasetDict(train=parts["train"], validation=parts["test"]), origin


def _text_column(dataset: Any, asked: str | None) -> str:
    strings = [
        name for name, kind in dataset.features.items() if getattr(kind, "dtype", None) in ("string", "large_string")
    ]
    if asked is not None:
        if asked not in strings:
            raise BadInput(f"--text_column {asked!r} is no column of text; there are {', '.join(strings) or 'none'}.")
        return asked
    if "text" in strings:
        return "text"
    if len(strings) != 1:
        raise BadInput(f"Choose the column of text with --text_column: {', '.join(strings) or 'there is none'}.")
    return strings[0]


def save_atomically(trainer: Trainer, output: Path) -> None:
    """`trainer.save_model`, with every file renamed into place once all of them are written."""
    output.mkdir(parents=True, exist_ok=True)
    temporary = (
        Path(tempfile.mkdtemp(prefix=".saving-", dir=output)) if trainer.args.should_save else output / ".saving-"
    )
    try:
        trainer.save_model(str(temporary), _internal_call=True)  # without a push to the Hub of its own
        if trainer.args.should_save:
            for path in sorted(temporary.rglob("*")):
                if path.is_file():
                    target = output / path.relative_to(temporary)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(path, target)
    finally:
        if trainer.args.should_save:
            shutil.rmtree(temporary, ignore_errors=True)


def _not_about_tied_weights(record: logging.LogRecord) -> bool:
    """A tied head has no weight of its own in a checkpoint; transformers reports it missing at every resume."""
    return "missing keys in the checkpoint model loaded: ['lm_head.weight']." not in record.getMessage()


def _good(make: Callable[[], Any]) -> Any:
    """`make()`, its ValueErrors as `BadInput`."""
    try:
        return make()
    except ValueError as error:
        raise error if isinstance(error, BadInput) else BadInput(str(error)) from error


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
