"""Fast weights that rehearse: every token writes the last W pairs of key and value again.

    S_t = a_t S_{t-1} + w_t Σ_{j=t−W+1}^{t} x_j (v_j − S_{t-1}ᵀ x_j)ᵀ     `rehearsal_delta_rule`
    S_t = a_t S_{t-1} + w_t Σ_{j=t−W+1}^{t} x_j v_jᵀ                      `rehearsal_scan`

Shapes: B batch, H heads, T time, K key width, V value width, W window; C chunk, N chunks in a segment, J = C + W − 1
        pairs a chunk rehearses. Keys and values come with the W − 1 pairs before the first token: [B, H, W−1+T, …].
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .banded import banded_product, banded_scores
from .chunking import Segment, core_dtype, segments
from .decayed_scan import decayed_scan
from .numerics import at_least_fp32, decay_exp, flush_tiny, full_precision, untraced

SEGMENT_ROWS = 2048  # tokens times heads of a segment: its tensors stay in the processor's cache
SYSTEM_ROWS = 64  # C·W: rows of a chunk's triangular system
MIN_LOG_DECAY = -100.0  # less forgets everything; finite, so that differences of sums are numbers


def rehearsal_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    log_decay: Tensor,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """S_t = exp(g_t) S_{t-1} + w_t Σ_{j=t−W+1}^{t} x_j (v_j − S_{t-1}ᵀ x_j)ᵀ, o_t = scale · S_tᵀ q_t, chunk-parallel.

    All errors of a step are those of the state before it (and before it decays). The errors of a chunk solve a unit
    lower triangular system of C·W rows, whose solution is linear in the J values and in what the state reads for the J
    keys; so it is found once as two C·W × J matrices, for all chunks of a segment in parallel.

    Args:
        query: [B, H, T, K], T ≥ 1. key (x): [B, H, W−1+T, K]. value: [B, H, W−1+T, V]; the first W − 1 pairs belong to
            the tokens before the first one (zeros at the start of a sequence).
        weight (w), log_decay (g ≤ 0): [B, H, T].
        initial_state: [B, H, K, V], zeros if None.
        chunk_size: tokens solved together at most; 64/W, but at least 4, are the limit.

    Returns:
        Output [B, H, T, V] in query's dtype and, if asked for, the final state [B, H, K, V] in at least fp32. Half
        precision is computed in fp32, fp64 in fp64. An output depends, bit for bit, on no later token. Once
        differentiable in every tensor.

    Raises:
        ValueError: shapes do not fit together.
    """
    W = _check(query, key, value, weight, log_decay, initial_state, chunk_size)
    if initial_state is None:
        initial_state = at_least_fp32(key.new_zeros(1)).expand(*key.shape[:2], key.shape[-1], value.shape[-1])
    C = min(chunk_size, max(4, SYSTEM_ROWS // W), query.shape[2])
    output, state = (_chunked if C > 1 else _RehearsalDeltaRule.apply)(
        query, key, value, weight, log_decay, initial_state, C
    )
    return scale * output, state if output_final_state else None


def _check(q: Tensor, k: Tensor, v: Tensor, w: Tensor, g: Tensor, state: Tensor | None, chunk_size: int) -> int:
    """The window W."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    B, H, T, K = q.shape
    if T < 1 or k.shape[:2] != (B, H) or k.shape[3] != K or k.shape[:3] != v.shape[:3] or k.shape[2] < T:
        raise ValueError(
            "query, key and value must be [B, H, T, K], [B, H, W−1+T, K] and [B, H, W−1+T, V]; "
            f"got {list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        )
    for name, x in (("weight", w), ("log_decay", g)):
        if x.shape != (B, H, T):
            raise ValueError(f"{name} must be {[B, H, T]}, got {list(x.shape)}")
    if state is not None and state.shape != (B, H, K, v.shape[-1]):
        raise ValueError(f"initial_state must be {[B, H, K, v.shape[-1]]}, got {list(state.shape)}")
    return k.shape[2] - T + 1


class _RehearsalDeltaRule(torch.autograd.Function):
    """Segments forward; backward recomputes each from the state before it."""

    @staticmethod
    @full_precision
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *inputs, S, C = args
        (B, H, T, K), V = inputs[0].shape, inputs[2].shape[-1]
        dtype = core_dtype(*inputs, S)
        S = S.to(dtype).reshape(B * H, K, V)
        output = torch.empty(B * H, T, V, dtype=dtype, device=S.device)
        starts = []
        for part in segments(B * H, T, C, SEGMENT_ROWS):
            starts.append(S)
            output[:, part.start : part.stop], S = _segment(_load(inputs, part, dtype), S, part.size)
        ctx.save_for_backward(*inputs, torch.stack(starts))
        ctx.C = C
        ctx.set_materialize_grads(False)
        return output.view(B, H, T, V).to(inputs[0].dtype), S.reshape(B, H, K, V)

    @staticmethod
    @once_differentiable
    @full_precision
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, starts = ctx.saved_tensors
        (B, H, T, K), V, C = inputs[0].shape, starts.shape[-1], ctx.C
        d_output, d_final = grad_outputs
        dS = torch.zeros_like(starts[0]) if d_final is None else d_final.to(starts.dtype).reshape(starts[0].shape)
        grads = [torch.zeros(B * H, *x.shape[2:], dtype=starts.dtype, device=x.device) for x in inputs]
        for start, part in reversed(list(zip(starts, segments(B * H, T, C, SEGMENT_ROWS)))):
            pieces = [x.detach().requires_grad_() for x in (*_load(inputs, part, starts.dtype), start)]
            with torch.enable_grad():
                o, S = _segment(pieces[:-1], pieces[-1], part.size)
            own = slice(part.start, part.stop)
            do = torch.zeros_like(o) if d_output is None else d_output.flatten(0, 1)[:, own].to(o.dtype)
            *chunks, dS = torch.autograd.grad((o, S), pieces, (do, dS))
            dS = flush_tiny(dS)
            for grad, x in zip(grads, chunks):
                grad[:, part.start : part.start + x.shape[1]] += x
        d_inputs = (grad.view(x.shape).to(x.dtype) for grad, x in zip(grads, inputs))
        return *d_inputs, dS.reshape(B, H, K, V), None


_chunked = untraced(_RehearsalDeltaRule.apply)


def _load(inputs: list[Tensor], part: Segment, dtype: torch.dtype) -> list[Tensor]:
    """A segment's [B·H, length, …]; keys and values with the W − 1 pairs before it."""
    q, k, v, w, g = (x.flatten(0, 1) for x in inputs)
    own, pairs = slice(part.start, part.stop), slice(part.start, part.stop + k.shape[1] - q.shape[1])
    return [x.to(dtype) for x in (q[:, own], k[:, pairs], v[:, pairs], w[:, own], g[:, own])]


def _segment(inputs: list[Tensor], S: Tensor, C: int) -> tuple[Tensor, Tensor]:
    """What `_load` returned -> output [B·H, L, V] and the state after the segment."""
    q, k, v, w, g = inputs
    W, dtype = k.shape[1] - q.shape[1] + 1, q.dtype
    J = C + W - 1
    q, w, g = (_chunks(x, C, C) for x in (q, w.unsqueeze(-1), g.unsqueeze(-1)))
    k, v = (_chunks(x, J, C) for x in (k, v))
    G = g.double().clamp_min(MIN_LOG_DECAY).cumsum(2)  # [N, B·H, C, 1]
    before = G - g.double().clamp_min(MIN_LOG_DECAY)
    ones = torch.ones(C, C, dtype=torch.bool, device=q.device)
    read = _between(G - G.mT, ones.triu(1), dtype)  # query t, write s ≤ t
    erase = _between(before - G.mT, ones.triu(), dtype)  # error of t, write s < t
    since, since_before = decay_exp(G.to(dtype)), decay_exp(before.to(dtype))
    to_end = decay_exp((G[:, :, -1:] - G).to(dtype))

    # what is written is w times the error, linear in the values and in what the state reads
    written = _Written.apply(k @ k.mT, w * erase, torch.cat([w, w * since_before], dim=-1))  # [N, B·H, C·W, 2J]
    scores = ((q @ k.mT).unfold(3, W, 1) * read[..., None]).flatten(3, 4)  # of queries, [N, B·H, C, C·W]
    select = torch.eye(J, dtype=dtype, device=q.device).unfold(1, W, 1)  # [J, C, W]: pair i is what token t rehearses
    remains = (select * to_end.unsqueeze(2)).flatten(3, 4)  # of pairs, [N, B·H, J, C·W]
    by_value, by_state = flush_tiny(torch.cat([scores, remains], dim=2) @ written).split(J, dim=-1)
    (by_value, kept_value), (by_state, kept_state) = (x.split([C, J], dim=2) for x in (by_value, by_state))

    added, removed = k.mT @ (kept_value @ v), k.mT @ kept_state
    states, held = [], []
    for k_n, decay, add, remove in zip(k.unbind(), since[:, :, -1:].unbind(), added.unbind(), removed.unbind()):
        states.append(S)
        held.append(k_n @ S)
        S = flush_tiny(torch.baddbmm(torch.addcmul(add, decay, S), remove, held[-1], alpha=-1))
    o = (q @ torch.stack(states)) * since + by_value @ v - by_state @ torch.stack(held)
    return o.transpose(0, 1).flatten(1, 2), S


class _Written(torch.autograd.Function):
    """Solve (I + A) X = diag-like targets for what a chunk writes; solved in fp64, where products of small entries are
    no subnormal numbers.

    Rehearsed pair (t, b), t < C, b < W, is pair t + b of the J = C + W − 1. From gram [N, B·H, J, J], strictly lower
    factor [N, B·H, C, C] and coefficients [N, B·H, C, 2]:

        A[(t, b), (s, c)] = factor[t, s] gram[t + b, s + c]      targets[(t, b), (i, t + b)] = coefficients[t, i]

    Returns X [N, B·H, C·W, 2J].
    """

    @staticmethod
    def forward(ctx: Any, gram: Tensor, factor: Tensor, coefficients: Tensor) -> Tensor:
        (N, BH, J, _), C = gram.shape, factor.shape[-1]
        W = J - C + 1
        A = torch.empty(N, BH, C, W, C, W, dtype=torch.float64, device=gram.device)
        X = torch.zeros(N, BH, C, W, 2, J, dtype=torch.float64, device=gram.device)
        for b in range(W):
            X[:, :, :, b].diagonal(b, 2, 4).copy_(coefficients.mT)
            for c in range(W):
                A[:, :, :, b, :, c] = gram[:, :, b : b + C, c : c + C] * factor
        A = A.flatten(4, 5).flatten(2, 3)
        X = torch.linalg.solve_triangular(A, X.flatten(4, 5).flatten(2, 3), upper=False, unitriangular=True)
        X = flush_tiny(X).to(gram.dtype)
        ctx.save_for_backward(gram, factor, A, X)
        return X

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gram, factor, A, X = ctx.saved_tensors
        J, C = gram.shape[-1], factor.shape[-1]
        W = J - C + 1
        targets = torch.linalg.solve_triangular(A.mT, grad.double(), upper=True, unitriangular=True)
        targets = flush_tiny(targets).to(grad.dtype)
        dA = (targets @ X.mT).neg_().unflatten(3, (C, W)).unflatten(2, (C, W))
        targets = targets.unflatten(3, (2, J)).unflatten(2, (C, W))
        d_gram, d_factor = torch.zeros_like(gram), torch.zeros_like(factor)
        d_coefficients = grad.new_zeros(*factor.shape[:3], 2)
        for b in range(W):
            d_coefficients += targets[:, :, :, b].diagonal(b, 2, 4).mT
            for c in range(W):
                rows, columns, part = slice(b, b + C), slice(c, c + C), dA[:, :, :, b, :, c]
                d_factor.addcmul_(part, gram[:, :, rows, columns])
                d_gram[:, :, rows, columns].addcmul_(part, factor)
        return d_gram, d_factor, d_coefficients


def _chunks(x: Tensor, size: int, C: int) -> Tensor:
    """[B·H, …, W] -> overlapping pieces [N, B·H, size, W] that start every C tokens."""
    return x.unfold(1, size, C).permute(1, 0, 3, 2).contiguous()


def _between(difference: Tensor, hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return decay_exp(difference.to(dtype).masked_fill(hidden, 2 * MIN_LOG_DECAY))


@full_precision
def rehearsal_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    log_decay: Tensor,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """S_t = exp(g_t) S_{t-1} + w_t Σ_{j=t−W+1}^{t} x_j v_jᵀ, o_t = scale · S_tᵀ q_t, chunk-parallel.

    A pair enters a `decayed_scan` once, when its window is over, with the weight it has gathered by then; the W − 1
    pairs whose windows are still open are a band.

    Arguments, results and errors as in `rehearsal_delta_rule`; `chunk_size` is that of `decayed_scan`.
    """
    W = _check(query, key, value, weight, log_decay, initial_state, chunk_size)
    T = query.shape[2]
    q, w, g = at_least_fp32(query), at_least_fp32(weight), at_least_fp32(log_decay)
    k, v = at_least_fp32(key), at_least_fp32(value)
    # gathered[b][t]: what pair t − b has gathered by t; pairs before the first token start at nothing
    gathered = [w]
    for _ in range(1, W):
        gathered.append(w + decay_exp(g) * F.pad(gathered[-1][..., :-1], (1, 0)))
    state = None if initial_state is None else at_least_fp32(initial_state)
    output, final = decayed_scan(
        q, k[:, :, :T] * gathered[-1][..., None], v[:, :, :T], g,
        scale=scale, initial_state=state, output_final_state=output_final_state, chunk_size=chunk_size,
    )  # fmt: skip
    if W > 1:
        open_windows = torch.stack(gathered[:-1], dim=-1)
        k, v = k[:, :, 1:], v[:, :, 1:]
        output = output + banded_product(scale * open_windows * banded_scores(q, k), v)
        if final is not None:
            for b in range(W - 1):
                x, y = k[:, :, k.shape[2] - 1 - b, :, None], v[:, :, k.shape[2] - 1 - b, None, :]
                final = final + open_windows[:, :, -1, b, None, None] * x * y
    return output.to(query.dtype), final
