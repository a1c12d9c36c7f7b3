"""From a component's spec to the class that computes it, imported on first use."""

from typing import Any

from ..configuration.component import ComponentSpec
from .discovered import find_class

_REGISTERED: dict[tuple[str, str], type] = {}


def _key(spec: ComponentSpec) -> tuple[str, str]:
    return spec.kind, spec.name  # a mixer may be called like a norm


def register_implementation(spec: ComponentSpec, implementation: type) -> None:
    """Use `implementation` for a component that comes from outside this package."""
    _REGISTERED[_key(spec)] = implementation


def is_third_party(spec: ComponentSpec) -> bool:
    """Whether the component's code lives outside this package."""
    return _key(spec) in _REGISTERED


def implementation(spec: ComponentSpec) -> type:
    """The class behind `spec`."""
    if _key(spec) in _REGISTERED:
        return _REGISTERED[_key(spec)]
    return find_class(spec.implementation)


def component_class(config: Any, kind: str, layer_idx: int | None = None) -> Any:
    """The class of the component of this `kind` that `config` names, for one layer if it is a layer's."""
    return implementation(config.component(kind, layer_idx).spec)
