"""`sparse_transformer`: strided and fixed factorised attention. Shapes: see `sparse_attention.py`."""

from typing import Any

from ...ops.patterns import FixedPattern, Pattern, StridedPattern
from ...ops.scored_attention import eager_attention
from ..sparse_attention import PatternAttention

eager_sparse_transformer = eager_attention  # softmax over 𝒜_i, strided or fixed


class SparseTransformer(PatternAttention):
    """Heads that see the last l keys and every l-th; heads that see their block and summaries (arXiv 1904.10509)."""

    @staticmethod
    def patterns(params: Any, layer_idx: int, num_heads: int) -> list[tuple[slice, Pattern]]:
        strided = StridedPattern(params.stride)
        fixed = FixedPattern(params.stride, params.summary_columns)
        half = -(-num_heads // 2)
        if params.mode == "mixed" and num_heads > 1:
            return [(slice(0, half), strided), (slice(half, num_heads), fixed)]
        return [(slice(0, num_heads), fixed if params.mode == "fixed" else strided)]
