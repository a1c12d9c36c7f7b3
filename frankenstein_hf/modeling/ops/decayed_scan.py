"""Decayed scan: a matrix state that forgets by its own decay and adds one outer product a token.

    S_t = Diag(a_t) S_{t-1} + k_t v_tᵀ   (decay_axis="key")       o_t = scale · q_tᵀ S_t       a_t = exp(log_decay_t)
    S_t = S_{t-1} Diag(a_t) + k_t v_tᵀ   (decay_axis="value")

Shapes: B batch, H heads, T time, K key width, V value width, C chunk, N chunks in a segment.

The sequence is cut into chunks of C tokens. With G the cumulative log-decay since the chunk's start, token t reads

    o_t = Σ_{i≤t} (q_t exp(G_t − G_i) k_i) v_i  +  q_t exp(G_t) S,     S the state before the chunk,

so a chunk is a few C×C products, and only the short recurrence over chunk states is a loop. Forward and backward walk
over segments of a few chunks; the backward keeps the state before each segment and recomputes the rest, so that memory
stays near that of the inputs and temporaries stay in the processor's cache. The last T mod C tokens are a chunk of
their own size: nothing is padded.
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .backend import use_triton
from .chunking import Segment, add_product, load, num_segments, segments, store
from .numerics import at_least_fp32, decay_exp, flush_tiny, full_precision
from .operators import Core, operator
from .tracing import exporting

SCALAR_FLOOR = -100.0  # a step below this forgets everything; a finite floor admits log_decay = -inf
LONGEST_VECTOR_CHUNK = 32
EXPONENT_RANGE = 1280.0  # of a vector decay over one chunk, so −40 a step at C = 32; exp(±640) is a normal fp64 number
CENTRE = math.exp(-EXPONENT_RANGE / 2)
TILES_PER_SEGMENT = 32  # chunks × batch × heads at once: enough for batched products, few enough for the cache
TILES_PER_SEGMENT_GPU = 1024
SHORTEST_CHUNKED = 4  # below this many tokens the recurrence itself is faster


def decayed_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor | None = None,
    *,
    decay_axis: str = "key",
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
    sequential: bool = False,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with decay, chunk-parallel: S_t = Diag(a_t) S_{t-1} + k_t v_tᵀ, o_t = scale · q_tᵀ S_t.

    Args:
        query, key: [B, H, T, K], any strides, T ≥ 1.
        value: [B, H, T, V].
        log_decay: log a_t ≤ 0. None (nothing is forgotten), [H] (constant, one per head), [B, H, T] (scalar), or a
            vector, [B, H, T, K] or [B, H, T, V] as `decay_axis` says. −inf is allowed and resets. A vector decay is
            clamped at −40 (which keeps 4e-18 of the state); steps at the floor receive no gradient.
        decay_axis: "key" (rows of the state decay) or "value" (its columns); only read for vector decays.
        scale: factor of the output.
        initial_state: [B, H, K, V], zeros if None.
        output_final_state: return S_T as well.
        chunk_size: tokens computed in parallel; at most 32 are for vector decays.
        sequential: compute token by token (`recurrent_decayed_scan`), which is twice differentiable.
        implementation: "chunked" (PyTorch), "triton" (kernels, for tensors on a GPU; a decay of −80 or less a step
            forgets all there), or None: what the model around the call was asked for, see `backend.py`.

    Returns:
        The output [B, H, T, V] in query's dtype and, if asked for, the final state [B, H, K, V] in at least fp32
        (otherwise None). Half-precision inputs are computed in fp32, fp64 in fp64. An output depends, bit for bit, on
        no later token. Gradients reach every tensor argument; the chunked form is once differentiable.

    Raises:
        ValueError: shapes do not fit each other, or an option is out of range.

    Sources: GLA (arXiv 2312.06635, section 4) for vector decays, RetNet (arXiv 2307.08621, section 2.3) for constants.
    """
    _check(query, key, value, log_decay, decay_axis, initial_state)
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    if not sequential and use_triton(implementation, query, key, value, log_decay, initial_state):
        from .triton.decayed_scan import triton_decayed_scan

        output, final_state = triton_decayed_scan(
            query,
            key,
            value,
            log_decay,
            decay_axis=decay_axis,
            scale=scale,
            initial_state=initial_state,
            chunk_size=chunk_size,
        )
        return output, final_state if output_final_state else None
    if sequential or query.shape[2] < SHORTEST_CHUNKED:
        return recurrent_decayed_scan(
            query,
            key,
            value,
            log_decay,
            decay_axis=decay_axis,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
        )
    chunked = _traced if exporting() else _chunked
    output, final_state = chunked(query, key, value, log_decay, initial_state, decay_axis, scale, chunk_size)
    return output, final_state if output_final_state else None


