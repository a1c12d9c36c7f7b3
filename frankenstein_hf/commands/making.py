"""Subcommands for people who add something: new, test, import."""

import importlib.util
import keyword
import re
import subprocess
import sys
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from ..training.failures import BadInput
from .app import CheckFailed, JsonOption, app, show


class What(StrEnum):
    """What can be begun."""

    MIXER = "mixer"
    RECIPE = "recipe"
    PLUGIN = "plugin"


@app.command()
def new(
    what: Annotated[What, typer.Argument(help="mixer, recipe or plugin.")],
    name: Annotated[str, typer.Argument(help="What it is called, such as my_mixer.")],
    folder: Annotated[Path, typer.Option("--in", help="Where to write it.")] = Path("."),
) -> None:
    """Begin a mixer (with a test that fails until it is written), a recipe, or a plugin that can be installed."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise BadInput(f"{name!a} must consist of lower-case letters, digits and underscores, and begin with a letter.")
    if what is What.RECIPE:
        files = {f"{name}.yaml": "recipe.yaml"}
    elif what is What.MIXER:
        files = {f"{name}.py": "mixer.py", f"test_{name}.py": "test_mixer.py"}
    else:
        files = {
            f"{name}/pyproject.toml": "pyproject.toml",
            f"{name}/{name}/__init__.py": "plugin.py",
            f"{name}/{name}/{name}_mixer.py": "mixer.py",
            f"{name}/tests/test_{name}.py": "test_mixer.py",
        }
    if there := [file for file in files if (folder / file).exists()]:
        raise CheckFailed(f"{folder / there[0]} exists already and would be lost; choose another name.")
    from ..data.atomic import write_text

    module = f"{name}.{name}_mixer" if what is What.PLUGIN else name
    for file, template in files.items():
        text = (resources.files(__package__) / "templates" / f"{template}.txt").read_text(encoding="utf-8")
        title = "".join(part.capitalize() for part in name.split("_"))
        text = text.replace("IMPORT", module).replace("CLASS", title).replace("NAME", name)
        print(write_text(folder / file, text))


@app.command()
def test(
    name: Annotated[str, typer.Argument(help="A mixer, optimizer or other part.")],
    module: Annotated[Path | None, typer.Option(help="The file of a mixer of your own, which registers it.")] = None,
) -> None:
    """Run the contract tests for one part: what every mixer, optimizer … has to keep."""
    root = Path(__file__).parents[2]
    if not (root / "tests" / "contract").is_dir() or importlib.util.find_spec("pytest") is None:
        raise BadInput(
            "the contract tests are in the repository, not in the installed package: clone it, install it with "
            "`pip install -e '.[dev]'` and run this again."
        )
    command = ["-m", "not slow", "--name", name, "-p", "no:cacheprovider", str(root / "tests" / "contract")]
    if module is not None:
        if not module.is_file():
            raise BadInput(f"--module {module}: there is no such file.")
        begin = f"import runpy, sys, pytest; runpy.run_path({str(module)!r}); sys.exit(pytest.main(sys.argv[1:]))"
        call = [sys.executable, "-c", begin, *command]
    else:
        call = [sys.executable, "-m", "pytest", *command]
    if subprocess.run(call, cwd=root, check=False).returncode:
        raise CheckFailed(f"{name} does not keep the contract.")


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="A YAML or JSON file of the Frankenstein Transformer toolkit.")],
    output: Annotated[Path | None, typer.Option(help="The recipe to write; by default NAME.recipe.yaml.")] = None,
    allow_loss: Annotated[bool, typer.Option("--allow-loss", help="Write it though something is impossible.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Turn a file of the toolkit into a recipe, and say what became of every key."""
    from ..recipes.importing import import_toolkit
    from ..recipes.reading import read_file, written

    text = read_file(file).text
    found = import_toolkit(text, str(file))
    show([row._asdict() for row in found.rows], as_json, found.table())
    if found.lost and not allow_loss:
        keys = ", ".join(row.key for row in found.lost)
        raise CheckFailed(f"nothing was written, since {keys} would be lost; --allow-loss writes the rest.")
    target = output or file.with_name(f"{file.stem}.recipe.yaml")
    if target.exists():
        raise CheckFailed(f"{target} exists already and would be lost; choose another --output.")
    from ..data.atomic import write_text

    write_text(target, written({"format": 1, "about": f"Imported from {file.name}", **found.recipe}))
    print(f"wrote {target}", file=sys.stderr)
