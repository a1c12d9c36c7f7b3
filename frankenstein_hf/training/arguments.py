"""What the training programs can be told, on the command line or in a YAML or JSON file."""

import dataclasses
import difflib
import json
import re
import sys
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import yaml
from transformers import HfArgumentParser, TrainingArguments

from ..configuration.component import did_you_mean
from ..configuration.configuration_frankenstein import FrankensteinConfig
from ..data.conversations import TEMPLATES as CHAT_TEMPLATES
from ..hub.cards import is_repo_id
from .failures import BadInput
from .help import print_help

FILE_TYPES = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass
class ModelArguments:
    """Which model to train: a new hybrid, or a checkpoint to continue from."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Continue from this checkpoint instead of training a new model."}
    )
    layer_pattern: str | None = field(
        default=None,
        metadata={"help": "Mixers of a new model, repeated over its layers: 'gated_deltanet,swa' or a JSON list."},
    )
    mixer_params: str | None = field(
        default=None, metadata={"help": 'Parameters by mixer, as JSON: \'{"swa": {"window_size": 64}}\'.'}
    )
    config_overrides: str | None = field(
        default=None,
        metadata={"help": "Other keys of a new model's config: 'hidden_size=192,num_hidden_layers=6' or JSON."},
    )
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "Tokenizer to use; by default one is trained on the training text."}
    )
    vocab_size: int = field(default=8192, metadata={"help": "Size of a tokenizer trained here."})
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit of the checkpoint."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the checkpoint."})
    attn_implementation: str | None = field(
        default=None, metadata={"help": "How mixers are computed: eager, sdpa, triton …"}
    )
    license: str | None = field(
        default=None, metadata={"help": "Licence of the trained model, for its card: apache-2.0, mit …"}
    )
    language: str | None = field(default=None, metadata={"help": "Languages of the model, for its card: en or de,fr …"})

    def check(self) -> None:
        """Raise `BadInput` for what cannot be."""
        for name, given in (("license", [self.license or "mit"]), ("language", self.languages())):
            for value in given:
                if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", value):
                    raise BadInput(
                        f"--{name} {value!r} must be a short name of the Hub, such as "
                        + ("apache-2.0, mit or other." if name == "license" else "en, de or zh-hans.")
                    )

    def languages(self) -> tuple[str, ...]:
        """`language` as a list."""
        return tuple(name.strip() for name in (self.language or "").split(",") if name.strip())

    def pattern(self) -> list[str] | None:
        """`layer_pattern` as a list."""
        value: Any = self.layer_pattern
        if isinstance(value, str):
            if value.lstrip().startswith("["):
                value = _json(value, "layer_pattern")
            else:
                value = [name.strip() for name in value.split(",") if name.strip()]
        if value is not None and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
            raise BadInput(f"--layer_pattern must be a list of mixer names, got {value!r}.")
        return value

    def overrides(self) -> dict[str, Any]:
        """`config_overrides` as a dict, with `mixer_params` and `layer_pattern` where they were given."""
        value: Any = self.config_overrides or {}
        if isinstance(value, str):
            value = _json(value, "config_overrides") if value.lstrip().startswith("{") else _pairs(value)
        params: Any = self.mixer_params
        params = _json(params, "mixer_params") if isinstance(params, str) else params
        for name, given in (("config_overrides", value), ("mixer_params", params)):
            if given is not None and not isinstance(given, dict):
                raise BadInput(f"--{name} must be an object of keys and values, got {given!r}.")
        if "vocab_size" in value:
            raise BadInput("vocab_size follows from the tokenizer: use --vocab_size or --tokenizer_name.")
        own = {"layer_pattern": self.pattern(), "mixer_params": params}
        return {**value, **{key: given for key, given in own.items() if given is not None}}


@dataclass
class SourceArguments:
    """Where a program's data comes from, and how much of it is used; without files and dataset, data that is there."""

    dataset_name: str | None = field(default=None, metadata={"help": "A dataset of the Hub, or a folder of one."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of that dataset."})
    train_file: str | None = field(default=None, metadata={"help": "Data to train on: csv, json, jsonl, parquet."})
    validation_file: str | None = field(default=None, metadata={"help": "Data to evaluate on, of the same type."})
    validation_split_percentage: float = field(
        default=20.0, metadata={"help": "Share of the rows to hold out when nothing was given to evaluate on."}
    )
    block_size: int = field(default=256, metadata={"help": "Most tokens of a row; what is longer is cut."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Use only the first so many rows."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on so many rows at most."})
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes that tokenize."})

    file_types: ClassVar[dict[str, str]] = {ending: kind for ending, kind in FILE_TYPES.items() if kind != "text"}

    def check(self) -> None:
        """Raise `BadInput` for what cannot be."""
        if self.dataset_name and (self.train_file or self.validation_file):
            raise BadInput("Give --dataset_name or files, not both.")
        if self.dataset_config_name and not self.dataset_name:
            raise BadInput("--dataset_config_name needs --dataset_name.")
        if self.validation_file and not self.train_file:
            raise BadInput("--validation_file needs --train_file, whose text also trains the tokenizer.")
        kinds = {
            name: checked_file(name, getattr(self, name), self.file_types)
            for name in ("train_file", "validation_file")
            if getattr(self, name) is not None
        }
        if len(set(kinds.values())) > 1:
            raise BadInput("--train_file and --validation_file must be of the same type.")
        if not 0 < self.validation_split_percentage < 100:
            raise BadInput(f"--validation_split_percentage {self.validation_split_percentage} must be in (0, 100).")
        for name in ("block_size", "max_train_samples", "max_eval_samples", "preprocessing_num_workers"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise BadInput(f"--{name} {number} must be at least 1.")


@dataclass
class DataArguments(SourceArguments):
    """What a language model is trained on; by default the docstrings of the Python standard library."""

    train_file: str | None = field(default=None, metadata={"help": "Text to train on: txt, json, jsonl, csv, parquet."})
    validation_file: str | None = field(default=None, metadata={"help": "Text to evaluate on, of the same type."})
    text_column: str | None = field(
        default=None, metadata={"help": "Column with the text; by default 'text', or the only column of strings."}
    )
    sample_by: str = field(
        default="paragraph", metadata={"help": "What is a document in a txt file: line, paragraph or document."}
    )
    validation_split_percentage: float = field(
        default=5.0, metadata={"help": "Share of the documents to hold out when nothing was given to evaluate on."}
    )
    block_size: int = field(default=256, metadata={"help": "Most tokens of a row."})
    packing: str | None = field(
        default=None,
        metadata={
            "help": "blocks: join documents and cut; documents: whole documents side by side, kept apart exactly; "
            "none: a document a row, padded. By default blocks of text, documents of conversations."
        },
    )

    file_types: ClassVar[dict[str, str]] = FILE_TYPES

    def check(self) -> None:
        """Raise `BadInput` for what cannot be."""
        super().check()
        check_choice("sample_by", self.sample_by, ("line", "paragraph", "document"))
        if self.packing is not None:
            check_choice("packing", self.packing, ("blocks", "documents", "none"))


@dataclass
class CausalDataArguments(DataArguments):
    """What a language model is trained on: text, or a column "messages" with conversations."""

    chat_template: str | None = field(
        default=None,
        metadata={
            "help": "Chat template of the tokenizer: turns, or a file. By default the tokenizer's own, and turns for "
            "one that is trained here on conversations, of which the assistant's turns are learned."
        },
    )

    def check(self) -> None:
        """Raise `BadInput` for what cannot be."""
        super().check()
        name = self.chat_template
        if name is not None and name not in CHAT_TEMPLATES and not Path(name).is_file():
            raise BadInput(
                f"--chat_template {name} is no file with a template, and none of {', '.join(CHAT_TEMPLATES)}."
            )


@dataclass
class ProgramArguments(TrainingArguments):
    """transformers' `TrainingArguments` with defaults that suit a small model trained from scratch."""

    output_dir: str | None = field(default=None, metadata={"help": "Folder to write to; run again to continue there."})
    do_train: bool = field(default=True, metadata={"help": "Train."})
    do_eval: bool = field(default=True, metadata={"help": "Evaluate before and after."})
    overwrite_output_dir: bool = field(
        default=False,
        metadata={"help": "Start over in an output folder that has results; its checkpoints are deleted."},
    )
    learning_rate: float = field(default=1e-3, metadata={"help": "Highest learning rate."})
    warmup_steps: float = field(default=0.05, metadata={"help": "Steps of warm-up; below 1, a share of all steps."})
    weight_decay: float = field(default=0.05, metadata={"help": "Weight decay of matrices."})
    logging_steps: float = field(
        default=0.02, metadata={"help": "Steps between losses; below 1, a share of all steps: 0.02 gives fifty points."}
    )
    save_total_limit: int | None = field(default=2, metadata={"help": "Most checkpoints to keep."})
    eval_steps: float | None = field(
        default=None, metadata={"help": "With --eval_strategy steps: steps between evaluations; by default 0.1 of all."}
    )
    prediction_loss_only: bool = field(default=True, metadata={"help": "Evaluations return the loss only."})

    def __post_init__(self) -> None:
        if self.output_dir is None:
            raise BadInput("--output_dir is missing: the folder to write to.")
        if not torch.accelerator.is_available():
            self.dataloader_pin_memory = False  # of no use, and torch warns about it
        if self.eval_steps is None:  # as often as losses are noted would be too often
            self.eval_steps = self.save_steps if self.load_best_model_at_end else 0.1
        super().__post_init__()

    def check(self) -> None:
        """Raise `BadInput` for what cannot be."""
        try:
            (self.output_dir or "").encode()
        except UnicodeEncodeError:  # safetensors could not write there
            raise BadInput(f"--output_dir {self.output_dir!r} is no text in UTF-8; choose another name.") from None
        if self.hub_model_id and not is_repo_id(self.hub_model_id):
            raise BadInput(f"--hub_model_id {self.hub_model_id!r} must be a name on the Hub, such as me/my-model.")


def checked_file(name: str, value: str, types: dict[str, str]) -> str:
    """The kind of the file given as --`name`, one of the values of `types`; raises `BadInput` if it cannot be read."""
    path = Path(value)
    if path.suffix.lower() not in types:
        raise BadInput(f"--{name} {value}: unknown type {path.suffix!r}" + _allowed(types))
    if not path.is_file():
        raise BadInput(f"--{name} {value}: there is no such file.")
    if path.stat().st_size == 0:
        raise BadInput(f"--{name} {value}: the file is empty.")
    return types[path.suffix.lower()]


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise `BadInput` if the --`name` given is none of the choices."""
    if value not in choices:
        raise BadInput(f"--{name} {value!r} is unknown" + did_you_mean(value, choices))


def parse_arguments(classes: tuple[type, ...], argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Instances of the dataclasses, from flags or from the only argument, a `.yaml`, `.yml` or `.json` file.

    Raises:
        BadInput: A file that is missing or cannot be read, or has keys that nobody knows.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if asked := {"-h", "--help", "--help_all", "--help-all"} & set(argv):
        print_help(classes, everything=not asked & {"-h", "--help"})
        raise SystemExit(0)
    parser = HfArgumentParser(classes)  # type: ignore[arg-type]
    types = {name: kind for cls in classes for name, kind in _field_types(cls).items()}
    if not argv or not argv[0].endswith((".yaml", ".yml", ".json")):
        *parsed, unknown = parser.parse_args_into_dataclasses(args=argv, return_remaining_strings=True)
        if unknown:
            raise BadInput(_unknown_flag(unknown[0], types))
        return tuple(parsed)
    if len(argv) > 1:
        raise BadInput(f"A file of settings must be the only argument: write {argv[1]} into {argv[0]}.")
    path = Path(argv[0])
    if not path.is_file():
        raise BadInput(f"{path}: there is no such file.")
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise BadInput(f"{path} is not valid {path.suffix[1:].upper()}: {error}") from error
    if not isinstance(values, dict):
        raise BadInput(f"{path} must contain keys and values, such as 'output_dir: outputs/run'.")
    for key, value in values.items():
        if key not in types:
            raise BadInput(f"{path}: unknown key {key!r}" + did_you_mean(key, types))
        if isinstance(value, str) and float in types[key] and str not in types[key]:
            try:
                values[key] = float(value)  # YAML reads 2e-3, without a point, as text
            except ValueError:
                raise BadInput(f"{path}: {key} must be a number, got {value!r}.") from None
    return parser.parse_dict(values)


def _unknown_flag(argument: str, types: dict[str, Any]) -> str:
    """What is wrong with an argument that is no flag."""
    name = argument.lstrip("-").partition("=")[0]
    if "config_overrides" in types and name in (field.name for field in dataclasses.fields(FrankensteinConfig)):
        return f"{argument} is a key of a new model's config: --config_overrides {name}=…,other_key=…"
    close = difflib.get_close_matches(name, types, n=1)
    return f"Unknown argument {argument!a}" + (f"; did you mean --{close[0]}?" if close else "; --help lists all.")


def _field_types(cls: type) -> dict[str, set[Any]]:
    hints = typing.get_type_hints(cls)
    fields = [f for f in dataclasses.fields(cls) if f.init]
    return {f.name: {hints[f.name], *typing.get_args(hints[f.name])} for f in fields}


def _json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadInput(f"--{name} is not valid JSON ({error}): {text}") from None


def _pairs(text: str) -> dict[str, Any]:
    pairs = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key or not value:
            raise BadInput(f"--config_overrides must look like key=value,key=value; got {part!r}.")
        try:
            pairs[key] = json.loads({"True": "true", "False": "false", "None": "null"}.get(value, value))
        except ValueError:
            pairs[key] = value  # a word
    return pairs


def _allowed(names: Any) -> str:
    return f". Allowed: {', '.join(names)}."
