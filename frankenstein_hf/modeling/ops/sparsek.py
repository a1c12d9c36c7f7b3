"""The SparseK operator, and attention to what it selects.

Shapes: P independent key/value heads, N query heads that share one, T queries, S keys, D head width, c queries and m
        candidate keys of a chunk.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .numerics import at_least_fp32, full_precision, untraced

CHUNK = 128


@full_precision
def sparsek_threshold(u: Tensor, seen: Tensor, k: int) -> Tensor:
    """τ with Σ_j clamp(u_j − τ, 0, 1) = k over the seen j: projection of u onto {0 ≤ m ≤ 1, Σ m = k}.

    Where no more than k are seen, τ is two below the least of them, so that all weights are one.

    Args:
        u: [..., n] scores, at least fp32.
        seen: Bool, of the shape of `u`.
        k: ≥ 1.

    Returns:
        [..., 1]; the gradient is that of τ = (Σ_A u + |U| − k) / |A|, A the keys with 0 < m < 1 and U those with m = 1.
    """
    with torch.no_grad():
        low = u.masked_fill(~seen, torch.inf).amin(-1, keepdim=True) - 1
        high = u.masked_fill(~seen, -torch.inf).amax(-1, keepdim=True)
        few = seen.sum(-1, keepdim=True) <= k
        low, high = (x.masked_fill(few, 0.0) for x in (low, high))  # −inf or inf where nothing is seen
        v = u.masked_fill(~seen, -1e30)
        τ, left, right = (low + high) / 2, low, high
        for _ in range(100):
            d = v - τ
            excess = d.clamp(0, 1).sum(-1, keepdim=True) - k
            slope = ((d > 0) & (d < 1)).sum(-1, keepdim=True)
            change = excess / slope.clamp_min(1)
            eps = torch.finfo(u.dtype).eps
            done = few | (excess.abs() <= 4 * k * eps) | ((slope > 0) & (change.abs() <= 8 * eps * (1 + τ.abs())))
            if bool(done.all()):
                break
            left, right = torch.where(excess > 0, τ, left), torch.where(excess < 0, τ, right)
            step = τ + change
            inside = (slope > 0) & (step > left) & (step < right)
            τ = torch.where(done, τ, torch.where(inside, step, (left + right) / 2))
        d = v - τ
        least_weight = _least_weight(u)
        active, is_full = (d > least_weight) & (d < 1 - least_weight), d >= 1 - least_weight
        full = is_full.sum(-1, keepdim=True)
        count = active.sum(-1, keepdim=True)
        # with all weights zero or one, τ may be anywhere between: in the middle no weight is about to change
        lowest, highest = v.masked_fill(~is_full, torch.inf), v.masked_fill(d > least_weight, -torch.inf)
        middle = (lowest.amin(-1, keepdim=True) - 1 + highest.amax(-1, keepdim=True).clamp_min(-1e30)) / 2
        least = u.masked_fill(~seen, torch.inf).amin(-1, keepdim=True) - 2
    exact = (u.masked_fill(~active, 0.0).sum(-1, keepdim=True) + full - k) / count.clamp_min(1)
    τ = torch.where(count > 0, exact, middle)
    return torch.where(few, least.masked_fill(least == torch.inf, 0.0), τ)


def _least_weight(u: Tensor) -> float:
    """Below this a weight is a rounding error."""
    return 256 * torch.finfo(u.dtype).eps


def eager_sparsek(q: Tensor, k: Tensor, v: Tensor, u: Tensor, seen: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """m = clamp(u − τ(u), 0, 1);  y_i = Σ_{j: m_ij > 0} softmax_j(q_i k_j / √D) m_ij v_j.

    Args:
        q: [P, N, T, D], scaled.
        k, v: [P, S, D].
        u: [P, T or 1, S] scores.
        seen: [T, S] or [P, T, S] bool.
        budget: k of the operator.

    Returns:
        [P, N, T, D], and softmax · m [P, N, T, S].
    """
    u, seen = torch.broadcast_tensors(at_least_fp32(u), seen)
    m = ((u - sparsek_threshold(u, seen, budget)).clamp(0, 1) * seen)[:, None]
    m = m * (m > _least_weight(u))  # a key on the very edge is out, however the threshold was rounded
    s = at_least_fp32(q @ k[:, None].mT)
    weights = s.masked_fill(m == 0, torch.finfo(s.dtype).min).softmax(-1) * m
    return weights.to(v.dtype) @ v[:, None], weights


@untraced
@full_precision
def sparsek_attention(
    q: Tensor, k: Tensor, v: Tensor, score: Tensor, query_weight: Tensor | None, budget: int, offset: int,
    is_causal: bool,
) -> Tensor:  # fmt: skip
    """The same for scores of keys, and perhaps queries, in chunks of queries with the keys that may still be selected.

    Args:
        q: [P, N, T, D], scaled; at the positions offset … offset + T − 1.
        k, v: [P, S, D].
        score: [P, S] of every key.
        query_weight: [P] or None: u_ij = score_j + weight · (mean of the N queries) · k_j.
        budget: k of the operator.
        offset, is_causal: See above; without `query_weight` a key that one query drops is dropped for all later ones.

    Returns:
        [P, N, T, D] in the dtype of `q`.
    """
    leaves = [at_least_fp32(x) for x in (q, k, v, score)]
    if query_weight is not None:
        leaves.append(at_least_fp32(query_weight))
    chunks = list(_chunks(leaves[3], query_weight is None, budget, q.shape[2], offset, is_causal))
    return _Chunked.apply(chunks, budget, offset, is_causal, *leaves).to(q.dtype)


@torch.no_grad()
def _chunks(
    score: Tensor, by_key: bool, budget: int, T: int, offset: int, is_causal: bool
) -> Iterator[tuple[slice, Tensor | None, Tensor | None]]:
    """Queries of a chunk, candidate keys [P, m] and which of those are real; None, None: all keys."""
    P, S = score.shape
    if not by_key:
        for start in range(0, T, CHUNK):
            yield slice(start, min(start + CHUNK, T)), None, None
        return
    everyone = torch.arange(S, device=score.device).expand(P, -1)
    if not is_causal:
        index, real = _survivors(score, everyone, torch.ones_like(everyone, dtype=torch.bool), budget)
        for start in range(0, T, CHUNK):
            yield slice(start, min(start + CHUNK, T)), index, real
        return
    index, real = everyone[:, :offset], torch.ones(P, offset, dtype=torch.bool, device=score.device)
    if offset:
        index, real = _survivors(score, index, real, budget)
    for start in range(0, T, CHUNK):
        stop = min(start + CHUNK, T)
        index = torch.cat([index, everyone[:, offset + start : offset + stop]], dim=1)
        real = torch.nn.functional.pad(real, (0, stop - start), value=True)
        yield slice(start, stop), index, real
        index, real = _survivors(score, index, real, budget)


def _survivors(score: Tensor, index: Tensor, real: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """The candidates with m > 0 in front, in order, and which of them are real."""
    u = score.gather(1, index)
    real = real & (u > sparsek_threshold(u, real, budget))
    order = torch.argsort(~real, dim=1, stable=True)[:, : max(1, int(real.sum(1).max()))]
    return index.gather(1, order), real.gather(1, order)


def _part(q: Tensor, k: Tensor, v: Tensor, score: Tensor, weight: Tensor | None, seen: Tensor, budget: int) -> Tensor:
    u = score[:, None]
    if weight is not None:
        u = u + weight[:, None, None] * (q.mean(1) @ k.mT)
    return eager_sparsek(q, k, v, u, seen, budget)[0]


class _Chunked(torch.autograd.Function):
    """Chunk by chunk, each computed once more in the backward pass."""

    @staticmethod
    def inputs(
        chunk: Any, offset: int, is_causal: bool, q: Tensor, k: Tensor, v: Tensor, score: Tensor, *rest: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """What `_part` takes of the whole tensors, and what its queries see."""
        queries, index, real = chunk
        P, S = score.shape
        if index is None:
            index, real = torch.arange(S, device=q.device).expand(P, -1), torch.ones_like(score, dtype=torch.bool)
        i = offset + torch.arange(queries.start, queries.stop, device=q.device)[:, None]
        seen = real[:, None] & (index[:, None] <= i) if is_causal else real[:, None].expand(-1, len(i), -1)
        wide = index[..., None].expand(-1, -1, k.shape[-1])
        return [q[:, :, queries], k.gather(1, wide), v.gather(1, wide), score.gather(1, index), *rest], seen

    @staticmethod
    def forward(ctx: Any, chunks: Any, budget: int, offset: int, is_causal: bool, *leaves: Tensor) -> Tensor:
        parts = []
        for chunk in chunks:
            (q, k, v, score, *rest), seen = _Chunked.inputs(chunk, offset, is_causal, *leaves)
            parts.append(_part(q, k, v, score, rest[0] if rest else None, seen, budget))
        ctx.save_for_backward(*leaves)
        ctx.rest = chunks, budget, offset, is_causal
        return torch.cat(parts, dim=2)

    @staticmethod
    @full_precision
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        leaves = ctx.saved_tensors
        chunks, budget, offset, is_causal = ctx.rest
        grads = [torch.zeros_like(x) for x in leaves]
        for chunk in chunks:
            queries, index, _ = chunk
            parts, seen = _Chunked.inputs(chunk, offset, is_causal, *leaves)
            with torch.enable_grad():
                parts = [x.detach().requires_grad_() for x in parts]
                q, k, v, score, *rest = parts
                out = _part(q, k, v, score, rest[0] if rest else None, seen, budget)
                given = torch.autograd.grad(out, parts, grad[:, :, queries], allow_unused=True)
            for number, (whole, part) in enumerate(zip(grads, given)):
                if part is None:
                    continue
                if number == 0:
                    whole[:, :, queries] += part
                elif number == 4 or index is None:
                    whole += part
                else:
                    where = index if part.dim() == 2 else index[..., None].expand_as(part)
                    whole.scatter_add_(1, where, part)
        return None, None, None, None, *grads
