"""Mixers of one's own that travel with a checkpoint: which files can, and what becomes of them in a bundle.

A file travels as if it stood in the package as `modeling/own/<name>.py`; its imports of this package become relative
and are flattened with all others. What it takes from `frankenstein_hf` itself comes from a generated module. Lines at
its end say which specs it declares and which classes they mean.
"""

import ast
import dataclasses
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from ..components import SOURCES
from ..configuration.component import ComponentSpec, MixerSpec
from ..modeling.implementations import implementation
from .flat import PACKAGE, PARTS, ROOT, Module

PUBLIC: Module = ("modeling", "public")
FOLDER: Module = ("modeling", "own")
ALLOWED = ("torch", "transformers")  # beside the standard library and this package
DYNAMIC = ("import_module", "__import__", "exec", "eval")

PUBLIC_SOURCE = '''"""What the mixers that came with this checkpoint import from frankenstein_hf."""

from dataclasses import replace
from typing import Any

{imports}


def register_mixer(spec: Any, cls: type) -> None:
    """Does nothing: a checkpoint knows the mixers that came with it."""


def carried(spec: Any, place: str) -> Any:
    """The spec of a mixer whose class is at `place`."""
    return replace(spec, implementation=place)
'''
ENDING = "\n\nfrom ..public import carried  # noqa: E402, I001\n\nCARRIED = ({},)\n"


class Own(NamedTuple):
    """Mixers from outside the package, made ready to travel.

    Attributes:
        specs: Their specs, which name their place in the bundle.
        sources: Source text of their modules and of `PUBLIC`, by place.
    """

    specs: list[MixerSpec]
    sources: dict[Module, str]


def pack_own(specs: Iterable[ComponentSpec]) -> Own:
    """Mixers from outside this package, as modules of it.

    Raises:
        ValueError: One cannot travel. The message says why, and how to save without the code.
    """
    placed: list[MixerSpec] = []
    declared: dict[Path, list[str]] = {}  # what stands at the end of each file
    texts: dict[Path, str] = {}
    names: set[str] = set()
    for spec in specs:
        cls = implementation(spec)
        try:
            module, path = _home(spec, cls)
            if path not in texts:
                texts[path], taken = _relative(path, SOURCES[cls.__module__])
                names |= taken
            if twin := next((other for other in texts if other.stem == path.stem and other != path), None):
                raise ValueError(f"{twin} has the same name; rename one of the files")
            variable = _variable(module, spec)
            if variable is None:
                raise ValueError(f"no variable of {path.name} holds its MixerSpec; define it there, as SPEC = …")
        except ValueError as error:
            raise ValueError(
                f"The code of the mixer {spec.name!r} cannot travel with the checkpoint: {error}. Or save without code "
                "by save_pretrained(…, save_code=False) (under Trainer: set model.save_code = False), and register the "
                "mixer before loading."
            ) from None
        place = f"own.{path.stem}:{cls.__name__}"
        placed.append(dataclasses.replace(spec, implementation=place))  # type: ignore[arg-type]
        declared.setdefault(path, []).append(f'carried({variable}, "{place}")')
    if not placed:
        return Own([], {})
    sources = {PUBLIC: PUBLIC_SOURCE.format(imports="\n".join(_public_imports(names)))}
    for path, text in texts.items():
        sources[*FOLDER, path.stem] = text.rstrip() + ENDING.format(", ".join(declared[path]))
    return Own(placed, sources)


def _variable(module: ModuleType, spec: ComponentSpec) -> str | None:
    """What a module calls the spec."""
    values = vars(module).items()
    return next((name for name, value in values if isinstance(value, MixerSpec) and value == spec), None)


