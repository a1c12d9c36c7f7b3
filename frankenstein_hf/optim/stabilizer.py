"""What stabilizers share: finding the projections whose products are attention logits, and joining an optimizer."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

ParamGroups = list[dict[str, Any]]


@dataclass(frozen=True)
class ScoreLayer:
    """A layer whose attention logits are dot products of the heads of two trainable projections.

    Attributes:
        base: The stack the layer belongs to.
        index: Its number there.
        mixer: Its mixer.
        scaled: Of "q_proj" and "k_proj", what may be rescaled to bound the logits.
    """

    base: nn.Module
    index: int
    mixer: nn.Module
    scaled: tuple[str, ...]

    @property
    def query(self) -> nn.Linear:
        """The query projection [H·W, D]."""
        return self.mixer.q_proj  # type: ignore[return-value]

    @property
    def key(self) -> nn.Linear:
        """The key projection [G·W, D]."""
        return self.mixer.k_proj  # type: ignore[return-value]


class Stabilizer:
    """Joins an optimizer of `model`: may rearrange its parameter groups and hook its steps.

    What has to survive a resume lives in the parameter groups, which every torch optimizer saves.

    Args:
        model: The model being trained.
        params: Parameters of the stabilizer.

    Raises:
        ValueError: No layer of the model has such logits, or their projections cannot be treated.
    """

    name: str

    def __init__(self, model: nn.Module, params: Any) -> None:
        self.params = params
        self.layers = list(score_layers(model, self.name))
        for layer in self.layers:
            chosen = layer.mixer.config.component("qk_norm", layer.index).spec.name  # type: ignore[union-attr, operator]
            if chosen != "none" and layer.mixer.config.mixer_spec_for(layer.index).qk_norm:  # type: ignore[union-attr, operator]
                raise ValueError(
                    f"{self.name!r} bounds logits by the weights of q_proj and k_proj, and qk_norm={chosen!r} of layer "
                    f"{layer.index} undoes any change of their size: leave one of them out."
                )
        if not self.layers:
            raise ValueError(
                f"{self.name!r} acts on attention logits that are dot products of trained queries and keys, and no "
                "layer of the model has them: use mixers whose mixer_spec(name).logits is not empty, or leave it out."
            )

    def regroup(self, groups: ParamGroups) -> ParamGroups:
        """The parameter groups, before the optimizer is built."""
        return groups

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Hook the optimizer's steps."""
        raise NotImplementedError


def score_layers(model: nn.Module, owner: str) -> Iterator[ScoreLayer]:
    """The layers of our stacks in `model` with dot-product logits; those entirely frozen are left out.

    Raises:
        ValueError: A projection is an adapter or quantised, or only one of the two is trained.
    """
    for path, base in model.named_modules():
        # by name, because a Hub bundle has classes of its own
        if not any(cls.__name__ == "FrankensteinModel" for cls in type(base).__mro__):
            continue
        config: Any = base.config
        for index, layer in enumerate(base.layers):
            scaled = getattr(config.mixer_spec_for(index), "logits", ())
            projections = [getattr(layer.mixer, name) for name in ("q_proj", "k_proj")] if scaled else []
            if not any(p.requires_grad for projection in projections for p in projection.parameters()):
                continue
            if not all(isinstance(x, nn.Linear) and x.weight.requires_grad for x in projections):
                kinds = ", ".join(
                    f"{name} ({type(x).__module__}.{type(x).__name__}, weight "
                    f"{'trained' if x.weight.requires_grad else 'frozen'})"
                    for name, x in zip(("q_proj", "k_proj"), projections)
                )
                raise ValueError(
                    f"{owner!r} needs plain linear layers for queries and keys, both trained or both frozen; "
                    f"{path}.layers.{index}.mixer has {kinds}. Train the weights themselves (no adapters on them), or "
                    f"leave {owner!r} out."
                )
            yield ScoreLayer(base, index, layer.mixer, scaled)
