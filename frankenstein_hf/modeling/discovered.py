"""The code of components, imported when it is asked for.

A Hub bundle carries a generated module in place of this one, with one literal import per class it contains.
"""

from importlib import import_module


def find_class(place: str) -> type:
    """The class at `place`, "module:Class" below this package."""
    module, _, name = place.partition(":")
    return getattr(import_module(f"{__package__}.{module}"), name)
