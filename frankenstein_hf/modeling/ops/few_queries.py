"""Attention of a few new tokens to a long past, without expanding what the past is kept as.

Scores of a handful of queries are small enough to be held, so that they can be put together from parts: of a latent and
of a rotated key, scaled by a number a key, of shared heads. Nothing is copied and nothing is repeated over heads.

Shapes: B batch, H query heads, G heads that share (G divides H), T queries, S keys, K key width, V value width.
"""

from torch import Tensor
from torch.nn import functional as F

from ..context import SequenceContext
from .numerics import at_least_fp32
from .scored_attention import masked_softmax

FEW = 16  # up to as many queries reading the past as it is kept is cheaper than expanding it


def are_few(context: SequenceContext) -> bool:
    """Whether this call brings few enough tokens; the readable reference expands whatever comes."""
    return context.num_past is not None and context.keep.shape[1] <= FEW and context.backend != "eager"


def grouped_product(x: Tensor, y: Tensor) -> Tensor:
    """x [B, H, T, K] times y [B or 1, G, K, N], each serving H/G consecutive heads -> [B, H, T, N]."""
    B, H, T, K = x.shape
    return (x.reshape(B, y.shape[1], -1, K) @ y).reshape(B, H, T, -1)


def attention_weights(scores: Tensor, context: SequenceContext, dropout: float = 0.0) -> Tensor:
    """Scaled scores [B, H, T, S] -> weights over the visible keys, in the dtype of the scores."""
    weights = masked_softmax(at_least_fp32(scores), context.mask(), is_causal=context.causal_flag)
    return F.dropout(weights, dropout, training=dropout > 0).to(scores.dtype)
