"""`bigbird`: a window, global blocks, and random blocks. Shapes: see `sparse_attention.py`."""

from typing import Any

from ...ops.patterns import BigBirdPattern, Pattern
from ...ops.scored_attention import eager_attention
from ..sparse_attention import PatternAttention

eager_bigbird = (
    eager_attention  # softmax over {|i − j| ≤ w/2} ∪ random blocks ∪ global blocks; everything for a global i
)


class BigBird(PatternAttention):
    """Attention to a window, to the first blocks, and to random ones (arXiv 2007.14062); see `BigBirdPattern`."""

    @staticmethod
    def patterns(params: Any, layer_idx: int, num_heads: int) -> list[tuple[slice, Pattern]]:
        pattern = BigBirdPattern(
            params.window_size // 2, params.block_size, params.num_random, params.num_global, params.seed, layer_idx
        )
        return [(slice(0, num_heads), pattern)]
