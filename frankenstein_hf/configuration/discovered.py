"""The built-in mixer specs, found by listing the folder: a new mixer needs no edit here.

A Hub bundle carries a generated module in place of this one, with one literal import per mixer it contains.
"""

from importlib import import_module
from pathlib import Path

from .component import MixerSpec

MIXERS = Path(__file__).parent / "mixers"


def spec_modules() -> list[str]:
    """Names, below `mixers`, of the modules with specs: "gla", or "latent.mla" in a family's folder."""
    paths = (path.relative_to(MIXERS).with_suffix("").parts for path in MIXERS.rglob("[!_]*.py"))
    return sorted(".".join(parts) for parts in paths)


def mixer_specs() -> list[MixerSpec]:
    """The `SPECS` of every module in `mixers/` and its folders."""
    return [spec for name in spec_modules() for spec in import_module(f"{__package__}.mixers.{name}").SPECS]
