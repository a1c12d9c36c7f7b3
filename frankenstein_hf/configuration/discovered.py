"""The built-in mixer specs, found by listing the folder: a new mixer needs no edit here.

A Hub bundle carries a generated module in place of this one, with one literal import per mixer it contains.
"""

from importlib import import_module
from pathlib import Path

from .component import MixerSpec


def mixer_specs() -> list[MixerSpec]:
    """The `SPECS` of every module in `mixers/`."""
    modules = sorted(path.stem for path in (Path(__file__).parent / "mixers").glob("[!_]*.py"))
    return [spec for module in modules for spec in import_module(f"{__package__}.mixers.{module}").SPECS]
