"""From a component's spec to the class that computes it, imported on first use.

A Hub bundle carries a generated module in place of this one, with one literal import per implementation it contains.
"""

from importlib import import_module

from ..configuration.component import ComponentSpec

_REGISTERED: dict[tuple[str, str], type] = {}


def _key(spec: ComponentSpec) -> tuple[str, str]:
    return type(spec).__name__, spec.name  # a mixer may be called like a norm


def register_implementation(spec: ComponentSpec, implementation: type) -> None:
    """Use `implementation` for a component that comes from outside this package."""
    _REGISTERED[_key(spec)] = implementation


def is_third_party(spec: ComponentSpec) -> bool:
    """Whether the component's code lives outside this package, so that no bundle can carry it."""
    return _key(spec) in _REGISTERED


def implementation(spec: ComponentSpec) -> type:
    """The class behind `spec`."""
    if _key(spec) in _REGISTERED:
        return _REGISTERED[_key(spec)]
    module, _, name = spec.implementation.partition(":")
    return getattr(import_module(f"{__package__}.{module}"), name)
