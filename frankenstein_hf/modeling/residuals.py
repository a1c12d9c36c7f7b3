"""How layers are joined in depth: what a sublayer reads of the residual stream, and what becomes of its change.

Shapes: B batch, T tokens, D model width. A stream is whatever its scheme makes of [B, T, D]: one tensor or a tuple.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.utils import logging

logger = logging.get_logger(__name__)

Stream = Any


class Connection(nn.Module):
    """One site of the standard scheme, x + F(norm(x)): it reads the stream as it is and adds the change.

    Args:
        config: A `FrankensteinConfig`.
        layer_idx: The layer.
        site: "mixer" or "mlp".
    """

    def __init__(self, config: Any, layer_idx: int, site: str) -> None:
        super().__init__()
        self.site = site
        self.multiplier = getattr(config.component("residual").params, "multiplier", 1.0)

    def init_parameters(self) -> None:
        """Fill raw parameters and buffers, through `transformers.initialization` only."""

    def read(self, stream: Stream, loop: int) -> tuple[Tensor, Any]:
        """The sublayer's input [B, T, D], and what `write` needs to know; `loop` counts rounds of looped depth."""
        return stream, stream

    def write(self, stream: Stream, carry: Any, change: Tensor, loop: int) -> Stream:
        """The stream after the sublayer returned `change` [B, T, D]."""
        return carry + self.scaled(change)

    def scaled(self, change: Tensor) -> Tensor:
        """What is added of a change."""
        return change if self.multiplier == 1.0 else change * self.multiplier


class ResidualStream(nn.Module):
    """The standard scheme, where the stream is the hidden states [B, T, D] themselves; base of the others.

    Args:
        config: A `FrankensteinConfig`.
    """

    connection: type[Connection] = Connection

    def __init__(self, config: Any) -> None:
        super().__init__()

    def init_parameters(self) -> None:
        """Fill raw parameters and buffers, through `transformers.initialization` only."""

    def enter(self, embeddings: Tensor) -> Stream:
        """The stream before the first layer."""
        return embeddings

    def loop(self, stream: Stream, run: Callable[[Stream], Stream], loop: int) -> Stream:
        """Round `loop` of the looped layers, which `run` computes."""
        return run(stream)

    def view(self, stream: Stream) -> Tensor:
        """The stream as hidden states [B, T, D], for whoever looks in between."""
        return stream

    def leave(self, stream: Stream) -> Tensor:
        """[B, T, D] before the final norm."""
        return self.view(stream)


class ReplacingConnection(Connection):
    """F(norm(x)) without the sum."""

    def write(self, stream: Stream, carry: Any, change: Tensor, loop: int) -> Stream:
        return change


class NoResidual(ResidualStream):
    """Layers without skips, to see what they are worth: each output replaces the stream."""

    connection = ReplacingConnection

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        logger.warning_once("residual='none' has no skips: an ablation, hard to train in more than a few layers.")


class ParallelConnection(Connection):
    """Both sublayers read the stream as it was before the layer; the second adds what both return."""

    def read(self, stream: Stream, loop: int) -> tuple[Tensor, Any]:
        return (stream if self.site == "mixer" else stream[0]), stream

    def write(self, stream: Stream, carry: Any, change: Tensor, loop: int) -> Stream:
        if self.site == "mixer":
            return carry, self.scaled(change)
        return carry[0] + carry[1] + self.scaled(change)


class ParallelStream(ResidualStream):
    """x + F(norm(x)) + G(norm(x)), mixer and feed-forward block side by side."""

    connection = ParallelConnection
