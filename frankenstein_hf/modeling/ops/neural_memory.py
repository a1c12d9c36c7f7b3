"""A memory that is a small network, trained on the sequence it reads: momentum, forgetting, chunk-parallel.

    S_t = η_t S_{t-1} − θ_t ∇‖P(k_t) − v_t‖²,   P the memory at the start of t's chunk
    M_t = a_t M_{t-1} + S_t                      y_t = M_t(q_t)

Shapes: R rows, H heads, L time, W width, E layers of the memory, each a W×W matrix with SiLU between them; inside,
tensors are cut into N chunks of C tokens and laid out [N, R·H, …].

A token's gradient is, layer by layer, an outer product of the layer's input a and the error δ at its output. As all of
a chunk's gradients are taken at its start, both recurrences are linear within it: with u = −θδ,

    M_t = keep_t M + carry_t S + Σ_{i≤t} c_ti a_i u_iᵀ,     c = (decays by a) (decays by η), a product of triangles,

so a token reads through a memory that is never formed: x M_t = keep_t x M + carry_t x S + Σ c_ti (x·a_i) u_i. Only
finding a and δ and stepping from chunk to chunk is sequential.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .numerics import decay_exp, flush_tiny, full_precision, untraced

DECAY_FLOOR = -100.0  # a step below this forgets everything; finite, so that sums of logs can be subtracted
TILES_PER_SEGMENT = 64  # chunks × rows × heads at once: few enough for the processor's cache


class MemoryState(NamedTuple):
    """Weights [R, H, E, W, W] at the start of the current chunk, now, and their momentum."""

    start: Tensor
    now: Tensor
    momentum: Tensor


def recall(memory: Tensor, query: Tensor) -> Tensor:
    """M(q): memory [..., E, W, W], query [..., C, W] -> [..., C, W]."""
    first, *others = memory.unbind(-3)
    output = query @ first
    for weight in others:
        output = F.silu(output) @ weight
    return output


def surprise(memory: Tensor, key: Tensor, value: Tensor, longest: float) -> tuple[Tensor, Tensor]:
    """The gradients ∇_M ‖M(k) − v‖², a token's cut to the length `longest`, as outer products.

    Args:
        memory: [..., E, W, W].
        key, value: [..., C, W].
        longest: Euclidean length over all layers of one token's gradient.

    Returns:
        a and δ [..., E, C, W]; the gradient of layer e for token c is a[e, c] δ[e, c]ᵀ.
    """
    weights = memory.unbind(-3)
    a, slopes = [key], []
    for weight in weights[:-1]:
        z = a[-1] @ weight
        gate = z.sigmoid()
        a.append(z * gate)
        slopes.append(gate + a[-1] * (1.0 - gate))
    δ = [2.0 * (a[-1] @ weights[-1] - value)]
    for weight, slope in zip(weights[:0:-1], slopes[::-1]):
        δ.insert(0, (δ[0] @ weight.mT) * slope)
    inputs, errors = (torch.stack(x, dim=-3) if len(x) > 1 else x[0].unsqueeze(-3) for x in (a, δ))
    length = (inputs.square().sum(-1, keepdim=True) * errors.square().sum(-1, keepdim=True)).sum(-3, keepdim=True)
    return inputs, errors * (longest * length.clamp_min(longest**2).rsqrt())


@untraced
@full_precision
def neural_memory(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_keep: Tensor,
    log_momentum: Tensor,
    step: Tensor,
    state: MemoryState,
    *,
    chunk_size: int,
    longest: float,
    phase: Tensor | None = None,
    lengths: Tensor | None = None,
    exclude_own: bool = False,
) -> tuple[Tensor, MemoryState]:
    """Titans' memory (arXiv 2501.00663, section 3), chunk-parallel.

    Args:
        query, key, value: [R, H, L, W], at least fp32 like the rest.
        log_keep, log_momentum, step: log a_t ≤ 0, log η_t ≤ 0 and θ_t ≥ 0, [R, H, L].
        state: Before the first token.
        chunk_size: Tokens a chunk.
        longest: See `surprise`.
        phase: [R] tokens the current chunk has seen already, zeros if None.
        lengths: [R] tokens of each row that are real, all if None; the rest changes nothing and reads anything.
        exclude_own: Read each token's memory without that token's own gradient.

    Returns:
        y [R, H, L, W] and the state after the last real token.
    """
    R, H, L, W = query.shape
    device = query.device
    shift = 0 if phase is None else int(phase.max())
    crosses = shift + L > chunk_size
    C = chunk_size if crosses else L
    begin = torch.zeros(R, dtype=torch.long, device=device) if phase is None else phase
    gates = torch.stack([log_keep.clamp_min(DECAY_FLOOR), log_momentum.clamp_min(DECAY_FLOOR), step], dim=-1)
    tensors, place = [query, key, value, gates], None
    if lengths is not None or (shift and crosses) or L % C:
        real = torch.arange(L, device=device) < (L if lengths is None else lengths[:, None, None])
        tensors.append(real.expand(R, H, L)[..., None].to(query.dtype))
    if shift and crosses:  # rows begin at different places of their first chunk
        place = torch.arange(L, device=device) + begin[:, None]
        tensors = [_scatter(x, place, shift + L) for x in tensors]
    q, k, v, gates, *live = (_chunks(x, C).flatten(1, 2) for x in tensors)
    start = torch.where((begin == 0).view(-1, 1, 1, 1, 1), state.now, state.start)
    P, M, S = (x.flatten(0, 1) for x in (start, state.now, state.momentum))
    size = max(1, TILES_PER_SEGMENT // (R * H))
    alive = live[0].split(size) if live else [None] * -(-len(q) // size)
    parts: list[Tensor] = []
    points: list[Tensor] = []
    for q_n, k_n, v_n, gates_n, live_n in zip(*(x.split(size) for x in (q, k, v, gates)), alive):
        y, point, M, S = _memorize(q_n, k_n, v_n, gates_n, live_n, P, M, S, longest, exclude_own)
        parts.append(y)
        points.append(point)
        P = M

    y = torch.cat(parts).unflatten(1, (R, H)).permute(1, 2, 0, 3, 4).flatten(2, 3)
    y = y[:, :, :L] if place is None else y.gather(2, place[:, None, :, None].expand(-1, H, -1, W))
    starts = torch.cat(points).unflatten(1, (R, H))
    if place is not None or lengths is not None:
        last = ((begin + (L if lengths is None else lengths) - 1) // chunk_size).clamp(0, len(starts) - 1)
        start = starts[last, torch.arange(R, device=device)]
    else:
        start = starts[-1]
    return y, MemoryState(start, *(x.unflatten(0, (R, H)) for x in (M, S)))


def _scatter(x: Tensor, place: Tensor, size: int) -> Tensor:
    """[R, H, L, …] -> [R, H, size, …], token t of row r at place[r, t], zeros elsewhere."""
    index = place[:, None, :, None].expand(*x.shape[:2], -1, x.shape[3])
    return x.new_zeros(*x.shape[:2], size, x.shape[3]).scatter(2, index, x)


def _chunks(x: Tensor, C: int) -> Tensor:
    """[R, H, L, …] -> [N, R, H, C, …], the last chunk filled with zeros."""
    missing = -x.shape[2] % C
    x = F.pad(x, (0, 0, 0, missing)) if missing else x
    return x.unflatten(2, (-1, C)).movedim(2, 0)


class _Between(torch.autograd.Function):
    """Log decays [..., C] -> what is left at t of a write at i ≤ t, exp(Σ_{i<s≤t}), zero for i > t: [..., C, C]."""

    @staticmethod
    def forward(ctx: Any, log_decay: Tensor) -> Tensor:
        G = log_decay.double().cumsum(-1)[..., None]  # differences of long sums are exponentiated
        left = decay_exp((G - G.mT).to(log_decay.dtype).tril_()).tril_()
        ctx.save_for_backward(left)
        return left

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (left,) = ctx.saved_tensors
        from_s = left.new_ones(left.shape[-2:]).triu_()
        return (from_s @ (grad * left)).tril_(-1).sum(-1)  # over i < s ≤ t


def _memorize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    live: Tensor | None,
    P: Tensor,
    M: Tensor,
    S: Tensor,
    longest: float,
    exclude_own: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A few chunks, [N, R·H, C, …], from the memories P, M, S [R·H, E, W, W] before them.

    Returns:
        y [N, R·H, C, W], the memories at which the chunks took their gradients [N, R·H, E, W, W], the last M and S.
    """
    if live is not None:  # what is not real neither forgets nor learns
        gates = gates * live
    keep, momentum = decay_exp(gates[..., :2].double().cumsum(-2)).to(gates.dtype).split(1, dim=-1)
    decays, momenta = (_Between.apply(x) for x in gates[..., :2].unbind(-1))
    moved = torch.cat([momentum, momenta], dim=-1)
    # of the momentum before the chunk, and of each write, what has moved into the memory
    carry, c = flush_tiny(decays @ (moved if live is None else moved * live)).split([1, q.shape[2]], dim=-1)
    left = torch.stack([c[..., -1, :], momenta[..., -1, :]], dim=-1)[:, :, None]  # at the chunk's end, in M and in S

    points: list[Tensor] = []
    trace: list[tuple[Tensor, ...]] = []
    ends = (x[..., -1:, :][:, :, None] for x in (keep, carry, momentum))
    steps = zip(*(x.unbind() for x in (k, v, -gates[:, :, None, :, 2:], left, *ends)))
    for n, (k_n, v_n, minus_θ, left_n, keep_n, carry_n, momentum_n) in enumerate(steps):
        P = M if n else P
        a, δ = surprise(P, k_n, v_n, longest)
        u = minus_θ * δ
        points.append(P)
        trace.append((M, S, a, u))
        new_M, new_S = (torch.cat([left_n[..., :1] * a, left_n[..., 1:] * a], -1).mT @ u).chunk(2, -2)
        # under forgetting a deep memory dwindles to nothing, by way of numbers a CPU is slow with
        M, S = flush_tiny(keep_n * M + carry_n * S + new_M), flush_tiny(momentum_n * S + new_S)

    x, c = q, c.tril(-1) if exclude_own else c
    for e, (M_e, S_e, a, u) in enumerate(zip(*(torch.stack(kept).unbind(2) for kept in zip(*trace)))):
        x = F.silu(x) if e else x
        x = keep * (x @ M_e) + carry * (x @ S_e) + ((x @ a.mT) * c) @ u
    return x, torch.stack(points), M, S
