"""Diagonal scan, h_t = exp(g_t) ⊙ h_{t−1} + w_t: every channel is one number that decays and is added to.

Shapes: B batch, T time, E channels, C chunk, N chunks.

The row is cut into N chunks of C tokens. Within all chunks at once the recurrence runs token by token, C operations on
[B, N, E]; then the states at the chunks' borders, N operations on [B, E]; then every token adds what its chunk began
with, decayed by the sum of its log decays. With C near √T that is a few passes over the row and 2√T operations, no
factor exceeds one, and nothing is divided. The gradient is the same scan from the end.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .chunking import core_dtype
from .numerics import decay_exp, flush_tiny, full_precision
from .operators import Core, operator

SHORT = 16  # up to here the recurrence itself is faster
LONGEST_CHUNK = 128


def diagonal_scan(
    log_decay: Tensor, write: Tensor, *, initial_state: Tensor | None = None, sequential: bool = False
) -> tuple[Tensor, Tensor]:
    """h_t = exp(g_t) ⊙ h_{t−1} + w_t, chunk-parallel.

    Args:
        log_decay (g): ≤ 0, [B, T, E], T ≥ 1; −inf resets.
        write (w): [B, T, E].
        initial_state: [B, E], zeros if None.
        sequential: token by token, which is differentiable any number of times.

    Returns:
        All states [B, T, E] and the last one [B, E], in at least fp32, where all is computed; fp64 in fp64. A state
        depends, bit for bit, on no later token. Gradients reach every tensor; the chunked form is once differentiable.

    Raises:
        ValueError: shapes do not fit together.

    Source: Griffin (arXiv 2402.19427, section 2.4) for the recurrence.
    """
    if log_decay.dim() != 3 or log_decay.shape != write.shape or log_decay.shape[1] < 1:
        raise ValueError(
            "diagonal_scan wants log_decay and write of one shape [B, T ≥ 1, E]; "
            f"got {list(log_decay.shape)} and {list(write.shape)}"
        )
    B, T, E = write.shape
    if initial_state is not None and initial_state.shape != (B, E):
        raise ValueError(f"diagonal_scan: initial_state must be [B, E] = {[B, E]}, got {list(initial_state.shape)}")
    dtype = core_dtype(log_decay, write, initial_state)
    g, w = log_decay.to(dtype), write.to(dtype)
    h = w.new_zeros(B, E) if initial_state is None else initial_state.to(dtype)
    if sequential or T == 1:
        states = []
        for a_t, w_t in zip(decay_exp(g).unbind(1), w.unbind(1)):
            h = a_t * h + w_t
            states.append(h)
        return torch.stack(states, dim=1), h
    states = _chunked(g, w, h)
    return states, states[:, -1]


class _DiagonalScan(Core):
    tensors = "log_decay write state"
    scalars = ""
    num_outputs, num_kept = 1, 1

    @staticmethod
    def outline(*args: Any) -> tuple[Tensor, ...]:
        w = args[1]
        return w.new_empty(w.shape), w.new_empty(w.shape)

    @staticmethod
    @full_precision
    def forward(ctx: Any, g: Tensor, w: Tensor, h: Tensor) -> Tensor:
        states = _scan(g, w, h)
        ctx.save_for_backward(g, w, h, states)
        return states

    @staticmethod
    @once_differentiable
    @full_precision
    def backward(ctx: Any, d_states: Tensor) -> tuple[Tensor, ...]:
        g, _, h, states = ctx.saved_tensors
        # what reaches state t: its own gradient, and what reaches t + 1 decayed by that token's decay
        later = torch.cat([g[:, 1:], torch.zeros_like(g[:, :1])], dim=1).flip(1)
        dw = _scan(later, d_states.flip(1), torch.zeros_like(h)).flip(1)
        before = torch.cat([h[:, None], states[:, :-1]], dim=1)
        kept = decay_exp(g).mul_(dw)
        return kept * before, dw, kept[:, 0]


_chunked = operator("diagonal_scan", _DiagonalScan)


def _scan(g: Tensor, w: Tensor, h: Tensor) -> Tensor:
    """All states [B, T, E] in one dtype."""
    T = w.shape[1]
    C = 1
    while C * C < T and C < LONGEST_CHUNK:
        C *= 2
    states = w.clone(memory_format=torch.contiguous_format)
    whole = T - T % C if T > SHORT else 0
    if whole:
        chunks, decays = (x[:, :whole].unflatten(1, (-1, C)) for x in (states, g))
        step = decay_exp(decays)
        for t in range(1, C):
            chunks[:, :, t].addcmul_(step[:, :, t], chunks[:, :, t - 1])
        since = decay_exp(decays.cumsum(2))
        starts = []
        for last, decay in zip(chunks[:, :, -1].unbind(1), since[:, :, -1].unbind(1)):
            starts.append(h)
            h = flush_tiny(torch.addcmul(last, decay, h))
        chunks.addcmul_(since, torch.stack(starts, dim=1).unsqueeze(2))
        h = chunks[:, -1, -1]
    for t, decay in zip(range(whole, T), decay_exp(g[:, whole:]).unbind(1)):
        h = states[:, t].addcmul_(decay, h)
    return states
