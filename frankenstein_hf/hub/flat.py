"""Rewriting one module of the package for the flat folder of a checkpoint.

transformers' loader copies only what it finds through `from .name import …` in one folder. So
`modeling/mixers/gated/gla.py` becomes `modeling_mixers_gated_gla.py`, and relative imports are rewritten in place (line
numbers stay).
"""

import ast
import functools
import re
from collections.abc import Iterable
from pathlib import Path

from ..modeling.hub_bundle import MARK

ROOT = Path(__file__).parent.parent
PACKAGE = __name__.partition(".")[0]
PARTS = ("configuration", "modeling")  # the parts of the package that travel

Module = tuple[str, ...]  # ("modeling", "mixers", "gla")


def flat_name(module: Module) -> str:
    """("modeling", "ops", "chunking") -> "modeling_ops_chunking"; the entry modules carry their part's name already."""
    return module[-1] if module[-1].startswith(f"{module[0]}_") else "_".join(module)


@functools.lru_cache(maxsize=256)
def flatten(source: str, module: Module, made: frozenset[Module] = frozenset()) -> tuple[str, tuple[Module, ...]]:
    """Rewrite the relative imports of one module for a flat folder.

    Args:
        source: The module's text.
        module: Its place in the package.
        made: Further modules, which exist in bundles only.

    Returns:
        The text with the same lines and the mark of a bundle at its end; the modules it imports.

    Raises:
        ValueError: An import that the loader could not follow.
    """
    lines = source.split("\n")  # as ast counts them
    imported: list[Module] = []

    def reject(node: ast.stmt | ast.expr, problem: str) -> ValueError:
        where = f"{source_path(module).relative_to(ROOT)}:{node.lineno}"
        return ValueError(f"{where}: `{ast.unparse(node)}` cannot travel with a checkpoint: {problem}")

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import) and any(alias.name.split(".")[0] == PACKAGE for alias in node.names):
            raise reject(node, "import relatively.")
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            raise reject(node, "the loader finds literal imports only.")
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level == 0:
            if str(node.module).split(".")[0] == PACKAGE:
                raise reject(node, "import relatively.")
            continue
        if node.module is None:
            raise reject(node, "write `from .module import name`.")
        target = (*module[: -node.level], *node.module.split("."))
        if node.level > len(module) or target[0] not in PARTS:
            raise reject(node, f"only {' and '.join(PARTS)} do.")
        if target not in made and not source_path(target).is_file():
            raise reject(node, "no such module; a package's names must be imported from the modules they are in.")
        written = re.escape("." * node.level + node.module)
        line, found = re.subn(
            rf"^(\s*from\s+){written}(\s+import\b)", rf"\1.{flat_name(target)}\2", lines[node.lineno - 1]
        )
        if not found:
            raise reject(node, "`from .module import` must stand on one line of its own.")
        lines[node.lineno - 1] = line
        imported.append(target)
    _check_strays(lines, imported, module)
    text = "\n".join(lines).rstrip() + f"\n{MARK}{'/'.join(module)}.py\n"
    return text, tuple(imported)


def _check_strays(lines: Iterable[str], imported: Iterable[Module], module: Module) -> None:
    """The loader reads lines, not syntax: prose that looks like a relative import would be followed too."""
    names = {flat_name(target) for target in imported}
    for number, line in enumerate(lines, 1):
        match = re.match(r"\s*(?:from\s+\.(\S+)\s+import|import\s+\.(\S+)\s*$)", line)
        if match and (match[1] or match[2]) not in names:
            where = f"{source_path(module).relative_to(ROOT)}:{number}"
            raise ValueError(f"{where}: {line.strip()!r} looks like an import to transformers' loader; rephrase it.")


def source_path(module: Module) -> Path:
    """The file of a module."""
    return ROOT.joinpath(*module).with_suffix(".py")
