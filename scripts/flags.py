"""Answers a mistyped flag before anything heavy is imported.

Importing torch and transformers takes seconds. The flags of a program are the fields of its dataclasses, and those can
be read from the sources without running them: of the program itself, of `frankenstein_hf/training`, and of the
libraries whose `TrainingArguments` they extend. What passes here is parsed properly afterwards.
"""

import ast
import difflib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from frankenstein_hf.training.failures import run_main
from frankenstein_hf.training.tasks import PROGRAMS

LIBRARIES = {  # where the classes that ours extend are defined
    "TrainingArguments": ("transformers", "training_args.py"),
    "SentenceTransformerTrainingArguments": ("sentence_transformers", "sentence_transformer/training_args.py"),
    "BaseTrainingArguments": ("sentence_transformers", "base/training_args.py"),
}
CONFIG = "FrankensteinConfig"
HELP = ("help", "help_all")


def program(name: str) -> Callable[..., dict[str, Any]]:
    """`main(argv=None)` of the program called `name`, which returns its metrics."""
    return PROGRAMS[name].main


def run(file: str, name: str) -> None:
    """Run the program called `name` as the script `file`, once its flags are known to be some."""
    check(file, *PROGRAMS[name].class_names())
    run_main(program(name))


def check(program: str, *classes: str) -> None:
    """End the process with status 2 and one line if the command line has a flag, or its file a key, that none knows.

    Args:
        program: Path of the program.
        classes: Names of the dataclasses it reads its arguments into.
    """
    if problem := problem_with(sys.argv[1:], program, *classes):
        print(f"{Path(program).name}: error: {problem}", file=sys.stderr)
        raise SystemExit(2)


def problem_with(argv: Sequence[str], program: str, *classes: str) -> str | None:
    """What is wrong with the names in a command line; None when nothing is, or nothing can be said here."""
    try:
        sources = Sources(Path(program))
        names = {name for cls in classes for name in sources.fields(cls)}
        if argv and argv[0].endswith((".yaml", ".yml", ".json")):
            return _problem_with_file(Path(argv[0]), names)
        for argument in argv:
            if argument.startswith("--") and " " not in argument.partition("=")[0] and argument != "--":
                name = argument[2:].partition("=")[0]
                if not _is_known(name, names):
                    return unknown(argument, name, names, sources)
    except (OSError, SyntaxError, LookupError):  # a library of another shape: the parser proper will judge
        return None
    return None


def unknown(argument: str, name: str, names: set[str], sources: "Sources") -> str:
    """What to say about a flag that none knows."""
    if "config_overrides" in names and name in sources.fields(CONFIG):
        return f"{argument} is a key of a new model's config: --config_overrides {name}=…,other_key=…"
    close = difflib.get_close_matches(name, sorted(names), n=1)
    return f"Unknown argument {argument!a}" + (f"; did you mean --{close[0]}?" if close else "; --help lists all.")


def _is_known(name: str, names: set[str]) -> bool:
    """As argparse sees it: hyphens for underscores, --no_ before a switch, and beginnings that are unique."""
    plain = name.replace("-", "_")
    return any(
        known == part or known.startswith(part)
        for part in (plain, plain.removeprefix("no_"))
        for known in (*names, *HELP)
    )


def _problem_with_file(path: Path, names: set[str]) -> str | None:
    import yaml

    text = path.read_text(encoding="utf-8")
    try:
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):
        return None
    for key in values if isinstance(values, dict) else ():
        if key not in names:
            close = difflib.get_close_matches(str(key), sorted(names), n=1)
            return f"{path}: unknown key {key!a}" + (f"; did you mean {close[0]!r}?" if close else ".")
    return None


class Sources:
    """Classes by name, read from source files and never imported.

    Args:
        program: The program's file, whose own dataclasses are found too.
    """

    def __init__(self, program: Path) -> None:
        package = _package("frankenstein_hf")
        files = [program, *sorted((package / "training").glob("*.py")), *(package / "configuration").glob("*.py")]
        self._classes = {node.name: node for file in files for node in _classes(file)}

    def fields(self, name: str) -> list[str]:
        """Names of the fields of a dataclass and of those it extends."""
        if name not in self._classes and name in LIBRARIES:
            library, file = LIBRARIES[name]
            self._classes |= {node.name: node for node in _classes(_package(library) / file)}
        node = self._classes.get(name)
        if node is None:
            return []
        found = [field for base in node.bases if isinstance(base, ast.Name) for field in self.fields(base.id)]
        fields = (statement for statement in node.body if isinstance(statement, ast.AnnAssign))
        own = (field.target for field in fields if "ClassVar" not in ast.unparse(field.annotation))
        return found + [target.id for target in own if isinstance(target, ast.Name)]


def _classes(file: Path) -> Iterator[ast.ClassDef]:
    tree = ast.parse(file.read_bytes())
    return (node for node in tree.body if isinstance(node, ast.ClassDef))


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)  # of a package at the top: found, not imported
    if spec is None or not spec.submodule_search_locations:
        raise LookupError(name)
    return Path(next(iter(spec.submodule_search_locations)))
