"""Specs of residual schemes: how layers are joined in depth."""

import logging
from dataclasses import dataclass, replace
from typing import Any, Self

from .component import ComponentSpec, Params, param

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SumParams(Params):
    """Parameters of the schemes that add."""

    multiplier: float = param(1.0, "What a change is multiplied by before it is added.")


@dataclass(frozen=True, kw_only=True)
class FullAttentionParams(Params):
    """Parameters of `full_attn`."""

    init_query_zero: bool = param(True, "Begin with equal weights for all sources.")
    use_rmsnorm_keys: bool = param(True, "Score the direction of a source, not its size.")
    granularity: str = param(
        "sublayer", "Whether mixers and feed-forward blocks attend, or whole layers.", choices=("sublayer", "layer")
    )


@dataclass(frozen=True, kw_only=True)
class BlockAttentionParams(FullAttentionParams):
    """Parameters of `block_attn`."""

    num_blocks: int = param(8, "Sources, besides the embeddings, that the changes are summed into.", minimum=1)

    def resolve(self, config: Any, explicit: frozenset[str]) -> Self:
        layers = sum(len(part.layers) for part in config.rounds)
        changes = layers if self.granularity == "layer" else 2 * layers
        if self.num_blocks <= changes:
            return self
        if "num_blocks" in explicit:
            raise ValueError(f"num_blocks={self.num_blocks} must be at most {changes}, the number of changes to sum.")
        logger.debug("num_blocks shrinks from %s to %s, the number of changes to sum.", self.num_blocks, changes)
        return replace(self, num_blocks=changes)


@dataclass(frozen=True, kw_only=True)
class HyperConnectionParams(Params):
    """Parameters of `mhc`."""

    expansion_rate: int = param(4, "Streams n.", minimum=1)
    sinkhorn_iters: int = param(20, "Rounds that make the mixing matrix doubly stochastic.", minimum=1)
    gating_init: float = param(0.01, "First weight of what depends on the token.")
    expand: str = param("copy", "How the embeddings become streams.", choices=("copy", "linear"))
    collapse: str = param("mean", "How the streams become the output.", choices=("mean", "linear", "gated"))


@dataclass(frozen=True, kw_only=True)
class HyperloopParams(Params):
    """Parameters of `hyperloop`."""

    expansion_rate: int = param(4, "Streams n.", minimum=1)
    res_parameterization: str = param(
        "diagonal", "How a stream is carried on.", choices=("diagonal", "sinkhorn", "identity")
    )
    sinkhorn_iters: int = param(20, "Rounds that make the mixing matrix doubly stochastic.", minimum=1)
    gating_init: float = param(0.01, "First weight of what depends on the token.")

    def resolve(self, config: Any, explicit: frozenset[str]) -> Self:
        if config.num_loops < 2:
            raise ValueError(f"it joins rounds of looped depth: num_loops={config.num_loops} must be at least 2.")
        return self


RESIDUAL_SPECS = (
    ComponentSpec(
        name="standard",
        family="residual",
        summary="x + F(norm(x)).",
        reference="Deep Residual Learning for Image Recognition, arXiv 1512.03385",
        params=SumParams,
        implementation="residuals:ResidualStream",
    ),
    ComponentSpec(
        name="parallel",
        family="residual",
        summary="x + F(norm(x)) + G(norm(x)): mixer and feed-forward block read the same stream.",
        reference="GPT-NeoX-20B, arXiv 2204.06745",
        params=SumParams,
        aliases=("parallel_residual", "gpt_j", "gpt_neox"),
        implementation="residuals:ParallelStream",
    ),
    ComponentSpec(
        name="none",
        family="residual",
        summary="F(norm(x)): no skips, to see what they are worth.",
        reference="Attention Is Not All You Need, arXiv 2103.03404",
        implementation="residuals:NoResidual",
    ),
    ComponentSpec(
        name="full_attn",
        family="residual",
        summary="A sublayer reads a softmax mixture of what all sublayers before it returned.",
        reference="Attention Residuals, arXiv 2603.15031",
        params=FullAttentionParams,
        implementation="attention_residuals:AttentionResidual",
    ),
    ComponentSpec(
        name="block_attn",
        family="residual",
        summary="`full_attn` over sums of neighbouring sublayers, so that the number of sources stays small.",
        reference="Attention Residuals, arXiv 2603.15031",
        params=BlockAttentionParams,
        implementation="attention_residuals:AttentionResidual",
    ),
    ComponentSpec(
        name="mhc",
        family="residual",
        summary="Several streams, read, written and mixed with weights of the token; the mixing is doubly stochastic.",
        reference="mHC: Manifold-Constrained Hyper-Connections, arXiv 2512.24880",
        params=HyperConnectionParams,
        implementation="hyper_connections:HyperConnections",
    ),
    ComponentSpec(
        name="hyperloop",
        family="residual",
        summary="Looped depth with several streams, read and written once a round.",
        reference="Hyperloop Transformers",
        params=HyperloopParams,
        implementation="hyper_connections:Hyperloop",
    ),
)
