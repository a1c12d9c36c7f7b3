"""Where the weights of a converted model come from, layer by layer."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class LayerReport:
    """One layer's mixer.

    Attributes:
        layer: Its number.
        mixer: Its name.
        copied: Tensors that are the host's as they were, heads repeated if need be.
        derived: Tensors that were set so that the layer begins near the one it replaces.
        new: Tensors initialised as in a new model.
        dropped: Tensors of the host that have no meaning there.
    """

    layer: int
    mixer: str
    copied: list[str] = field(default_factory=list)
    derived: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class TransferReport:
    """A converted model.

    Attributes:
        host: `model_type` it comes from.
        layers: Its layers.
    """

    host: str
    layers: list[LayerReport]

    def __str__(self) -> str:
        lines = [f"converted from {self.host!r}"]
        for layer in self.layers:
            parts = {"copied": layer.copied, "derived": layer.derived, "new": layer.new, "dropped": layer.dropped}
            words = "; ".join(f"{word} {', '.join(names)}" for word, names in parts.items() if names)
            lines.append(f"layer {layer.layer} ({layer.mixer}): {words}")
        return "\n".join(lines)


def remember(model: Any, report: TransferReport) -> None:
    """Keep a report with its model, in this process only."""
    model.__dict__["_transfer_report"] = report


def transfer_report(model: Any) -> TransferReport:
    """What was copied, derived and new in every layer of a model that `from_transformers` made.

    Raises:
        ValueError: The model was not made by it, or has been saved and loaded since.
    """
    report = model.__dict__.get("_transfer_report")
    if report is None:
        raise ValueError(
            f"This {type(model).__name__} has no report: only the model that from_transformers returned has one, which "
            "is not saved with it."
        )
    return report
