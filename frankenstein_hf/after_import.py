"""Doing something to a module as soon as somebody imports it.

What this package adds to transformers and PEFT belongs to modules whose import takes seconds, which most programs need
not spend. So it waits until somebody else imports them.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds one module as the other finders would, and has functions called with it once it has run."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.functions: list[Callable[[ModuleType], None]] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                for function in self.functions:
                    function(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def after_import(name: str, function: Callable[[ModuleType], None]) -> None:
    """Call `function(module)` now if the module called `name` is loaded, else right after it is.

    A module that is just being imported counts as loaded when it has run.
    """
    finder = next((other for other in sys.meta_path if isinstance(other, _AfterImport) and other.name == name), None)
    module = sys.modules.get(name)
    if module is not None and (finder is None or not getattr(module.__spec__, "_initializing", False)):
        function(module)
        return
    if finder is None:
        finder = _AfterImport(name)
        sys.meta_path.insert(0, finder)
    if function not in finder.functions:
        finder.functions.append(function)