@full_precision
def recurrent_decayed_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor | None = None,
    *,
    decay_axis: str = "key",
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`decayed_scan` token by token in differentiable PyTorch; same arguments, shapes, dtypes and errors."""
    _check(query, key, value, log_decay, decay_axis, initial_state)
    dtype = at_least_fp32(query).dtype
    q, k, v = query.to(dtype) * scale, key.to(dtype), value.to(dtype)
    B, H, T, K = q.shape
    log_a = q.new_zeros(H) if log_decay is None else log_decay.to(dtype)
    if log_a.ndim == 1:
        log_a = log_a[:, None].expand(B, H, T)
    a = decay_exp(log_a)
    a = a[..., None, None] if a.ndim == 3 else a[..., :, None] if decay_axis == "key" else a[..., None, :]
    S = q.new_zeros(B, H, K, v.shape[-1]) if initial_state is None else initial_state.to(dtype)
    outputs = []
    # unbind, because the backward of an index fills a tensor of length T at every step
    for q_t, k_t, v_t, a_t in zip(q.unbind(2), k.unbind(2), v.unbind(2), a.unbind(2)):
        S = a_t * S + k_t[..., :, None] * v_t[..., None, :]
        outputs.append((q_t[..., None, :] @ S)[..., 0, :])
    return torch.stack(outputs, dim=2).to(query.dtype), S if output_final_state else None


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, decay_axis: str, initial_state: Tensor | None) -> None:
    if q.ndim != 4 or k.shape != q.shape or v.ndim != 4 or v.shape[:3] != q.shape[:3] or q.shape[2] < 1:
        raise ValueError(
            "query and key must be [B, H, T, K] and value [B, H, T, V] with T ≥ 1; "
            f"got {list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        )
    if decay_axis not in ("key", "value"):
        raise ValueError(f'decay_axis must be "key" or "value", got {decay_axis!r}')
    B, H, T, K = q.shape
    V = v.shape[-1]
    vector = (B, H, T, K if decay_axis == "key" else V)
    shapes = {1: (H,), 3: (B, H, T), 4: vector}  # by dimensions: a traced graph would note that B is not H
    if g is not None and g.shape != shapes.get(g.ndim):
        raise ValueError(
            f"log_decay must be None or of shape {[H]}, {[B, H, T]} or {list(vector)} "
            f'(decay_axis="{decay_axis}"); got {list(g.shape)}'
        )
    if initial_state is not None and initial_state.shape != (B, H, K, V):
        raise ValueError(f"initial_state must be [B, H, K, V] = {[B, H, K, V]}; got {list(initial_state.shape)}")


class _DecayedScan(Core):
    tensors = "query key value log_decay? initial_state?"
    scalars = "str decay_axis, float scale, SymInt chunk_size"

    @staticmethod
    def outline(*args):
        query, _, value, log_decay, _, decay_axis, _, chunk_size = args
        (B, H, T, K), V = query.shape, value.shape[-1]
        kind, C, most = _plan(query, log_decay, decay_axis, chunk_size)
        dtype, shape = at_least_fp32(query).dtype, (V, K) if kind == "value" else (K, V)
        starts = query.new_empty(num_segments(B * H, T, C, most), B * H, *shape, dtype=dtype)
        return torch.empty_like(value, dtype=query.dtype), query.new_empty(B, H, K, V, dtype=dtype), starts

    @staticmethod
    def remember(ctx, *scalars):
        ctx.decay_axis, ctx.scale, ctx.chunk_size = scalars

    @staticmethod
    @full_precision
    def forward(ctx, query, key, value, log_decay, initial_state, decay_axis, scale, chunk_size):
        B, H, T, K = query.shape
        V = value.shape[-1]
        kind, C, most = _plan(query, log_decay, decay_axis, chunk_size)
        parts = segments(B * H, T, C, most)
        core, S = CORES[kind], _first_state(query, value, initial_state, kind)

        output = torch.empty_like(value, dtype=query.dtype)  # value's strides: callers transpose back for free
        starts = S.new_empty(len(parts), *S.shape)
        for n, part in enumerate(parts):
            starts[n] = S
            o, S = core(*_load_all(query, key, value, log_decay, part, kind), S)
            store(output, part, o.mul_(scale))
        ctx.save_for_backward(query, key, value, log_decay, initial_state, starts)
        ctx.set_materialize_grads(False)
        _DecayedScan.remember(ctx, decay_axis, scale, chunk_size)
        # a copy, as autograd forbids in-place changes of an output that is a view
        return output, (S.mT if kind == "value" else S).reshape(B, H, K, V).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    @full_precision
    def backward(ctx, d_output, d_final_state):
        query, key, value, log_decay, initial_state, starts = ctx.saved_tensors
        B, H, T, K = query.shape
        V = value.shape[-1]
        kind, C, most = _plan(query, log_decay, ctx.decay_axis, ctx.chunk_size)
        dtype, parts = starts.dtype, segments(B * H, T, C, most)
        d_output = torch.zeros_like(value) if d_output is None else d_output
        dS = torch.zeros_like(starts[0]) if d_final_state is None else _inner_state(d_final_state, kind)
        d_query, d_key, d_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        with_decay = ctx.needs_input_grad[3]
        d_decay = at_least_fp32(torch.zeros_like(log_decay)) if with_decay else None

        for part, S in zip(reversed(parts), reversed(starts.unbind())):
            q, k, v, g = _load_all(query, key, value, log_decay, part, kind)
            do = ctx.scale * load(d_output, part, torch.float64 if kind == "value" else dtype)
            if kind == "scalar":
                dq, dk, dv, dg, dS = _scalar_backward(q, k, v, g, S, do, dS, with_decay)
            elif kind == "key":
                dq, dk, _, dv, dg, dS = _vector_backward(q, k, do, v, g, S, dS)
            else:
                _, dv, dq, dk, dg, dS = _vector_backward(do, v, q, k, g, S, dS)
            for whole, chunks in ((d_query, dq), (d_key, dk), (d_value, dv)):
                store(whole, part, chunks)
            if d_decay is not None and dg is not None:
                if d_decay.ndim == 1:
                    d_decay += dg.sum((0, 2)).view(B, H).sum(0)
                else:
                    store(d_decay, part, dg if dg.ndim == 4 else dg.unsqueeze(-1))
        d_initial_state = None
        if ctx.needs_input_grad[4]:
            d_initial_state = (dS.mT if kind == "value" else dS).reshape(B, H, K, V).to(initial_state.dtype)
        if d_decay is not None:
            d_decay = d_decay.to(log_decay.dtype)
        return d_query, d_key, d_value, d_decay, d_initial_state, None, None, None


_chunked = operator("decayed_scan", _DecayedScan)


def _plan(query: Tensor, log_decay: Tensor | None, decay_axis: str, chunk_size: int) -> tuple[str, int, int]:
    """Which decay ("scalar", "key" or "value"), tokens a chunk, and tokens times heads a segment."""
    kind, C = _kind(log_decay, decay_axis, chunk_size)
    tiles = TILES_PER_SEGMENT if query.device.type == "cpu" else TILES_PER_SEGMENT_GPU
    return kind, C, tiles * C


@full_precision
def _traced(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    decay_axis: str,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """The chunked form as operations a traced graph can hold; the number of tokens is known."""
    (B, H, T, K), V = query.shape, value.shape[-1]
    kind, C = _kind(log_decay, decay_axis, chunk_size)
    S, outputs = _first_state(query, value, initial_state, kind), []
    for part in segments(1, T, C, C):  # one chunk each
        o, S = CORES[kind](*_load_all(query, key, value, log_decay, part, kind), S)
        outputs.append(o[0])
    output = scale * torch.cat(outputs, dim=1).view(B, H, T, V)
    return output.to(query.dtype), (S.mT if kind == "value" else S).reshape(B, H, K, V)


def _kind(log_decay: Tensor | None, decay_axis: str, chunk_size: int) -> tuple[str, int]:
    """ "scalar", "key" or "value", and the chunk length."""
    if log_decay is not None and log_decay.ndim == 4:
        return decay_axis, min(chunk_size, LONGEST_VECTOR_CHUNK)
    return "scalar", chunk_size


def _first_state(query: Tensor, value: Tensor, initial_state: Tensor | None, kind: str) -> Tensor:
    (B, H, _, K), V = query.shape, value.shape[-1]
    dtype = at_least_fp32(query).dtype
    if initial_state is None:
        initial_state = torch.zeros(B, H, K, V, dtype=dtype, device=query.device)
    return _inner_state(initial_state.to(dtype), kind)


def _inner_state(S: Tensor, kind: str) -> Tensor:
    """[B, H, K, V] -> [B·H, K, V], or [B·H, V, K] for kind "value": the decaying axis comes first."""
    S = S.flatten(0, 1)
    return S.mT.contiguous() if kind == "value" else S


def _load_all(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor | None, part: Segment, kind: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and log decays of a segment; what meets exponentials of vector decays in fp64."""
    dtype = at_least_fp32(query).dtype
    q, k = (load(x, part, torch.float64 if kind == "key" else dtype) for x in (query, key))
    v = load(value, part, torch.float64 if kind == "value" else dtype)
    return q, k, v, _load_decay(log_decay, part, q)


