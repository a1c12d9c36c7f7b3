"""Residuals by attention over depth: a sublayer reads a softmax mixture of what the sublayers before it returned.

Shapes: B batch, T tokens, D model width, S sources. Everything concerns one token; nothing crosses time, so there is
nothing to cache.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .ops.numerics import at_least_fp32
from .residuals import Connection, ResidualStream


class Sources(NamedTuple):
    """The stream: what there is to attend to.

    Attributes:
        values: S tensors [B, T, D]: the embeddings, then sums of changes, one a block.
        inverse_rms: S tensors [B, T], or as many ones when keys are not normed.
        inner: With one source a layer: the input of the layer's second site, and the first one's change.
    """

    values: tuple[Tensor, ...]
    inverse_rms: tuple[Tensor, ...]
    inner: tuple[Tensor, Tensor] | None = None


def attend(sources: Sources, query: Tensor) -> Tensor:
    """x = Σ softmax_i(⟨query, v_i / rms(v_i)⟩) v_i over the sources; [D] -> [B, T, D].

    The sources are read one by one: a stack of them would be a copy of the whole stream at every site.
    """
    query = at_least_fp32(query)
    # a sum of products: the rounding of a matrix-vector product depends on where its operands lie in memory
    scores = [(at_least_fp32(v) * query).sum(-1) * r for v, r in zip(sources.values, sources.inverse_rms)]
    weights = torch.stack(scores).softmax(0).to(sources.values[0].dtype)
    mixture = weights[0][..., None] * sources.values[0]
    for weight, value in zip(weights[1:], sources.values[1:]):
        mixture = torch.addcmul(mixture, weight[..., None], value)
    return mixture


class DepthQuery(nn.Module):
    """What sites and the end of the stack share: a learned `query` [.., D] over the sources, and their norm.

    Args:
        config: A `FrankensteinConfig` whose residual scheme is attention over depth.
        rounds: Queries to learn, one a round of looped depth; None: one vector; 0: none.
    """

    def __init__(self, config: Any, rounds: int | None) -> None:
        nn.Module.__init__(self)
        self.params = config.component("residual").params
        self.std, self.eps = config.initializer_range, config.rms_norm_eps
        shape = (config.hidden_size,) if rounds is None else (rounds, config.hidden_size)
        self.query = None if rounds == 0 else nn.Parameter(torch.empty(shape))

    def init_parameters(self) -> None:
        """Zero, which weighs all sources the same, or normal."""
        if self.query is None:
            return
        if self.params.init_query_zero:
            init.zeros_(self.query)
        else:
            init.normal_(self.query, std=self.std)

    def inverse_rms(self, value: Tensor) -> Tensor:
        """[B, T, D] -> [B, T]."""
        value = at_least_fp32(value)
        if not self.params.use_rmsnorm_keys:
            return torch.ones_like(value[..., 0])
        return torch.rsqrt(value.square().mean(-1) + self.eps)


class AttentionConnection(DepthQuery, Connection):
    """A site that attends to the sources, and adds its change to the newest block or begins one.

    `layers.N.{mixer,mlp}_connection.query` is [num_loops, D]. With `granularity="layer"` the layer is one site: the
    mixer's connection attends, the feed-forward block reads the sum of that and the mixer's change.
    """

    def __init__(self, config: Any, layer_idx: int, site: str) -> None:
        by_layer = config.component("residual").params.granularity == "layer"
        super().__init__(config, 0 if by_layer and site == "mlp" else config.num_loops)
        self.by_layer, self.is_second = by_layer, site == "mlp"
        self.layer_idx = layer_idx
        self.per_loop = config.num_hidden_layers - config.loop_end_layers - config.loop_begin_layers
        self.block = block_size(config)

    def source(self, loop: int) -> int:
        """Number of this site's change among those of all layers at work."""
        layer = self.layer_idx + loop * self.per_loop
        return layer if self.by_layer else 2 * layer + self.is_second

    def read(self, stream: Sources, loop: int) -> tuple[Tensor, Any]:
        if self.by_layer and self.is_second:
            assert stream.inner is not None
            return stream.inner[0] + stream.inner[1], None
        assert self.query is not None
        x = attend(stream, self.query[loop])
        return x, x

    def write(self, stream: Sources, carry: Any, change: Tensor, loop: int) -> Sources:
        if self.by_layer and not self.is_second:
            return stream._replace(inner=(carry, change))
        if stream.inner is not None:
            change = stream.inner[1] + change
        values, inverse_rms = stream.values, stream.inverse_rms
        if self.source(loop) % self.block:
            change = values[-1] + change
            values, inverse_rms = values[:-1], inverse_rms[:-1]
        return Sources((*values, change), (*inverse_rms, self.inverse_rms(change)))


def block_size(config: Any) -> int:
    """How many changes are summed into one source: one in full attention, ⌈changes / blocks⌉ else."""
    params = config.component("residual").params
    if not hasattr(params, "num_blocks"):
        return 1
    layers = sum(len(part.layers) for part in config.rounds)
    changes = layers if params.granularity == "layer" else 2 * layers
    return -(-changes // params.num_blocks)


class AttentionResidual(DepthQuery, ResidualStream):
    """Attention over depth, for `full_attn` and `block_attn`; `model.residual.query` [D] reads the final output."""

    connection = AttentionConnection

    def __init__(self, config: Any) -> None:
        super().__init__(config, None)

    def enter(self, embeddings: Tensor) -> Sources:
        return Sources((embeddings,), (self.inverse_rms(embeddings),))

    def view(self, stream: Sources) -> Tensor:
        assert self.query is not None
        return attend(stream, self.query)
