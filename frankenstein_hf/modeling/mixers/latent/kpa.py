"""`kpa` and `tpa`: queries, keys and values are sums of products of small factors; the cache holds the factors.

Shapes: B batch, T tokens, S keys, R rank (terms of a sum), H = h1 · h2 heads, W = d1 · d2 head width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ...attention_backends import dense_attention
from ...cache import States
from ...context import SequenceContext
from ...ops.few_queries import attention_weights
from ...ops.scored_attention import eager_attention
from ...positions import apply_rotary
from .compressed import CompressedAttention


def eager_kpa(A: Tensor, B: Tensor) -> Tensor:
    """M = 1/R Σ_r A_r ⊗ B_r, a row a head: factors [B, T, R, h1, d1] and [B, T, R, h2, d2] -> [B, H, T, W]."""
    terms = [torch.einsum("btij,btkl->bikjlt", A[:, :, r], B[:, :, r]) for r in range(A.shape[2])]
    M = torch.stack(terms).sum(0) / A.shape[2]
    return M.flatten(3, 4).flatten(1, 2).transpose(2, 3)


class KroneckerProductAttention(CompressedAttention):
    """Softmax attention on sums of Kronecker products of contextual factors (arXiv 2610.12657).

    Rotary positions turn the second factor only, which is the same as turning the product. A score is a sum of
    products of two small dot products, one a factor: decoding a few tokens multiplies factors and expands nothing.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        p, bias = self.params, config.attention_bias
        self.h1, self.h2, self.d1, self.d2 = self.splits()
        self.num_key_value_groups = 1  # read by transformers' functions
        self.scaling = self.head_dim**-0.5
        first, second = self.h1 * self.d1, self.h2 * self.d2
        self.q_a_proj = nn.Linear(self.hidden_size, p.query_rank * first, bias=bias)
        self.q_b_proj = nn.Linear(self.hidden_size, p.query_rank * second, bias=bias)
        self.k_a_proj = nn.Linear(self.hidden_size, p.key_rank * first, bias=bias)
        self.k_b_proj = nn.Linear(self.hidden_size, p.key_rank * second, bias=bias)
        self.v_a_proj = nn.Linear(self.hidden_size, p.value_rank * first, bias=bias)
        self.v_b_proj = nn.Linear(self.hidden_size, p.value_rank * second, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, self.hidden_size, bias=self.output_bias)

    def splits(self) -> tuple[int, int, int, int]:
        """h1, h2, d1, d2."""
        return self.params.h1, self.params.h2, self.params.d1, self.params.d2

    def rotated(self, b: Tensor, context: SequenceContext) -> Tensor:
        """Second factors [B, T, R·h2·d2], rotated."""
        heads = b.unflatten(-1, (-1, self.d2)).transpose(1, 2)
        return apply_rotary(heads, *context.rotary(self.d2)).transpose(1, 2).flatten(2)

    def factors(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, R, h1, d1] and [B, T, R, h2, d2]."""
        return a.unflatten(-1, (-1, self.h1, self.d1)), b.unflatten(-1, (-1, self.h2, self.d2))

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """1/R Σ_r A_r ⊗ B_r [B, H, T, W] of factors side by side, [B, T, R·h1·d1] and [B, T, R·h2·d2]."""
        A, B = (x.flatten(3) for x in self.factors(a, b))
        M = (A.mT @ B) / A.shape[2]  # [B, T, h1·d1, h2·d2]
        M = M.unflatten(3, (self.h2, self.d2)).unflatten(2, (self.h1, self.d1))
        return M.permute(0, 2, 4, 1, 3, 5).flatten(4).flatten(1, 2)

    def queries(self, x: Tensor, context: SequenceContext) -> tuple[Tensor, Tensor]:
        return self.q_a_proj(x), self.rotated(self.q_b_proj(x), context)

    def compress(self, x: Tensor, context: SequenceContext, cached: bool) -> States:
        return {
            "key_a": self.k_a_proj(x),
            "key_b": self.rotated(self.k_b_proj(x), context),
            "value_a": self.v_a_proj(x),
            "value_b": self.v_b_proj(x),
        }

    def attend(
        self, query: tuple[Tensor, Tensor], kept: States, context: SequenceContext, cached: bool
    ) -> tuple[Tensor, Tensor | None]:
        pairs = query, (kept["key_a"], kept["key_b"]), (kept["value_a"], kept["value_b"])
        if context.backend == "eager":
            q, k, v = (eager_kpa(*self.factors(*pair)) for pair in pairs)
            mask, is_causal = context.mask(), context.causal_flag
            return eager_attention(q, k, v, mask, is_causal=is_causal, scale=self.scaling, dropout=self.dropout)
        q, k, v = (self.product(*pair) for pair in pairs)
        return dense_attention(self, q, k, v, context, scale=self.scaling, dropout=self.dropout)

    def attend_as_kept(self, query: tuple[Tensor, Tensor], kept: States, context: SequenceContext) -> Tensor | None:
        """score = 1/(R_Q R_K) Σ_rr' (A^Q_r · A^K_r')_i1 (B^Q_r · B^K_r')_i2; the values are summed factor by factor."""
        p, T = self.params, query[0].shape[1]
        if T * p.query_rank * p.key_rank * (self.h1 + self.h2) > self.num_heads * self.head_dim:
            return None  # the products of factors would be more than the keys
        (A_q, B_q), (A_k, B_k) = self.factors(*query), self.factors(kept["key_a"], kept["key_b"])
        A_v, B_v = self.factors(kept["value_a"], kept["value_b"])
        first = torch.einsum("btrij,bsuij->bitrus", A_q, A_k)
        second = torch.einsum("btrkl,bsukl->bktrus", B_q, B_k)
        scores = torch.einsum("bitrus,bktrus->bikts", first, second).flatten(1, 2)
        scores = scores * (self.scaling / (p.query_rank * p.key_rank))
        weights = attention_weights(scores, context, self.dropout).unflatten(1, (self.h1, self.h2))
        partial = torch.einsum("bikts,bsuij->biktjsu", weights, A_v)
        return torch.einsum("biktjsu,bsukl->biktjl", partial, B_v).flatten(4).flatten(1, 2) / p.value_rank


class TensorProductAttention(KroneckerProductAttention):
    """`kpa` whose factors are vectors, one over heads and one over channels (arXiv 2501.06425)."""

    def splits(self) -> tuple[int, int, int, int]:
        return self.num_heads, 1, 1, self.head_dim
