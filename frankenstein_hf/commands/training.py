"""Subcommands about recipes and runs: train, evaluate, validate, describe, schema, import."""

import json
import os
import shutil
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import recipes
from ..training.failures import BadInput
from .app import (
    CheckFailed,
    JsonOption,
    RecipeArgument,
    RecipesOption,
    SettingsArgument,
    app,
    show,
    talk_on_stderr,
)


class Resume(StrEnum):
    """What a run does with checkpoints it finds."""

    AUTO = "auto"
    NEVER = "never"


@app.command()
def train(
    recipe: RecipeArgument,
    settings: SettingsArgument = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would take, and train nothing.")] = False,
    measure: Annotated[bool, typer.Option(help="With --dry-run: time one layer of each kind.")] = True,
    resume: Annotated[Resume, typer.Option(help="Go on from the last checkpoint, or refuse to.")] = Resume.AUTO,
    launch: Annotated[Path | None, typer.Option(help="A file of `accelerate config`: run on several devices.")] = None,
    as_json: JsonOption = False,
    folders: RecipesOption = None,
) -> None:
    """Train a model as a recipe says, and evaluate it."""
    read = recipes.load(recipe, settings or (), folders or ())
    if dry_run:
        from .dry_run import estimate

        with talk_on_stderr():
            found = estimate(recipes.validate(read), measure)
        show(found.values, as_json, str(found))
        return
    output = Path(read.values.get("training", {}).get("output_dir", f"runs/{read.name}"))
    if resume is Resume.NEVER and list(output.glob("checkpoint-*")):
        raise CheckFailed(
            f"{output} has checkpoints, and --resume never forbids to go on from them. Choose another "
            "training.output_dir, or start over with training.overwrite_output_dir=true, which deletes them."
        )
    if launch is not None:
        _launch(launch, [recipe, *(settings or ()), *(f"--recipes={folder}" for folder in folders or ())])
    with talk_on_stderr():
        metrics = recipes.run(read)
    show(metrics, as_json, _results(metrics, output))


def _launch(file: Path, arguments: list[str]) -> None:
    if not file.is_file():
        raise BadInput(f"--launch {file}: there is no such file; `accelerate config --config_file {file}` makes one.")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
    os.execv(sys.executable, [*command, "-m", "frankenstein_hf.commands", "train", *arguments])


def _results(metrics: dict[str, Any], output: Path) -> str:
    lines = [f"{output}"]
    baseline = next((key for key in ("unigram", "constant", "tf_idf") if key in metrics), "")
    for moment in ("before", "after", baseline):
        if moment in metrics:
            words = ", ".join(f"{key} {value:.4g}" for key, value in metrics[moment].items())
            lines.append(f"{moment if 'after' in metrics or moment == baseline else 'held out':<9} {words}")
    return "\n".join(lines)


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(help="A trained model: a run's folder, or a name on the Hub.")],
    recipe: Annotated[str | None, typer.Argument(help="The recipe with the data; by default the run's own.")] = None,
    settings: SettingsArgument = None,
    output_dir: Annotated[Path | None, typer.Option(help="By default `evaluation` in the run's folder.")] = None,
    as_json: JsonOption = False,
    folders: RecipesOption = None,
) -> None:
    """Evaluate a trained model on held-out data."""
    if recipe is not None and "=" in recipe:
        settings, recipe = [recipe, *(settings or ())], None
    read = recipes.load(recipe or _recipe_of(model), settings or (), folders or ())
    output = output_dir or (Path(model) / "evaluation" if Path(model).is_dir() else Path("runs") / f"{read.name}-eval")
    with talk_on_stderr():
        metrics = recipes.evaluate(read, model, output)
    show(metrics, as_json, _results(metrics, output))


def _recipe_of(model: str) -> str:
    if Path(model).is_dir():
        if not (Path(model) / recipes.RESOLVED).is_file():
            raise BadInput(f"{model} has no {recipes.RESOLVED}, so say with which recipe's data to evaluate it.")
        return model
    return f"hub:{model}"


