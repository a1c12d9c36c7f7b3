"""Softmax attention whose scores fall with what has been forgotten since a key: + Σ_{l=j+1}^{i} ln f_l.

Shapes: B batch, H query heads, G key/value heads, T queries, S keys; N = B·G and tiles as in `biased_attention`.
"""

import torch
from torch import Tensor

from .biased_attention import KEYS, LOG2_E, QUERIES, Bias, biased_attention


def forgetting_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    memory: Tensor,
    own: Tensor,
    last: Tensor,
    *,
    tile: tuple[int, int] = (QUERIES, KEYS),
) -> tuple[Tensor, Tensor]:
    """softmax(K^−½ q_i k_jᵀ + c_i − c_j, over the keys up to `last`) v.

    Args:
        query, key, value, last, tile: As in `biased_attention`.
        memory: [B, H, S] c, which nowhere rises, in fp64: the logarithm of what is left of the first token's trace.
            A difference of two numbers in the thousands is wanted to within 1e-6.
        own: [B or 1, T] place of each query among the keys, at or behind `last`.

    Returns:
        Output [B, H, T, V] and log-sum-exps [B, H, T].
    """
    return biased_attention(query, key, value, last, _Forgetting(memory, own, key.shape[1]), tile=tile)


class _Forgetting(Bias):
    """c_i − c_j. Both parts of a whole tile are taken from c at its newest key and negative: nothing cancels."""

    def __init__(self, memory: Tensor, own: Tensor, num_groups: int) -> None:
        B, H, S = memory.shape
        self.memory = memory * LOG2_E
        self.c = self.memory.detach().view(B * num_groups, H // num_groups, S)
        own = own.expand(B, -1).repeat_interleave(num_groups, dim=0)[:, None]
        self.own = own.expand(-1, self.c.shape[1], -1)
        self.c_own = self.c.gather(2, self.own)

    def inputs(self) -> tuple[Tensor, ...]:
        return (self.memory,)

    def add(self, scores: Tensor, n: slice, i: slice, j: slice, whole: bool) -> None:
        own, c = self.c_own[n, :, i], self.c[n, :, j]
        if whole:
            newest = c[..., -1:]
            scores.add_((own - newest)[..., None].to(scores.dtype)).add_((newest - c)[:, :, None].to(scores.dtype))
        else:
            scores.add_((own[..., None] - c[:, :, None]).to(scores.dtype))

    def range(self, n: slice, i: slice, j: slice) -> tuple[Tensor, Tensor]:
        own = self.c_own[n, :, i]
        return own - self.c[n, :, j.start, None], own - self.c[n, :, j.stop - 1, None]

    def reset(self) -> None:
        self.grad, self.grad_own = torch.zeros_like(self.c), torch.zeros_like(self.c_own)

    def collect(self, grad: Tensor, n: slice, i: slice, j: slice) -> None:
        self.grad[n, :, j] -= grad.sum(-2)
        self.grad_own[n, :, i] += grad.sum(-1)

    def gradients(self) -> tuple[Tensor, ...]:
        return (self.grad.scatter_add(2, self.own, self.grad_own).view_as(self.memory),)
