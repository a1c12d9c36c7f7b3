"""What a model and its training are like: stable learning rates, graphs of consensus, energies of layers."""

from typing import TYPE_CHECKING, Any

from .curvature import StableStep, max_stable_lr
from .graphs import (
    GraphSpectrum,
    cycle_connectivity,
    dirichlet_energy,
    graph_spectrum,
    path_connectivity,
    rough_energy,
)

if TYPE_CHECKING:
    from .watching import StableLearningRate

__all__ = [
    "GraphSpectrum",
    "StableLearningRate",
    "StableStep",
    "cycle_connectivity",
    "dirichlet_energy",
    "graph_spectrum",
    "max_stable_lr",
    "path_connectivity",
    "rough_energy",
]


def __getattr__(name: str) -> Any:
    if name != "StableLearningRate":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .watching import StableLearningRate  # needs transformers' Trainer

    return StableLearningRate
