"""What a training program does before it trains: every check, the data, tokenizer and model."""

import abc
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, set_seed

from ..configuration.configuration_frankenstein import FrankensteinConfig
from ..data.tokenization import Objective, train_tokenizer
from ..hub.foreign import one_line
from ..modeling.hub_bundle import bundle_for, refuse_foreign
from .arguments import ModelArguments, ProgramArguments, SourceArguments
from .checkpoints import checkpoint_to_resume
from .failures import BadInput, good, readable
from .lock import RunLock
from .sources import Source, load_source

TOKEN_IDS = ("pad", "bos", "eos", "mask", "cls", "sep")


class Preparation(abc.ABC):
    """One run of a training program as far as its training. All that can be checked is checked when it is built.

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
        leaves: Files, name -> text, that the output folder gets when the run begins.
        labels: Keys about labels, for the config of a new model and of one that is loaded.

    Raises:
        BadInput: Anything that cannot work; nothing has been written then.
    """

    task: str  # what the Hub calls it
    tokenizer_kind: Objective = "mlm"  # the special tokens of a tokenizer trained here

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
        model_args.check()
        training_args.check()
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
        self.lock = RunLock(training_args.output_dir or "")
        self.lock.check()
        self.checkpoint = checkpoint_to_resume(training_args, self._expected_class())
        self._check_code()
        if self.checkpoint is not None and not model_args.model_name_or_path:
            self._check_same_model(self.checkpoint)
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.source: Source | None = None
        self.metrics: dict[str, Any] = {}
        self.leaves: dict[str, str] = {}
        self._start = time.monotonic()
        transformers.logging.set_verbosity(training_args.get_process_log_level())

    # ------------------------------------------------------------------ checks

    def _read_config(self) -> Any:
        """The config of the checkpoint to continue from."""
        name = str(self.model_args.model_name_or_path)
        revision, trust = self.model_args.model_revision, self.model_args.trust_remote_code
        return readable(
            name, lambda: AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust)
        )  # fmt: skip

    def _expected_class(self) -> str | None:
        """Name of the class of the model that is trained; None where only code of a checkpoint knows."""
        config = self.pretrained_config if self.model_args.model_name_or_path else FrankensteinConfig()
        try:
            return self.auto_class._model_mapping[type(config)].__name__
        except (KeyError, AttributeError):
            return None

    def _check_code(self) -> None:
        """What saving would refuse (files it would replace, code that cannot travel) is found before the training."""
        output, known = Path(self.args.output_dir or ""), self.model_args.model_name_or_path
        config = self.pretrained_config if known else self._config(self.model_args.vocab_size)
        if not self.args.do_train or not isinstance(config, FrankensteinConfig):
            return
        good(lambda: refuse_foreign(output, bundle_for(config)))

    def _check_same_model(self, checkpoint: Path) -> None:
        """The checkpoint's config must be the one asked for; else its weights would be dropped or misread."""
        saved = good(lambda: FrankensteinConfig.from_pretrained(checkpoint))
        asked = self._config(saved.vocab_size)
        decided_later = {
            "vocab_size",
            "is_causal",
            "frankenstein_version",
            "dtype",
            "use_cache",  # off while training
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
            flag = "tokenizer_name" if name == model_args.tokenizer_name else "model_name_or_path"
            tokenizer = readable(
                str(name),
                lambda: AutoTokenizer.from_pretrained(
                    str(name),
                    revision=model_args.model_revision if name == model_args.model_name_or_path else "main",
                    trust_remote_code=model_args.trust_remote_code,
                ),
                flag,
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
            options = {**self._computation(), **self.labels}
            if self.labels:  # a head for other labels is new
                options["ignore_mismatched_sizes"] = True
            model = readable(
                model_args.model_name_or_path,
                lambda: self.auto_class.from_pretrained(
                    model_args.model_name_or_path,
                    revision=model_args.model_revision,
                    trust_remote_code=model_args.trust_remote_code,
                    **options,
                ),
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

    def say(self, line: str) -> None:
        """Print a line, once in a distributed run."""
        if self.args.process_index == 0:
            print("\n".join(map(one_line, line.splitlines())), flush=True)
