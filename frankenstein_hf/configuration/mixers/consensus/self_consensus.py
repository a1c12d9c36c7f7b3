"""Spec of `self_consensus`: a gradient step on the disagreement of neighbouring tokens."""

from dataclasses import dataclass
from typing import Any

from ...component import MixerSpec, Params, param


@dataclass(frozen=True, kw_only=True)
class SelfConsensusParams(Params):
    """Parameters of `self_consensus`."""

    window_size: int = param(2, "neighbours to either side; in a decoder, before the token", minimum=1)
    rank: int = param(4, "directions a head in which an edge pulls harder", minimum=1)
    edge_hidden_size: int = param(256, "width of the networks that weigh an edge", minimum=1)
    num_iterations: int = param(1, "gradient steps, all with the same weights of edges", minimum=1)
    rope: str = param(
        "gradient",
        "rotary positions: the gradient of the rotated energy, the update of the released code, which is not its "
        "gradient, or no positions",
        choices=("gradient", "odyssey", "none"),
    )
    step: str = param(
        "per_iteration",
        "size of a step, learned: one for each iteration, or one for each iteration and position, of which there are "
        "max_position_embeddings; what lies beyond shares the last one's",
        choices=("per_iteration", "per_position"),
    )
    per_head: bool = param(False, "each head has magnitudes α and β of its own, instead of one of each for all")
    shared_trunk: bool = param(False, "the networks of α, β and Λ share their first layer")

    @property
    def tail(self) -> int:
        """Tokens that decoding looks back at."""
        return self.num_iterations * self.window_size


def _tail_floats(params: SelfConsensusParams, config: Any) -> int:
    return params.tail * config.hidden_size


SPECS = (
    MixerSpec(
        name="self_consensus",
        aliases=("consensus", "odyssey"),
        family="consensus",
        summary="Neighbours pull each other towards agreement, along learned directions: one gradient step on a graph.",
        reference="Odyssey: reconstructing evolution through emergent consensus in the global proteome, bioRxiv "
        "2025.10.15.682677; Stabilizing Transformer Training Through Consensus",
        params=SelfConsensusParams,
        implementation="mixers.consensus.self_consensus:SelfConsensus",
        cache=frozenset({"tail"}),
        state_size=_tail_floats,
        reach=lambda params: params.tail,
        small_params={"window_size": 2, "rank": 2, "edge_hidden_size": 8, "num_iterations": 2},
    ),
)