@app.command()
def validate(
    recipe: RecipeArgument,
    settings: SettingsArgument = None,
    as_json: JsonOption = False,
    folders: RecipesOption = None,
) -> None:
    """Say everything that is wrong with a recipe, or that nothing is."""
    read = recipes.load(recipe, settings or (), folders or ())
    try:
        with talk_on_stderr():
            recipes.validate(read)
    except recipes.BadRecipe as error:
        if not as_json:
            raise
        show({"valid": False, "problems": error.problems}, True, "")
        raise typer.Exit(2) from None
    show({"valid": True, "problems": []}, as_json, f"{read.name}: nothing is wrong.")


@app.command()
def describe(
    what: Annotated[str, typer.Argument(metavar="RECIPE|MODEL", help="A recipe, or a trained model.")],
    settings: SettingsArgument = None,
    as_json: JsonOption = False,
    folders: RecipesOption = None,
) -> None:
    """Layers, parameters by group, decode state, optimizer groups, references."""
    from .describing import description

    with talk_on_stderr():
        found = description(what, settings or (), folders or ())
    show(found.values, as_json, str(found))


@app.command()
def schema(
    installed: Annotated[bool, typer.Option(help="Make it anew, with what is installed.")] = False,
) -> None:
    """Print the JSON Schema of recipes, for editors."""
    if installed:
        from ..recipes.plugins import installed as plugins
        from ..recipes.plugins import load_plugins
        from ..recipes.schema import schema as made

        load_plugins({point.dist.name for point in plugins().values() if point.dist})
        print(json.dumps(made(), indent=1, ensure_ascii=False))
    else:
        print(json.dumps(recipes.installed_schema(), indent=1, ensure_ascii=False))


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(help="A run's folder.")],
    repo_id: Annotated[str | None, typer.Option(help="Name on the Hub; by default the recipe's hub.repo_id.")] = None,
    private: Annotated[bool, typer.Option(help="Make a private repository.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be pushed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Push a trained model to the Hub."""
    from ..hub.cards import is_repo_id

    if not (folder / "config.json").is_file():
        raise BadInput(f"{folder} has no config.json, so there is no model in it.")
    if repo_id is None and (folder / recipes.RESOLVED).is_file():
        repo_id = recipes.load(folder).values.get("hub", {}).get("repo_id")
    if repo_id is None or not is_repo_id(repo_id):
        raise BadInput(f"--repo-id {repo_id!r} must be a name on the Hub, such as me/my-model.")
    names = ("*.json", "*.safetensors", "*.py", "*.md", "*.txt", "*.jinja", "loss.png")
    files = sorted({path for name in names for path in folder.glob(name) if path.is_file()})
    sizes = {path.name: path.stat().st_size for path in files}
    listing = "\n".join(f"{size:>14,}  {name}" for name, size in sizes.items())
    text = (
        f"{repo_id}: {len(files)} files, {sum(sizes.values()):,} bytes\n{listing}\n                {recipes.RESOLVED}"
    )
    if dry_run:
        show({"repo_id": repo_id, "files": sizes}, as_json, text)
        return
    if not yes:
        print(text, file=sys.stderr)
        if not sys.stdin.isatty() or not typer.confirm("Push them?", err=True):
            raise CheckFailed("nothing was pushed; --yes pushes without asking.")
    import tempfile

    from huggingface_hub import HfApi

    from ..recipes.reading import written

    api = HfApi()
    api.create_repo(repo_id, private=private, exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        for path in files:
            shutil.copy2(path, made)
        if (folder / recipes.RESOLVED).is_file():
            (Path(made) / recipes.RESOLVED).write_text(written(_without_paths(recipes.load(folder).values)))
        done = api.upload_folder(repo_id=repo_id, folder_path=made, commit_message="A model of frankenstein_hf")
    show({"repo_id": repo_id, "commit": str(done)}, as_json, str(done))


def _without_paths(values: dict[str, Any]) -> dict[str, Any]:
    """A resolved recipe as the Hub gets it: nothing of this machine's folders."""
    paths = {"data": ("train_file", "validation_file"), "training": ("output_dir", "logging_dir", "run_name")}
    return {
        section: {key: value for key, value in own.items() if key not in paths.get(section, ())}
        if isinstance(own, dict)
        else own
        for section, own in values.items()
    }
