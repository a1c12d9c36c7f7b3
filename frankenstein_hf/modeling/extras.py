"""What layers return beside their output: attention weights, largest logits, auxiliary losses, metrics.

It is returned and collected by the stack, never kept on a module: gradient checkpointing runs a layer twice.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class LayerExtras(NamedTuple):
    """What a mixer, a feed-forward block or a whole layer returns beside its output.

    Attributes:
        weights: Attention weights [B, H, T, S] when asked for and materialised.
        max_logits: [H] largest attention logits between visible tokens, scaled and before any mask, when asked for.
        aux_losses: Scalars by name, coefficients included, to add to the training loss.
        metrics: Numbers by name to watch in training, scalars or one per head, expert, …; they carry no gradient.
        carried: Tensors by name for the layers above whose mixer `takes` them; the nearest below counts.
    """

    weights: Tensor | None = None
    max_logits: Tensor | None = None
    aux_losses: Mapping[str, Tensor] = {}
    metrics: Mapping[str, Tensor] = {}
    carried: Mapping[str, Tensor] = {}

    @classmethod
    def merged(cls, parts: Iterable["LayerExtras | None"]) -> "LayerExtras":
        """One for all `parts` of a layer: losses of one name add up, of everything else the first counts."""
        given = [part for part in parts if part is not None]
        metrics: dict[str, Tensor] = {}
        for part in reversed(given):
            metrics.update(part.metrics)
        return cls(
            next((part.weights for part in given if part.weights is not None), None),
            next((part.max_logits for part in given if part.max_logits is not None), None),
            summed(part.aux_losses for part in given),
            metrics,
            {name: x for part in given for name, x in part.carried.items()},
        )


def summed(losses: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The losses of each name added up."""
    by_name: dict[str, list[Tensor]] = {}
    for named in losses:
        for name, loss in named.items():
            by_name.setdefault(name, []).append(loss)
    return {name: torch.stack(terms).sum() for name, terms in by_name.items()}
