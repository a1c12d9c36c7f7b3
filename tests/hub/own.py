"""Mixers from outside the package, registered for the length of a test."""

import contextlib
import importlib.util
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from frankenstein_hf.configuration.registries import MIXERS
from frankenstein_hf.modeling import implementations

numbers = itertools.count()


@contextlib.contextmanager
def registering() -> Iterator[pytest.MonkeyPatch]:
    """A stretch in which mixers can be registered and after which they are not."""
    with pytest.MonkeyPatch.context() as patch:
        MIXERS.names()
        patch.setattr(MIXERS, "_specs", dict(MIXERS._specs))
        patch.setattr(implementations, "_REGISTERED", dict(implementations._REGISTERED))
        yield patch


@contextlib.contextmanager
def own_mixer(path: Path) -> Iterator[ModuleType]:
    """The module of a file that registers a mixer."""
    name = f"own_mixer_{next(numbers)}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    with registering() as patch:
        patch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        yield module