def _load_decay(log_decay: Tensor | None, part: Segment, q: Tensor) -> Tensor:
    """[N, B·H, C, …] in fp64, without a last axis if it is a scalar; [1, B·H, C] for a constant decay."""
    if log_decay is None:
        return torch.zeros(1, q.shape[1], part.size, dtype=torch.float64, device=q.device)
    if log_decay.ndim == 1:
        return log_decay.double().repeat(q.shape[1] // len(log_decay))[None, :, None].expand(-1, -1, part.size)
    g = load(log_decay, part, torch.float64)
    return g if log_decay.ndim == 4 else g[..., 0]


def _run(decay: Tensor, writes: Tensor, S: Tensor, reverse: bool = False) -> Tensor:
    """S_{n+1} = decay_n S_n + writes_n for all n, [N + 1, B·H, …]; `reverse` runs from S_N = `S` down to S_0."""
    N = writes.shape[0]
    if exporting():  # one chunk, and nothing in place
        return torch.stack([S, torch.addcmul(writes[0], decay[0], S)])
    states = writes.new_empty(N + 1, *S.shape)
    states[N if reverse else 0] = flush_tiny(S)
    decays = decay.expand(N, *decay.shape[1:]).unbind()
    for n in range(N - 1, -1, -1) if reverse else range(N):
        source, target = (n + 1, n) if reverse else (n, n + 1)
        torch.addcmul(writes[n], decays[n], states[source], out=states[target])
    return states


# Scalar and constant decays: the decay between two tokens is one number, so a C×C matrix of them multiplies the scores.


def _scalar_factors(g: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """exp(G_t − G_i) for i ≤ t [N, B·H, C, C], exp(G_t), exp(G_C − G_t) [N, B·H, C, 1], exp(G_C) [N, B·H, 1, 1]."""
    # fp64: after a burst of strong decays G is large, and small differences of it must still be exact
    G = g.clamp_min(SCALAR_FLOOR).cumsum(-1)[..., None]
    end = G[..., -1:, :]
    between = decay_exp((G - G.mT).to(dtype).tril_()).tril_()  # first, as exp is slow where it overflows
    return between, decay_exp(G.to(dtype)), decay_exp((end - G).to(dtype)), decay_exp(end.to(dtype))


def _scalar_forward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    between, since_start, to_end, whole = _scalar_factors(g, q.dtype)
    states = _run(whole, (k * to_end).mT @ v, S)
    P = (q @ k.mT).mul_(between)
    return add_product((q * since_start) @ states[:-1], P, v), states[-1]


def _scalar_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, S: Tensor, do: Tensor, dS: Tensor, with_decay: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Gradients of q, k, v, g (summed over chunks if it is constant) and of the state before the chunks."""
    between, since_start, to_end, whole = _scalar_factors(g, q.dtype)
    kd = k * to_end
    S = _run(whole, kd.mT @ v, S)[:-1]
    dS = _run(whole, (q * since_start).mT @ do, dS, reverse=True)
    dS, dS_end = dS[0], dS[1:]
    P = (q @ k.mT).mul_(between)
    dP = do @ v.mT
    dq = (do @ S.mT).mul_(since_start)
    dk = (v @ dS_end.mT).mul_(to_end)
    dv = add_product(kd @ dS_end, P.mT, do)
    dg = None
    if with_decay:
        # g_s acts on all pairs i < s ≤ t, on reads of S at t ≥ s, on writes to the end at i < s, and on S itself.
        # Each is summed as such: differences of larger sums would lose the small gradients of strong decays.
        pairs, reads, writes = dP * P, (q * dq).sum(-1), (k * dk).sum(-1)
        kept = (S * dS_end).sum((-2, -1))[..., None] * whole[..., 0]
        if g.shape[0] == 1:
            pairs, reads, writes, kept = (x.sum(0, keepdim=True) for x in (pairs, reads, writes, kept))
        from_s = pairs.new_ones(g.shape[-1], g.shape[-1]).triu_()
        dg = (from_s @ pairs).tril_(-1).sum(-1) + (from_s @ reads[..., None])[..., 0]
        dg += (writes[..., None, :] @ from_s.triu(1))[..., 0, :] + kept
        dg = dg.masked_fill(g < SCALAR_FLOOR, 0.0)
    dA = dP.mul_(between)
    return add_product(dq, dA, k), add_product(dk, dA.mT, q), dv, dg, dS


# Vector decays. With x, y the pair of inputs along the decaying axis and u, w the other pair, the loss of a chunk is
#
#     Σ_{i≤t} (X_t · Y_i) (u_t · w_i) + …,     X_t = exp(G_t) x_t,     Y_i = exp(−G_i) y_i,
#
# with (x, y, u, w) = (q, k, do, v) if the decay is along the keys and (do, v, q, k) if it is along the values. It is
# symmetric: an output is the gradient of the loss with respect to `do`, so one set of formulas serves both axes.
#
# exp(−G) overflows fp32, so x, y, X and Y are fp64. X and Y carry the constant factors exp(±EXPONENT_RANGE / 2), which
# keep them in fp64's range at any decay without looking at later tokens. What X·Y gives above the diagonal may be
# infinite; `tril` selects, it does not multiply.


def _vector_factors(g: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """exp(G) / CENTRE [N, B·H, C, …] and its last row, both fp64, and the decay of a whole chunk [N, B·H, …, 1]."""
    G = g.clamp_min(-EXPONENT_RANGE / g.shape[-2]).cumsum(-2)
    E = G.add_(EXPONENT_RANGE / 2).exp_()
    end = E[..., -1:, :]
    return E, end, flush_tiny(end * CENTRE).to(dtype).mT


def _key_forward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    E, end, whole = _vector_factors(g, v.dtype)
    X, Y = q * E, k / E
    P = flush_tiny(X @ Y.mT).to(v.dtype).tril_()
    states = _run(whole, flush_tiny(Y.mul_(end)).to(v.dtype).mT @ v, S)
    Xg = flush_tiny(X.mul_(CENTRE)).to(v.dtype)
    return add_product(Xg @ states[:-1], P, v), states[-1]


def _value_forward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    E, end, whole = _vector_factors(g, q.dtype)
    Y = v / E
    R = (q @ k.mT).tril_().double()
    states = _run(whole, flush_tiny(Y * end).to(q.dtype).mT @ k, S)
    return add_product((q @ states[:-1].mT).double(), R, Y, beta=CENTRE).mul_(E), states[-1]


CORES = {"scalar": _scalar_forward, "key": _key_forward, "value": _value_forward}


def _vector_backward(
    x: Tensor, y: Tensor, u: Tensor, w: Tensor, g: Tensor, S: Tensor, dS: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, y, u, w, g and of the state before the chunks; S and dS are [B·H, width of x, width of u]."""
    dtype = u.dtype
    E, end, whole = _vector_factors(g, dtype)
    X, Y = x * E, y / E
    Xg, Yd = flush_tiny(X * CENTRE).to(dtype), flush_tiny(Y * end).to(dtype)
    S = _run(whole, Yd.mT @ w, S)[:-1]
    dS = _run(whole, Xg.mT @ u, dS, reverse=True)
    dS, dS_end = dS[0], dS[1:]
    P = flush_tiny(X @ Y.mT).to(dtype).tril_()
    R = (u @ w.mT).tril_().double()
    du = add_product(Xg @ S, P, w)
    dw = add_product(Yd @ dS_end, P.mT, u)
    dx = add_product((u @ S.mT).double(), R, Y, beta=CENTRE).mul_(E)
    dy = (w @ dS_end.mT).double().mul_(end)
    kept = (Y * dy).sum(-2) + (whole * (S * dS_end).sum(-1, keepdim=True))[..., 0]
    dy = add_product(dy, R.mT, X).div_(E)
    # token t raises G_t as a reader and lowers it as a writer; in fp64, as under strong decay nearly all of it cancels
    dG = torch.addcmul(x * dx, y, dy, value=-1)
    dG[..., -1, :] += kept
    dg = dG.new_ones(g.shape[-2], g.shape[-2]).triu_() @ dG  # the sum over t ≥ s
    dg.masked_fill_(g < -EXPONENT_RANGE / g.shape[-2], 0.0)
    return dx, dy, du, dw, dg, dS
