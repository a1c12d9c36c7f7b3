"""Spec of `engram`: a memory of n-grams, looked up by hashing and gated by the hidden state."""

from dataclasses import dataclass, replace
from typing import Any, Self

from ...component import MixerSpec, Params, param


@dataclass(frozen=True, kw_only=True)
class EngramParams(Params):
    """Parameters of `engram`."""

    max_ngram_size: int = param(3, "longest n-gram; the shortest is of two tokens", minimum=2, maximum=64)
    n_heads_per_ngram: int = param(4, "tables, each with a hash of its own, for every length of n-gram", minimum=1)
    embed_dim_per_head: int = param(32, "width of a table's entries", minimum=1)
    table_size: int | None = param(
        None, "entries of the smallest table; each has a prime number of them, four times the vocabulary by default",
        minimum=2,
    )  # fmt: skip
    kernel_size: int = param(4, "taps of the convolution behind the lookup, max_ngram_size tokens apart", minimum=1)
    seed: int = param(42, "of the hashes", minimum=0)
    gate: bool = param(True, "weigh what was looked up by how well it fits the hidden state")

    @property
    def width(self) -> int:
        """Channels of all that is looked up for a token."""
        return (self.max_ngram_size - 1) * self.n_heads_per_ngram * self.embed_dim_per_head

    @property
    def tail(self) -> int:
        """Inputs the convolution looks back at."""
        return (self.kernel_size - 1) * self.max_ngram_size

    @property
    def ahead(self) -> int:
        """Inputs the centred convolution of an encoder looks ahead at."""
        return (self.kernel_size - 1 - self.kernel_size // 2) * self.max_ngram_size

    def resolve(self, config: Any, explicit: frozenset[str]) -> Self:
        return self if self.table_size is not None else replace(self, table_size=4 * config.vocab_size)


SPECS = (
    MixerSpec(
        name="engram",
        family="memory",
        summary="N-gram embeddings looked up by hashing, gated by the hidden state and convolved.",
        reference="Conditional Memory via Scalable Lookup: A New Axis of Sparsity for Large Language Models, "
        "arXiv 2601.07372",
        params=EngramParams,
        implementation="mixers.memory.engram:EngramMixer",
        cache=frozenset({"tail"}),
        state_size=lambda params, config: params.tail * config.hidden_size,
        needs_input_ids=True,
        reach=lambda params: params.ahead + params.max_ngram_size - 1,
        small_params={"n_heads_per_ngram": 2, "embed_dim_per_head": 3},
    ),
)
