"""Subcommands that answer at once: list, doctor."""

import importlib.util
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from typing import Annotated, Any

import typer

from .. import recipes
from ..configuration.values import did_you_mean
from ..recipes.plugins import installed
from ..training.failures import BadInput
from ..training.tasks import PROGRAMS, TASKS
from .app import JsonOption, RecipesOption, app, show

EXTRAS = {
    "classification": ("sklearn", "nervaluate"),
    "embeddings": ("sentence_transformers",),
    "eval": ("lm_eval",),
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "peft": ("peft",),
    "plots": ("matplotlib",),
    "triton": ("triton",),
}


def kinds() -> list[str]:
    """What can be listed."""
    return [*recipes.installed_schema()["x-parts"], "presets", "tasks", "plugins"]


@app.command("list")
def list_(
    kind: Annotated[str, typer.Argument(help="mixers, optimizers, norms, presets, tasks …", autocompletion=kinds)],
    name: Annotated[str | None, typer.Argument(help="One of them: parameters, ranges, paper.")] = None,
    as_json: JsonOption = False,
    folders: RecipesOption = None,
) -> None:
    """List what there is to choose from, or describe one of it."""
    if kind not in kinds():
        raise BadInput(f"there is no list of {kind!r}" + did_you_mean(kind, kinds()))
    found = _found(kind, folders or [])
    if name is None:
        lines = [f"{key:<24} {own.get('summary', '')}".rstrip() for key, own in sorted(found.items())]
        show(found, as_json, "\n".join(lines))
        return
    if name not in found:
        raise BadInput(f"none of the {kind} is called {name!r}" + did_you_mean(name, found))
    own = found[name] | ({"parameters": found_} if (found_ := parameters(kind, name)) else {})
    show({"name": name, **own}, as_json, "\n".join(_card(name, own)))


def _found(kind: str, folders: list[Any]) -> dict[str, dict[str, Any]]:
    if kind == "presets":
        return {name: _preset(path) for name, path in recipes.presets(folders).items()}
    if kind == "tasks":
        return {
            name: {"summary": task.summary, "sections": ", ".join(PROGRAMS[task.program].classes)}
            for name, task in TASKS.items()
        }
    if kind == "plugins":
        return {
            name: {"summary": f"{point.value} of {point.dist.name if point.dist else '?'}"}
            for name, point in installed().items()
        }
    return recipes.installed_schema()["x-parts"][kind]


def _preset(path: Any) -> dict[str, Any]:
    from ..recipes.reading import read_file

    values = read_file(path).values
    missing = values.get("unavailable")
    return {"summary": values.get("about", "") + (f" (not available: {missing})" if missing else "")}


def parameters(kind: str, name: str) -> dict[str, Any]:
    """The parameters of one part, by name, as the schema describes them."""
    schema = recipes.installed_schema()
    definitions = schema["$defs"]
    if kind == "mixers":
        return definitions[f"mixer_{name}"]["properties"]
    if kind == "stabilizers":
        return definitions["optimizer"]["properties"]["stabilizers"]["properties"][name]["properties"]
    for case in definitions["optimizer" if kind == "optimizers" else "model"].get("allOf", ()):
        ((_, value),) = case["if"]["properties"].items()
        then = case["then"]["properties"]
        if value["const"] == name and kind == "optimizers":
            return then
        if value["const"] == name and f"{kind[:-1]}_params" in then:
            return then[f"{kind[:-1]}_params"]["properties"]
    return {}


def _card(name: str, own: dict[str, Any]) -> Iterator[str]:
    yield f"{name}: {own.get('summary', '')}"
    for key, value in own.items():
        if key in ("summary", "parameters"):
            continue
        shown = ", ".join(map(str, value)) if isinstance(value, list) else {True: "yes", False: "no"}.get(value, value)
        yield f"  {key.replace('_', ' ')}: {shown}"
    for key, what in own.get("parameters", {}).items():
        default = f", default {what['default']}" if "default" in what else ""
        yield f"  {key} ({_range(what)}{default}): {what.get('description', '')}"


def _range(what: dict[str, Any]) -> str:
    from ..recipes.checking import words

    return words(what)


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Versions, threads, devices, and what each extra would need."""
    versions = {}
    for package in ("frankenstein_hf", "torch", "transformers", "tokenizers", "datasets", "accelerate", "typer"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    missing = {
        extra: [module for module in modules if importlib.util.find_spec(module) is None]
        for extra, modules in EXTRAS.items()
    }
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "versions": versions,
        "processors": os.cpu_count(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "missing": missing,
    }
    try:
        import torch

        found["threads"] = torch.get_num_threads()
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        found["devices"] = f"{torch.accelerator.device_count()} × {accelerator}" if accelerator else "processor only"
    except Exception as error:  # a broken installation is what this command is for
        found["torch"] = f"cannot be imported: {error}"
    lines = [f"{key:<18} {value}" for key, value in {**found, **versions}.items() if not isinstance(value, dict)]
    lines += [f"{extra:<18} {'lacks ' + ', '.join(names) if names else 'complete'}" for extra, names in missing.items()]
    show(found, as_json, "\n".join(lines))