def _home(spec: ComponentSpec, cls: type) -> tuple[ModuleType, Path]:
    """The module that defines a mixer's class, and its file."""
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    if cls.__module__ == "__main__" or module is None or file is None or cls.__module__ not in SOURCES:
        raise ValueError(
            f"{cls.__name__} is defined in the program itself or in a notebook; put the class and its MixerSpec into a "
            "file of their own and import it"
        )
    path = Path(file)
    if getattr(module, cls.__name__, None) is not cls or path.suffix != ".py":
        raise ValueError(f"{cls.__qualname__} is not a class at the top level of {path.name}")
    if not re.fullmatch("[a-z][a-z0-9_]*", path.stem):
        raise ValueError(f"{path.name} is no name of lower-case letters, digits and underscores; rename the file")
    return module, path


def public_homes() -> dict[str, str]:
    """The names of `frankenstein_hf` that a file may import, with the modules they come from; "" for none."""
    from .. import _HOME

    homes = {name: module for name, module in _HOME.items() if module.partition(".")[0] in PARTS}
    return {**homes, "register_mixer": ""}


def _relative(path: Path, source: bytes) -> tuple[str, set[str]]:
    """A file's text with its imports of this package as they would be in `FOLDER`, and what it takes from the top.

    Raises:
        ValueError: It needs something that does not travel.
    """
    text = source.decode("utf-8").replace("\r\n", "\n")
    lines = text.split("\n")  # as ast counts them
    taken: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        where = f"{path.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in DYNAMIC:
            raise ValueError(f"{where}: {ast.unparse(node.func)}(…) may need code that does not come along")
        if isinstance(node, ast.Import):
            for alias in node.names:
                _check_library(alias.name, where)
                if alias.name.partition(".")[0] == PACKAGE:
                    raise ValueError(f"{where}: write `from {PACKAGE} import …` instead of `{ast.unparse(node)}`")
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level:
            raise ValueError(f"{where}: `{ast.unparse(node)}` needs another file; only a self-contained one travels")
        name = str(node.module)
        _check_library(name, where)
        if name.partition(".")[0] != PACKAGE:
            continue
        imported = [alias.name for alias in node.names]
        if name == PACKAGE:
            known = public_homes()
            if unknown := [name for name in imported if name not in known]:
                known_names = ", ".join(sorted(known))
                raise ValueError(f"{where}: {', '.join(unknown)} of {PACKAGE} does not travel; allowed: {known_names}")
            taken |= set(imported)
            target = "..public"
        else:
            target = _of_package(name, imported, where)
        written = rf"^(\s*from\s+){re.escape(name)}(\s+import\b)"
        lines[node.lineno - 1], found = re.subn(written, rf"\g<1>{target}\2", lines[node.lineno - 1])
        if not found:
            raise ValueError(f"{where}: `from {name} import` must stand on one line of its own")
    return "\n".join(lines), taken


def _check_library(name: str, where: str) -> None:
    top = name.partition(".")[0]
    if top not in (PACKAGE, *ALLOWED) and top not in sys.stdlib_module_names:
        raise ValueError(
            f"{where}: {top} may be missing where the checkpoint is loaded; a file that travels imports only torch, "
            f"transformers, {PACKAGE} and the standard library"
        )


def _of_package(name: str, imported: list[str], where: str) -> str:
    """The module `name` of this package, relative to `FOLDER`."""
    parts = name.split(".")[1:]
    private = [name for name in (*parts, *imported) if name.startswith("_") or name == "*"]
    if private or parts[0] not in PARTS or not ROOT.joinpath(*parts).with_suffix(".py").is_file():
        raise ValueError(
            f"{where}: `from {name} import {', '.join(imported)}` does not travel; public names of modules below "
            f"{' and '.join(f'{PACKAGE}.{part}' for part in PARTS)} do"
        )
    return f"..{'.'.join(parts[1:])}" if parts[0] == FOLDER[0] else f"...{'.'.join(parts)}"


def _public_imports(names: Iterable[str]) -> Iterator[str]:
    homes = public_homes()
    for name in sorted(names):
        if home := homes[name].split(".") if homes[name] else None:
            target = f".{'.'.join(home[1:])}" if home[0] == PUBLIC[0] else f"..{'.'.join(home)}"
            yield f"from {target} import {name}  # noqa: F401"
