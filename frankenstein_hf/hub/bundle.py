"""Flattening the package into the Python files that travel with a checkpoint.

transformers' loader copies only what it finds through `from .name import …` in one folder. So `modeling/mixers/gla.py`
becomes `modeling_mixers_gla.py`, relative imports are rewritten in place (line numbers stay), and the two modules that
import by name are replaced by ones with a literal import per component the checkpoint uses.
"""

import ast
import functools
import re
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path

from ..configuration.component import ComponentSpec, MixerSpec
from ..configuration.discovered import spec_modules
from ..modeling.hub_bundle import HEADS, MARK, entry_modules

ROOT = Path(__file__).parent.parent
PACKAGE = __name__.partition(".")[0]
PARTS = ("configuration", "modeling")  # the parts of the package that travel

Module = tuple[str, ...]  # ("modeling", "mixers", "gla")

DISCOVERED: Module = ("configuration", "discovered")
CLASSES: Module = ("modeling", "discovered")

DISCOVERED_SOURCE = '''"""The specs of the mixers this checkpoint uses."""

from .component import MixerSpec

NAMES = {names}


def mixer_specs() -> list[MixerSpec]:
    """The specs this checkpoint carries."""
{imports}

    every = ({specs},)
    return [spec for specs in every for spec in specs if spec.name in NAMES]
'''

CLASSES_SOURCE = '''"""The code of components, as far as this checkpoint uses it."""


def find_class(place: str) -> type:
    """The class at `place`, "module:Class"."""
{branches}
    raise ValueError(
        f"The code of {{place!r}} is not part of this checkpoint; install frankenstein_hf to build a model with it."
    )


def entries() -> None:
    """Imports what the Auto classes load: transformers copies a checkpoint's code by the imports it sees."""
{entries}
'''


def bundle_sources(components: Sequence[ComponentSpec]) -> dict[str, str]:
    """The bundle of a checkpoint.

    Args:
        components: Specs of what the checkpoint uses, all from this package.

    Returns:
        Source text by file name, of the modules reachable from the entry files through these components.

    Raises:
        ValueError: A module cannot be flattened; the message names the line and the remedy.
    """
    generated = {DISCOVERED: _discovered(components), CLASSES: _classes(components)}
    flat: dict[str, str] = {}
    origins: dict[str, Module] = {}
    pending: list[Module] = [(name.partition("_")[0], name) for name in entry_modules()]
    while pending:
        module = pending.pop()
        name = flat_name(module)
        if origins.setdefault(name, module) != module:
            raise ValueError(f"{_path(module)} and {_path(origins[name])} would both become {name}.py; rename one.")
        if f"{name}.py" not in flat:
            source = generated.get(module) or _path(module).read_text(encoding="utf-8")
            flat[f"{name}.py"], imported = flatten(source, module)
            pending += imported
    return flat


def flat_name(module: Module) -> str:
    """("modeling", "mixers", "gla") -> "modeling_mixers_gla"; the entry modules carry their part's name already."""
    return module[-1] if module[-1].startswith(f"{module[0]}_") else "_".join(module)


@functools.lru_cache(maxsize=256)
def flatten(source: str, module: Module) -> tuple[str, tuple[Module, ...]]:
    """Rewrite the relative imports of one module for a flat folder.

    Args:
        source: The module's text.
        module: Its place in the package.

    Returns:
        The text with the same lines and the mark of a bundle at its end; the modules it imports.

    Raises:
        ValueError: An import that the loader could not follow.
    """
    lines = source.split("\n")  # as ast counts them
    imported: list[Module] = []

    def reject(node: ast.stmt | ast.expr, problem: str) -> ValueError:
        where = f"{_path(module).relative_to(ROOT)}:{node.lineno}"
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
        if not _path(target).is_file():
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
            where = f"{_path(module).relative_to(ROOT)}:{number}"
            raise ValueError(f"{where}: {line.strip()!r} looks like an import to transformers' loader; rephrase it.")


def _path(module: Module) -> Path:
    return ROOT.joinpath(*module).with_suffix(".py")


def _discovered(components: Iterable[ComponentSpec]) -> str:
    names = sorted(spec.name for spec in components if isinstance(spec, MixerSpec))
    modules = sorted({_spec_module(name) for name in names})
    return DISCOVERED_SOURCE.format(
        names=tuple(names),
        imports="\n".join(f"    from .mixers.{module} import SPECS as {_variable(module)}" for module in modules),
        specs=", ".join(map(_variable, modules)),
    )


def _variable(module: str) -> str:
    return module.replace(".", "_") + "_specs"


def _spec_module(name: str) -> str:
    for module in spec_modules():
        if any(spec.name == name for spec in import_module(f"{PACKAGE}.configuration.mixers.{module}").SPECS):
            return module
    raise ValueError(f"No module in {PACKAGE}/configuration/mixers declares the mixer {name!r}.")


def _classes(components: Iterable[ComponentSpec]) -> str:
    branches = []
    for place in sorted({spec.implementation for spec in components}):
        module, _, name = place.partition(":")
        branches += [
            f'    if place == "{place}":',
            f"        from .{module} import {name}",
            "",
            f"        return {name}",
        ]
    models = [reference.split(".") for reference in HEADS.values()]
    entries = (f"    from .{module} import {name}  # noqa: F401" for module, name in models)
    return CLASSES_SOURCE.format(branches="\n".join(branches), entries="\n".join(entries))
