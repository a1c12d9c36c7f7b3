"""Spec of `bigbird`: windowed attention with global and random blocks."""

from dataclasses import dataclass

from ...component import ATTENTION_PROJECTIONS, MixerSpec, Params, param
from ..dense.standard import kv_floats


@dataclass(frozen=True, kw_only=True)
class BigBirdParams(Params):
    """Parameters of `bigbird`."""

    block_size: int = param(16, "tokens of a block", minimum=1)
    num_random: int = param(3, "random blocks a block of queries sees", minimum=0, maximum=4096)
    num_global: int = param(2, "blocks at the start that see, and are seen by, all", minimum=0)
    window_size: int = param(128, "tokens of the window: half to either side of a query", minimum=1)
    seed: int = param(0, "what the random blocks are drawn from, together with layer and query block", minimum=0)

    @property
    def side(self) -> int:
        """How far the window reaches to either side."""
        return self.window_size // 2


SPECS = (
    MixerSpec(
        name="bigbird",
        family="sparse",
        summary="Softmax attention to a window, to global blocks and to random blocks.",
        reference="Big Bird: Transformers for Longer Sequences, arXiv 2007.14062",
        params=BigBirdParams,
        implementation="mixers.sparse.bigbird:BigBird",
        transfer=ATTENTION_PROJECTIONS,
        qk_norm=True,
        cache=frozenset({"kv"}),
        token_size=kv_floats,
        parameter_free=lambda params: True,
        logits=("q_proj", "k_proj"),
        reach=lambda params: params.side,
        small_params={"block_size": 2, "num_random": 1, "num_global": 1, "window_size": 4},
    ),
)
