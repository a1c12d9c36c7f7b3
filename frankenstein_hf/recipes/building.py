"""From a recipe to the objects that do it, and back to a recipe in which everything is said."""

import dataclasses
import hashlib
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..configuration.configuration_frankenstein import FrankensteinConfig
from ..configuration.keys import fields_of
from ..configuration.stack import FRANKENSTEIN_VERSION
from ..optim.create import trainer_optimizer
from ..optim.spec import OPTIMIZERS, STABILIZERS
from ..optim.trainer import PREFIX
from ..training.failures import BadInput
from ..training.programs import Run
from ..training.tasks import PROGRAMS, TASKS
from .checking import problems
from .loading import RESOLVED, WRITTEN, Recipe
from .reading import BadRecipe, dotted, written
from .schema import DECIDED, FORMAT, NOT_OF_RECIPES

CHECKPOINT = ("from", "revision", "trust_remote_code")  # keys of `model` that name one
TWICE = {"learning_rate": "lr", "weight_decay": "weight_decay", "optim": "name", "optim_args": "its parameters"}
SECRET = {"hub_token", "push_to_hub_token"}
# Where a recipe says what messages of the programs call by their flags.
_FLAGS = {
    "model_name_or_path": "model.from",
    "model_revision": "model.revision",
    "tokenizer_name": "tokenizer.from",
    "vocab_size": "tokenizer.train.vocab_size",
    "learning_rate": "optimizer.lr",
    "optim": "optimizer.name",
    "hub_model_id": "hub.repo_id",
    "config_overrides": "model",
}


def check(recipe: Recipe) -> None:
    """Raise `BadRecipe` for everything that names, types and ranges show; see `build` for the rest."""
    if found := [*problems(recipe.document), *_contradictions(recipe)]:
        raise BadRecipe(found)


def build(recipe: Recipe) -> Run:
    """The run that does the recipe; everything that can be checked has been, and nothing is written yet.

    Raises:
        BadRecipe: All that is wrong by itself, or the first thing in which keys do not agree.
    """
    check(recipe)
    task = TASKS[_task(recipe)]
    run_class, classes = PROGRAMS[task.program].load()
    try:
        given = {section: cls(**values) for (section, cls), values in zip(classes.items(), _arguments(recipe))}
        run = run_class(*given.values())
    except BadRecipe:
        raise
    except (ValueError, TypeError) as error:
        raise BadRecipe([_located(recipe, str(error))]) from error
    run.leaves = {WRITTEN: recipe.text, RESOLVED: written(resolved(recipe, run))}
    return run


def _task(recipe: Recipe) -> str:
    return recipe.values.get("task", "masked_lm")


def _contradictions(recipe: Recipe) -> Iterator[str]:
    """Keys that are right by themselves, and not together."""
    values, document = recipe.values, recipe.document
    if any(not isinstance(value, dict) for key, value in values.items() if key in ("model", "tokenizer", "optimizer")):
        return
    model, tokenizer = values.get("model", {}), values.get("tokenizer", {})
    if "from" in model:
        for name in model.keys() - {*CHECKPOINT, "attn_implementation"}:
            yield f"{document.place(('model', name))}: model.{name} is decided by the checkpoint in model.from."
    else:
        for name in model.keys() & {"revision", "trust_remote_code"}:
            yield f"{document.place(('model', name))}: model.{name} needs model.from, which is missing."
    if {"from", "train"} <= tokenizer.keys():
        yield f"{document.place(('tokenizer',))}: tokenizer.from and tokenizer.train: give one of them."
    if "optimizer" in values and isinstance(values.get("training"), dict):
        for name in TWICE.keys() & values["training"].keys():
            yield (
                f"{document.place(('training', name))}: training.{name} is said twice: there is a section optimizer, "
                f"whose {TWICE[name]} it is."
            )


