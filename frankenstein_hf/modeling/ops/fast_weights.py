"""Error-correcting fast weights with a step size per value channel.

    S_t = S_{t-1} Diag(exp g_t) + k_t (η_t ⊙ (v_t − S_{t-1}ᵀ k_t))ᵀ,      o_t = scale · S_tᵀ q_t

Shapes: B batch, H heads, T time, K key width, V value width, C chunk, N chunks in a segment.

Every value channel has a triangular system of its own, but all share the Gram matrix of the keys. So a chunk is solved
by substitution for all channels at once: what its keys and queries read, [2C, V], starts from the state before it, and
every token decays the rows behind its own and adds its write to them, weighted by the Gram matrix. No exponential, no
C×C×V tensor is involved. The backward pass first runs the same substitution from the last token to the first, which
gives the gradient of every write; with the writes known the rest is a decayed scan with matrix products for gradients.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .chunking import core_dtype, load, segments, store
from .numerics import at_least_fp32, decay_exp, flush_tiny, full_precision, untraced

SEGMENT_ROWS = 1024  # tokens times heads of a segment: its tensors stay in the processor's cache
CHUNK = 32
# of the log decay over one chunk, so −40 a step at C = 32; exp(±640) is a normal fp64 number
EXPONENT_RANGE = 1280.0
CENTRE = math.exp(-EXPONENT_RANGE / 2)


def channelwise_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = CHUNK,
) -> tuple[Tensor, Tensor | None]:
    """Delta rule with vector steps: S_t = S_{t-1} Diag(exp g_t) + k_t (η_t ⊙ (v_t − S_{t-1}ᵀ k_t))ᵀ, o_t = S_tᵀ q_t.

    The error is that of the state before it decays, unlike in `delta_rule`.

    Args:
        query, key: [B, H, T, K], T ≥ 1. value, step (η): [B, H, T, V].
        log_decay (g): [B, H, T, V], ≤ 0, or None (nothing is forgotten); clamped at −40, without a gradient there.
        initial_state: [B, H, K, V], zeros if None.
        chunk_size: tokens solved together at most; 32 are the limit.

    Returns:
        Output [B, H, T, V] in query's dtype and, if asked for, the final state [B, H, K, V] in at least fp32. Half
        precision is computed in fp32, fp64 in fp64. An output depends, bit for bit, on no later token. Once
        differentiable in every tensor.

    Raises:
        ValueError: shapes do not fit together.
    """
    B, H, T, K = key.shape
    V = value.shape[-1]
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    if query.shape != key.shape or T < 1:
        raise ValueError(f"query and key must be [B, H, T ≥ 1, K], got {list(query.shape)} and {list(key.shape)}")
    for name, x in (("value", value), ("step", step), ("log_decay", log_decay)):
        if x is not None and x.shape != (B, H, T, V):
            raise ValueError(f"{name} must be {[B, H, T, V]}, got {list(x.shape)}")
    if initial_state is not None and initial_state.shape != (B, H, K, V):
        raise ValueError(f"initial_state must be {[B, H, K, V]}, got {list(initial_state.shape)}")
    if log_decay is None:
        log_decay = at_least_fp32(value.new_zeros(1)).expand(B, H, T, V)
    if initial_state is None:
        initial_state = at_least_fp32(key.new_zeros(1)).expand(B, H, K, V)
    output, state = (_chunked if T > 1 else _ChannelwiseDeltaRule.apply)(
        query, key, value, step, log_decay, initial_state, scale, min(chunk_size, CHUNK, T)
    )
    return output, state if output_final_state else None


class _ChannelwiseDeltaRule(torch.autograd.Function):
    @staticmethod
    @full_precision
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *inputs, S, scale, C = args
        (B, H, T, K), V = inputs[1].shape, inputs[2].shape[-1]
        dtype = core_dtype(*inputs, S)
        S = S.to(dtype).reshape(B * H, K, V)
        output = torch.empty_like(inputs[2], dtype=inputs[0].dtype)
        writes = torch.empty(B, H, T, V, dtype=dtype, device=S.device)
        loops, starts = _Loops(B * H, V, S), []
        for part in segments(B * H, T, C, SEGMENT_ROWS):
            starts.append(S)
            q, k, v, eta, g = (load(x, part, dtype) for x in inputs)
            o, y, S = _segment_forward(loops.of(part.size), q, k, v, eta, g, S)
            store(output, part, o.mul_(scale))
            store(writes, part, y)
        ctx.save_for_backward(*inputs, writes, torch.stack(starts))
        ctx.scale, ctx.C = scale, C
        ctx.set_materialize_grads(False)
        return output, S.reshape(B, H, K, V)

    @staticmethod
    @once_differentiable
    @full_precision
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, writes, starts = ctx.saved_tensors
        (B, H, T, K), V, C = inputs[1].shape, starts.shape[-1], ctx.C
        d_output, d_final = grad_outputs
        if d_output is None:
            d_output = starts.new_zeros(1).expand(B, H, T, V)
        dS = torch.zeros_like(starts[0]) if d_final is None else d_final.to(starts.dtype).reshape(starts[0].shape)
        grads, loops = [torch.empty_like(x) for x in inputs], _Loops(B * H, V, starts)
        for start, part in reversed(list(zip(starts, segments(B * H, T, C, SEGMENT_ROWS)))):
            q, k, v, eta, g, y, do = (load(x, part, starts.dtype) for x in (*inputs, writes, d_output))
            *chunks, dS = _segment_backward(loops.of(part.size), q, k, v, eta, g, y, start, do * ctx.scale, dS)
            for grad, x in zip(grads, chunks):
                store(grad, part, x)
        return *grads, dS.reshape(B, H, K, V), None, None


_chunked = untraced(_ChannelwiseDeltaRule.apply)


class _Substitution:
    """The token loops within a chunk, over buffers whose views are made once: a step is two to four in-place calls."""

    def __init__(self, C: int, BH: int, V: int, like: Tensor) -> None:
        def rows(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=like.dtype, device=like.device)

        self.C = C
        # forward: rows 2t and 2t + 1 are the reads of key t and of query t
        self.reads, self.gram = rows(2 * C, BH, V), rows(C, 2 * C, BH, 1)
        self.writes, self.target, self.step, self.decay = (rows(C, BH, V) for _ in range(4))
        later = [slice(2 * t + 1, None) for t in range(C)]
        self.forward_steps = [
            (self.target[t], self.step[t], self.decay[t], self.reads[2 * t], self.writes[t],
             self.reads[later[t]], self.gram[t, later[t]])
            for t in range(C)
        ]  # fmt: skip
        # backward: row t is the gradient of write t
        self.d_writes, self.d_errors, self.d_output = (rows(C, BH, V) for _ in range(3))
        self.by_query, self.by_key = rows(C, C, BH, 1), rows(C, C, BH, 1)
        self.backward_steps = [
            (self.d_output[t], self.step[t], self.decay[t], self.d_writes[t], self.d_errors[t],
             self.d_writes[: t + 1], self.by_query[t, : t + 1], self.d_writes[:t], self.by_key[t, :t])
            for t in reversed(range(C))
        ]  # fmt: skip

    def forward(self) -> None:
        """From `reads` of the state before the chunk, `gram`, `target` = η v, `step` = −η: the writes and all reads."""
        for target, step, decay, read, write, later, gram in self.forward_steps:
            torch.addcmul(target, step, read, out=write)
            later.mul_(decay).addcmul_(gram, write)

    def backward(self) -> None:
        """From `d_writes` by the state after the chunk, `d_output`, `step` = η: gradients of writes and of errors."""
        for d_out, step, decay, d_write, d_error, upto, by_query, before, by_key in self.backward_steps:
            upto.addcmul_(by_query, d_out)
            torch.mul(step, d_write, out=d_error)
            before.mul_(decay).addcmul_(by_key, d_error, value=-1)


class _Loops:
    """A `_Substitution` for every length of chunk."""

    def __init__(self, BH: int, V: int, like: Tensor) -> None:
        self.BH, self.V, self.like = BH, V, like
        self.made: dict[int, _Substitution] = {}

    def of(self, C: int) -> _Substitution:
        if C not in self.made:
            self.made[C] = _Substitution(C, self.BH, self.V, self.like)
        return self.made[C]


def _rows(k: Tensor, q: Tensor) -> Tensor:
    """[N, B·H, 2C, …]: what reads the state, key t (before token t) and query t (after it) in turn."""
    return torch.stack([k, q], dim=3).flatten(2, 3)


def _factors(g: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """exp(G_t)/CENTRE, exp(G_{t−1})/CENTRE in fp64, and exp(G_C) [N, B·H, 1, V]; G sums the log decays of a chunk."""
    G = g.double().clamp_min(-EXPONENT_RANGE / CHUNK).cumsum(2)
    E = G.add_(EXPONENT_RANGE / 2).exp_()
    before = torch.cat([torch.full_like(E[:, :, :1], 1 / CENTRE), E[:, :, :-1]], dim=2)
    return E, before, flush_tiny(E[:, :, -1:] * CENTRE).to(dtype)


def _segment_forward(
    loop: _Substitution, q: Tensor, k: Tensor, v: Tensor, eta: Tensor, g: Tensor, S: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs and writes [N, B·H, C, V] and the state after the segment."""
    rows = _rows(k, q)
    gram = (k @ rows.mT).permute(0, 2, 3, 1).unsqueeze(-1).contiguous()  # [N, writer, reader, B·H, 1]
    target, step, decay = ((x.transpose(1, 2)).contiguous() for x in (eta * v, -eta, decay_exp(g)))
    to_end = _to_end(g)
    o, y = torch.empty_like(v), torch.empty_like(v)
    for n in range(len(q)):
        loop.reads.copy_((rows[n] @ S).transpose(0, 1))
        for buffer, x in ((loop.gram, gram), (loop.target, target), (loop.step, step), (loop.decay, decay)):
            buffer.copy_(x[n])
        loop.forward()
        o[n], y[n] = loop.reads[1::2].transpose(0, 1), loop.writes.transpose(0, 1)
        S = torch.baddbmm(S * to_end[n, :, 0, None] * decay[n, 0, :, None], k[n].mT, y[n] * to_end[n])
        S = flush_tiny(S)
    return o, y, S


