"""Recipes: one file that says which model is trained how on which data, and what is done with it.

`load` reads one, `validate` judges it, `describe` says what it makes, `run` does it, `evaluate` judges a finished run.
The command line and everything else call these functions only. Nothing here is imported by models or optimizers, and
this module itself needs no torch.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checking import installed_schema, problems
from .loading import RESOLVED, WRITTEN, Recipe, load, presets
from .reading import BadRecipe

if TYPE_CHECKING:
    from ..training.programs import Run

__all__ = [
    "RESOLVED",
    "WRITTEN",
    "BadRecipe",
    "Recipe",
    "evaluate",
    "installed_schema",
    "load",
    "presets",
    "run",
    "validate",
]


def validate(recipe: Recipe) -> "Run":
    """Judge the recipe by building everything but data and weights; returns the run, of which nothing has begun.

    Raises:
        BadRecipe: All that is wrong with names, types and ranges, else what keys do not agree on.
    """
    if found := problems(recipe.document):  # before torch is imported
        raise BadRecipe(found)
    from .building import build

    return build(recipe)


def run(recipe: Recipe) -> dict[str, Any]:
    """Train as the recipe says, and evaluate; returns what `metrics.json` holds.

    The output folder gets `recipe.yaml`, as written, and `recipe.resolved.yaml`, in which every value is said.

    Raises:
        BadRecipe, BadInput: It cannot work; nothing was written.
        KeyboardInterrupt, RunFailed: As `Run.train_and_evaluate`.
    """
    made = validate(recipe)
    from .building import same_data

    same_data(recipe, made)
    return made.execute()


def evaluate(recipe: Recipe, model: str | Path, output_dir: str | Path) -> dict[str, Any]:
    """Evaluate a trained model on the held-out data of a recipe.

    Args:
        recipe: What it was trained by, or would have been.
        model: A folder or a name on the Hub.
        output_dir: Where `metrics.json` goes.

    Raises:
        BadRecipe, BadInput: It cannot work.
    """
    values = dict.fromkeys(("model", "tokenizer")) | {
        "training": {"do_train": False, "output_dir": str(output_dir), "overwrite_output_dir": False}
    }
    fresh = recipe.with_settings(values, "evaluate").with_settings({"model": {"from": str(model)}}, "evaluate")
    return validate(fresh).execute()