def _located(recipe: Recipe, message: str) -> str:
    """The message of an object that could not be built, beginning with where its cause is written."""
    values = recipe.values

    def named(found: re.Match) -> str:
        flag = found[1]
        homes = [section for section in ("data", "objective", "training") if flag in values.get(section, {})]
        return f"{homes[0]}.{flag}" if homes else _FLAGS.get(flag) or f"{_home_of(recipe, flag)}{flag}"

    message = re.sub(r"--([a-z_]+)", named, message)
    for key in sorted(recipe.document.places, key=len, reverse=True):
        name = key[-1] if key else ""
        if isinstance(name, str) and len(key) > 1 and re.search(rf"\b{re.escape(name)}\b", message.split(":")[0]):
            return f"{recipe.document.place(key)}: {dotted(key[:1])}: {message}"
    return f"{recipe.name}: {message}"


def _home_of(recipe: Recipe, flag: str) -> str:
    classes = PROGRAMS[TASKS[_task(recipe)].program].load()[1]
    for section, cls in classes.items():
        if any(field.name == flag for field in dataclasses.fields(cls)):
            return f"{section}."
    return ""


# ---------------------------------------------------------------------- arguments


def _arguments(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """The fields of the program's dataclasses, section by section."""
    task = TASKS[_task(recipe)]
    for section in PROGRAMS[task.program].classes:
        values = dict(recipe.values.get(section, {}))
        if section == "model":
            yield _model(recipe)
        elif section == "data":
            yield {**values, **task.decided}
        elif section == "training":
            hub = recipe.values.get("hub", {})
            names = {"repo_id": "hub_model_id", "private": "hub_private_repo"}
            yield (
                {"output_dir": f"runs/{recipe.name}"}
                | values
                | _optimizer(recipe)
                | {names[key]: value for key, value in hub.items() if key in names}
            )
        else:
            yield values


def _model(recipe: Recipe) -> dict[str, Any]:
    values = recipe.values
    model, tokenizer = dict(values.get("model", {})), values.get("tokenizer", {})
    found: dict[str, Any] = {
        key: value for key, value in values.get("hub", {}).items() if key in ("license", "language")
    }
    if "attn_implementation" in model:
        found["attn_implementation"] = model.pop("attn_implementation")
    if "from" in tokenizer:
        found["tokenizer_name"] = tokenizer["from"]
    if "vocab_size" in tokenizer.get("train", {}):
        found["vocab_size"] = tokenizer["train"]["vocab_size"]
    if "from" in model:
        names = ("model_name_or_path", "model_revision", "trust_remote_code")
        return found | {name: model[key] for key, name in zip(CHECKPOINT, names) if key in model}
    pattern = model.pop("layer_pattern", None)
    if pattern is not None:
        found["layer_pattern"] = pattern
    if "mixer_params" in model:
        found["mixer_params"] = model.pop("mixer_params")
    return found | {"config_overrides": model}


def _optimizer(recipe: Recipe) -> dict[str, Any]:
    """The optimizer as the strings that transformers' Trainer reads."""
    given = recipe.values.get("optimizer")
    if given is None:
        return {}
    settings = dict(given)
    name, groups, stabilizers = settings.pop("name"), settings.pop("groups", {}), settings.pop("stabilizers", {})
    try:
        trainer_optimizer(name, groups=groups or None, stabilizers=stabilizers or None, **_tuples(settings))
    except ValueError as error:
        raise BadRecipe([f"{recipe.document.place(('optimizer',))}: optimizer: {error}"]) from error
    defaults = OPTIMIZERS.get(name).params()
    words = {key: value for key, value in settings.items() if key not in ("lr", "weight_decay")}
    words |= {f"{role}.{key}": value for role, own in groups.items() for key, value in own.items()}
    for stabilizer, own in stabilizers.items():
        own = own or {field.name: field.default for field in dataclasses.fields(STABILIZERS.get(stabilizer).params)}
        words |= {f"{stabilizer}.{key}": value for key, value in own.items()}
    found = {
        "optim": PREFIX + name,
        "learning_rate": settings.get("lr", defaults.lr),
        "weight_decay": settings.get("weight_decay", defaults.weight_decay),
    }
    return found | ({"optim_args": ",".join(f"{key}={_word(value)}" for key, value in words.items())} if words else {})


def _tuples(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}


def _word(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ":".join(map(_word, value))
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


# ---------------------------------------------------------------------- everything said


def resolved(recipe: Recipe, run: Run) -> dict[str, Any]:
    """The recipe with every value written out; running it repeats the run.

    What is left out has the default None, or is decided by the data.
    """
    values, task = recipe.values, _task(recipe)
    classes = PROGRAMS[TASKS[task].program].load()[1]
    found: dict[str, Any] = {"format": FORMAT, "task": task, "model": _resolved_model(values.get("model", {}), run)}
    train = {"train": {"vocab_size": run.model_args.vocab_size}}
    if "from" in values.get("tokenizer", {}) or "from" not in found["model"]:
        found["tokenizer"] = values.get("tokenizer", {}) if "from" in values.get("tokenizer", {}) else train
    given = dict(zip(classes, _arguments(recipe)))
    for section, cls in classes.items():
        if section == "model":
            continue
        left_out = {*TASKS[task].decided, *NOT_OF_RECIPES, *SECRET, "hub_model_id", "hub_private_repo"}
        if section == "training" and "optimizer" in values:
            left_out |= TWICE.keys()
            found["optimizer"] = _resolved_optimizer(values["optimizer"])
        found[section] = {
            field.name: value
            for field in dataclasses.fields(cls)
            if field.init and field.name not in left_out and not field.name.startswith("_")
            if (value := _plain(given[section].get(field.name, _default(field)))) is not None
        }
    found |= {section: values[section] for section in ("evaluation", "hub", "plugins") if section in values}
    return found | {"resolved": _circumstances(run)}


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _plain(value: Any) -> Any:
    value = getattr(value, "value", value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if value is None or isinstance(value, (bool, int, float, str)) else None


def _resolved_model(given: Mapping[str, Any], run: Run) -> dict[str, Any]:
    chosen = {key: given[key] for key in ("attn_implementation",) if key in given}
    if "from" in given:
        commit = getattr(run.pretrained_config, "_commit_hash", None)
        return {**given, **({"revision": commit} if commit else {})}
    config = run._config(run.model_args.vocab_size)
    get = config._getattr_without_heterogeneous_validation
    names = [name for name in fields_of(FrankensteinConfig) if name not in DECIDED]
    values = {name: _plain(get(name)) for name in names}
    if config.is_heterogeneous:
        layers = config._heterogeneity_spec.per_layer_overrides
        values["per_layer_config"] = {str(layer): _plain(dict(own)) for layer, own in layers.items()}
    return {key: value for key, value in values.items() if value is not None} | chosen


def _resolved_optimizer(given: Mapping[str, Any]) -> dict[str, Any]:
    settings = dict(given)
    name = settings.pop("name")
    more: dict[str, Any] = {key: settings.pop(key) for key in ("groups", "stabilizers") if key in settings}
    values = OPTIMIZERS.get(name).params.from_dict(_tuples(settings), name).as_dict()
    return {"name": name, **{key: _plain(value) for key, value in values.items() if value is not None}, **more}


def _circumstances(run: Run) -> dict[str, Any]:
    """What a run depends on beside its recipe: data, versions, the state of this code."""
    import torch
    import transformers

    found: dict[str, Any] = {
        "versions": {
            "frankenstein_hf": FRANKENSTEIN_VERSION,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
        }
    }
    if commit := _commit():
        found["commit"] = commit
    files = (run.data_args.train_file, run.data_args.validation_file)
    if hashes := {Path(name).name: _hash(Path(name)) for name in files if name}:
        found["data"] = hashes
    return found


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _commit() -> str | None:
    """The commit of the checkout this code is in; None for one that is installed."""
    folder = Path(__file__).parents[2]
    if not (folder / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def same_data(recipe: Recipe, run: Run) -> None:
    """Raise `BadInput` if a resolved recipe names other data than there are now."""
    noted = recipe.values.get("resolved", {}).get("data", {})
    now = _circumstances(run).get("data", {})
    for name, value in noted.items():
        if name in now and now[name] != value:
            raise BadInput(
                f"{name} is not what it was when this recipe was resolved: its SHA-256 is {now[name][:12]}…, and was "
                f"{str(value)[:12]}…. To run with the new data all the same, delete the section 'resolved'."
            )
