"""`--help` of the training programs: their own flags first, by subject and with what happens without them."""

import dataclasses
import shutil
import sys
import textwrap
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from ..configuration.configuration_frankenstein import FrankensteinConfig

# Of transformers' own flags, those that most runs need; `--help_all` shows the others.
COMMON = (
    "max_steps", "num_train_epochs", "per_device_train_batch_size", "per_device_eval_batch_size",
    "gradient_accumulation_steps", "lr_scheduler_type", "optim", "optim_args", "max_grad_norm", "bf16", "seed",
    "eval_strategy", "eval_steps", "save_strategy", "save_steps", "resume_from_checkpoint", "disable_tqdm",
    "push_to_hub", "hub_model_id",
)  # fmt: skip


def print_help(classes: Sequence[type], everything: bool) -> None:
    """Print the help of a program that reads its arguments into `classes`; with `everything`, all flags of Trainer."""
    print(help_text(classes, everything, shutil.get_terminal_size().columns))


def help_text(classes: Sequence[type], everything: bool = False, width: int = 100) -> str:
    """The help as text."""
    main = sys.modules.get("__main__")
    program, about = Path(sys.argv[0]).name, getattr(main, "__doc__", None) or ""
    parts = [
        f"usage: {program} --output_dir FOLDER [flags]\n       {program} SETTINGS.yaml    (flags as keys of a file)",
        about.strip() if program.endswith(".py") else "",
    ]
    for cls in classes:
        trainer = issubclass(cls, TrainingArguments)
        fields = [field for field in dataclasses.fields(cls) if field.init]
        own = [field for field in fields if not trainer or _is_ours(cls, field.name)]
        heading = (cls.__doc__ or "").strip().splitlines()[0]
        parts.append(_group("Training" if trainer else heading.rstrip("."), _output_first(own), cls, width))
        if trainer:
            others = [field for field in fields if field not in own]
            common = [field for field in others if field.name in COMMON]
            shown = others if everything else sorted(common, key=lambda field: COMMON.index(field.name))
            title = "All of transformers' Trainer" if everything else "Of transformers' Trainer, the ones most used"
            parts.append(_group(title, shown, cls, width))
    if not everything:
        parts.append("--help_all shows every flag of transformers' Trainer.")
    return "\n\n".join(part for part in parts if part)


def _is_ours(cls: type, name: str) -> bool:
    """Whether this package declares the field, rather than a library it builds on."""
    declaring = next(base for base in cls.__mro__ if name in vars(base).get("__annotations__", {}))
    return not declaring.__module__.startswith(("transformers.", "sentence_transformers."))


def _output_first(fields: list[Any]) -> list[Any]:
    return sorted(fields, key=lambda field: field.name != "output_dir")


def _group(title: str, fields: list[Any], cls: type, width: int) -> str:
    hints = typing.get_type_hints(cls)
    lines = [f"{title}:"]
    for field in fields:
        words = _words(WORDS.get(field.name, str(field.metadata.get("help", ""))), field)
        head = f"  --{field.name} {_value(hints[field.name], field)}".rstrip()
        body = textwrap.wrap(words, max(width - 32, 30), break_long_words=False, break_on_hyphens=False)
        lines.append(f"{head:<31} {body[0]}" if body and len(head) < 31 else head)
        lines += [" " * 32 + line for line in (body[1:] if len(head) < 31 else body)]
    return "\n".join(lines)


def _words(help_words: str, field: Any) -> str:
    """The help of a flag and its default, unless the words name it."""
    default: Any = REAL_DEFAULTS.get(field.name, lambda: None)()
    if default is None:
        made = field.default_factory() if callable(field.default_factory) else field.default
        default = None if made is dataclasses.MISSING else getattr(made, "value", made)
    words = " ".join(help_words.split())
    if default is None or default is False or default in ("", [], {}) or "by default" in words.lower():
        return words
    return f"{words} Default: {default:g}." if isinstance(default, float) else f"{words} Default: {default}."


def _value(kind: Any, field: Any) -> str:
    kinds = {kind, *typing.get_args(kind)}
    if bool in kinds:
        return "(or --no_" + field.name + ")" if field.default is True else ""
    for number, shown in ((int, "N"), (float, "X")):
        if number in kinds and str not in kinds:
            return shown
    return {"output_dir": "FOLDER"}.get(field.name, "FILE" if field.name.endswith("_file") else "TEXT")


def _config_overrides() -> str:
    config = FrankensteinConfig()
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "feed_forward", "norm")
    return ", ".join(f"{name}={getattr(config, name)}" for name in sizes)


# Where Trainer's own words speak of its insides.
WORDS = {
    "max_steps": "Steps to train; by default as many as --num_train_epochs gives.",
    "optim": "Optimizer: adamw_torch, adafactor, frankenstein_muon … (docs/optimizers.md lists ours).",
    "optim_args": "Its parameters: 'momentum=0.9,ns_steps=5'.",
    "lr_scheduler_type": "How the learning rate moves: linear, cosine, constant, warmup_stable_decay …",
    "gradient_accumulation_steps": "Batches a step.",
    "resume_from_checkpoint": "A checkpoint to continue from; by default the last one in --output_dir.",
    "hub_model_id": "Name on the Hub, owner/name.",
    "disable_tqdm": "Lines instead of progress bars.",
}
# What a new model gets where the flag itself has no default.
REAL_DEFAULTS = {
    "layer_pattern": lambda: ",".join(FrankensteinConfig().mixer_names),
    "config_overrides": _config_overrides,
    "attn_implementation": lambda: "sdpa",
}