def _to_end(g: Tensor) -> Tensor:
    """exp(G_C − G_t), [N, B·H, C, V]."""
    G = g.double().clamp_min(-EXPONENT_RANGE / CHUNK).cumsum(2)
    return decay_exp((G[:, :, -1:] - G).to(g.dtype))


def _segment_backward(
    loop: _Substitution, q: Tensor, k: Tensor, v: Tensor, eta: Tensor, g: Tensor,
    y: Tensor, S: Tensor, do: Tensor, dS: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of q, k, v, eta, g [N, B·H, C, …], and of the state before the segment."""
    N, C, dtype = y.shape[0], y.shape[2], q.dtype
    E, before, whole = _factors(g, dtype)
    since, since_before = flush_tiny(E * CENTRE).to(dtype), flush_tiny(before * CENTRE).to(dtype)
    Y = y / E
    end = E[:, :, -1:]
    kept_writes = flush_tiny(Y * end).to(dtype)
    states, added = [S], k.mT @ kept_writes
    for n in range(N - 1):
        states.append(flush_tiny(torch.addcmul(added[n], whole[n], states[-1])))

    # the gradients of errors and writes, chunk by chunk from the last
    by_query, by_key = ((x @ k.mT).permute(0, 2, 3, 1).unsqueeze(-1) for x in (q, k))
    step, decay, d_out = (x.transpose(1, 2) for x in (eta, decay_exp(g), do))
    d_states, d_read = [dS], q.mT @ (do * since)
    dr = torch.empty_like(y)
    for n in reversed(range(N)):
        loop.d_writes.copy_((k[n] @ dS).transpose(0, 1))
        for buffer, x in (
            (loop.by_query, by_query), (loop.by_key, by_key), (loop.step, step), (loop.decay, decay),
            (loop.d_output, d_out),
        ):  # fmt: skip
            buffer.copy_(x[n])
        loop.backward()
        dr[n] = loop.d_errors.transpose(0, 1)
        dS = torch.addcmul(d_read[n], whole[n], dS).baddbmm_(k[n].mT, dr[n] * since_before[n], alpha=-1)
        d_states.append(dS := flush_tiny(dS))
    S, dS_end = torch.stack(states), torch.stack(d_states[-2::-1])

    # From here on a decayed scan: rows X read writes y; D are the gradients of what they read.
    rows = _rows(k, q)
    E_rows, D = _rows(before, E), _rows(-dr, do).double()
    hidden = _hidden(C, q.device)
    DE = D * E_rows
    P = flush_tiny((DE @ Y.mT).masked_fill_(hidden, 0.0)).to(dtype)
    R = (rows @ k.mT).masked_fill_(hidden, 0.0).double()
    d_rows = P @ k
    d_rows += flush_tiny(DE * CENTRE).to(dtype) @ S.mT
    dk = (P.mT @ rows).add_(kept_writes @ dS_end.mT)
    reads = ((rows @ S).double() * CENTRE + R @ Y).mul_(E_rows)
    dY = (k @ dS_end).double().mul_(end)  # times E is dy
    kept = (Y * dY).sum(2) + whole[:, :, 0] * (S * dS_end).sum(2)
    dY += R.mT @ DE
    # token t raises G_t as a reader and lowers it as a writer; in fp64, as under strong decay nearly all of it cancels
    D *= reads
    dG = D[:, :, 1::2] - Y * dY
    dG[:, :, :-1] += D[:, :, 2::2]
    dG[:, :, -1] += kept
    dg = dG.new_ones(C, C).triu_() @ dG  # the sum over t ≥ s
    dg.masked_fill_(g < -EXPONENT_RANGE / CHUNK, 0.0)
    d_eta = dY.div_(E).mul_(v - reads[:, :, ::2])
    return d_rows[:, :, 1::2], dk.add_(d_rows[:, :, ::2]), dr, d_eta, dg, dS


def _hidden(C: int, device: torch.device) -> Tensor:
    """[2C, C]: writes a key (its own and later ones) and a query (later ones) must not see."""
    later = torch.ones(C, C, dtype=torch.bool, device=device)
    return torch.stack([later.triu(), later.triu(1)], dim=1).flatten(0, 1)
