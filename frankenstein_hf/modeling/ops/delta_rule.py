"""The gated delta rule, token by token and chunk-parallel: one core for deltanet, gated_deltanet, kda, gated_deltanet2.

`delta_rule` takes what is erased and written; `gated_delta_rule` takes the gates of both and multiplies on the way.

Shapes: B batch, T time, H heads, K key width, V value width; inside, tensors are cut into N chunks of C tokens and laid
out [N, B·H, C, …], so that a loop over chunks reads contiguous slices.

Within a chunk let G_t be the sum of the log decays of its tokens up to and including t, and S the state before it.
Two rows of a token read the state: the query (after the write) and the erase vector (before it). Stacked, X = [Q; E]:

    [P; A]  = X̂ K̂ᵀ       entry (t, s) is Σ_d x_td k_sd exp(G_td − G_sd); P keeps s ≤ t, A keeps s < t
    X_S     = X ⊙ exp(G)                 what reads S
    K_S     = K ⊙ exp(G_C − G)           what is left of each write at the chunk's end
    U       = (I + A)⁻¹ (Z − E_S S)      what is really written: the value less what the state already holds
    O       = Q_S S + P U
    S_next  = Diag(exp G_C) S + K_Sᵀ U

Only the lines with S are sequential, and they run over chunks. Everything is computed in time segments of a few chunks;
the backward pass recomputes a segment from the state at its start, which keeps memory (and page faults) low.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .backend import use_triton
from .chunking import Segment, core_dtype, load, num_segments, segments, store
from .numerics import LOG_TINY, at_least_fp32, decay_exp, flush_tiny, full_precision
from .operators import Core, operator
from .tracing import exporting, unit_lower_inverse

SEGMENT_ROWS = 2048  # tokens times heads of a segment: its tensors stay in cache, its operations stay large
SHORT = 4  # up to here the token loop is cheaper than setting up chunks
CPU_CHUNK = 32  # smaller products are as efficient on a CPU, and work inside chunks grows with C
# Per-key decay: within a chunk, scores are formed as (x·exp G)(k·exp −G) in fp64, which holds exponents up to 708.
# The reference is the chunk's start: one that depends on later tokens would make earlier outputs depend on them.
PER_KEY_CHUNK = 16
PER_KEY_MIN_LOG_DECAY = -40.0  # 16 · 40 < 708; what exp(-40) leaves is beyond fp64 rounding


@full_precision
def recurrent_delta_rule(
    query: Tensor,
    key: Tensor,
    erase: Tensor,
    write: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`delta_rule`, token by token in plain PyTorch: the readable form, for decoding; twice differentiable."""
    _check_shapes(query, key, erase, write, log_decay, initial_state)
    dtype = query.dtype
    q, k, e, z = (at_least_fp32(x) for x in (query, key, erase, write))
    S = k.new_zeros(*k.shape[:2], k.shape[-1], z.shape[-1]) if initial_state is None else at_least_fp32(initial_state)
    if q.shape[2] == 1:
        output, S = _step(q, k, e, z, None if log_decay is None else at_least_fp32(log_decay), S)
        return (scale * output).to(dtype), S if output_final_state else None
    if log_decay is not None:
        a = at_least_fp32(log_decay if log_decay.dim() == 4 else log_decay.unsqueeze(-1)).exp()
    outputs = []
    for t in range(q.shape[2]):
        if log_decay is not None:
            S = a[:, :, t, :, None] * S
        u = z[:, :, t] - (e[:, :, t, :, None] * S).sum(2)  # no matrix product: autocast would round it
        S = S + k[:, :, t, :, None] * u[:, :, None, :]
        outputs.append((q[:, :, t, :, None] * S).sum(2))
    output = scale * torch.stack(outputs, dim=2)
    return output.to(dtype), S if output_final_state else None


def _step(q: Tensor, k: Tensor, e: Tensor, z: Tensor, g: Tensor | None, S: Tensor) -> tuple[Tensor, Tensor]:
    """One token [B, H, 1, …]: its output, not scaled, and the next state."""
    if g is not None:
        S = g.exp().mT * S if g.dim() == 4 else g.exp().unsqueeze(-1) * S
    shape, S = S.shape, S.flatten(0, 1)
    q, k, e, z = (x.flatten(0, 1) for x in (q, k, e, z))
    u = torch.baddbmm(z, e, S, alpha=-1)
    S = torch.baddbmm(S, k.mT, u)
    return (q @ S).unflatten(0, shape[:2]), S.view(shape)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    erase_gate: Tensor,
    write_gate: Tensor | None = None,
    log_decay: Tensor | None = None,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`delta_rule` with erase = erase_gate · key and write = write_gate · value, which are never stored.

    Args:
        query, key, value: [B, H, T, K], [B, H, T, K], [B, H, T, V].
        erase_gate: [B, H, T] or [B, H, T, K].
        write_gate: [B, H, T] or [B, H, T, V]; that of erasing, which must then be [B, H, T], if None.
        log_decay, scale, initial_state, output_final_state, chunk_size, implementation: As in `delta_rule`.

    Returns and raises:
        As `delta_rule`.
    """
    B, H, T, K = key.shape
    wide = {"erase_gate": (erase_gate, K), "write_gate": (write_gate, value.shape[-1])}
    for name, (gate, width) in wide.items():
        if gate is not None and gate.shape != {3: (B, H, T), 4: (B, H, T, width)}.get(gate.dim()):
            raise ValueError(f"{name} must be {(B, H, T)} or {(B, H, T, width)}, got {tuple(gate.shape)}")
    options: dict[str, Any] = {
        "scale": scale, "initial_state": initial_state, "output_final_state": output_final_state,
    }  # fmt: skip
    given = (query, key, value, erase_gate, log_decay, initial_state)
    if T <= SHORT or use_triton(implementation, *given):
        write = erase_gate if write_gate is None else write_gate
        erase, write = (y if y.dim() == 4 else y.unsqueeze(-1) for y in (erase_gate, write))
        return delta_rule(
            query, key, erase * key, write * value, log_decay,
            chunk_size=chunk_size, implementation=implementation, **options,
        )  # fmt: skip
    _check_shapes(query, key, key, value, log_decay, initial_state)
    gates = (erase_gate,) if write_gate is None else (erase_gate, write_gate)
    return _run_chunked((query, key, value, log_decay, *gates), chunk_size, **options)


def delta_rule(
    query: Tensor,
    key: Tensor,
    erase: Tensor,
    write: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
    sequential: bool = False,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule: S_t = (I − k_t e_tᵀ) Diag(exp g_t) S_{t-1} + k_t z_tᵀ,  o_t = scale · q_tᵀ S_t.

    With e = βk and z = βv this is Gated DeltaNet (arXiv 2412.06464; without decay DeltaNet, 2406.06484, whose chunk
    form is used here); with a decay per key channel it is Kimi Delta Attention (2510.26692).

    Args:
        query, key, erase: [B, H, T, K]. write (z): [B, H, T, V]. Any floating dtype and strides; T ≥ 1.
        log_decay (g): ≤ 0, [B, H, T] (one per head), [B, H, T, K] (one per key channel) or None (no decay).
            Per key channel, values below -40 count as -40 in the chunked form.
        initial_state: [B, H, K, V] or None (zeros).
        chunk_size: tokens a chunk at most; on a CPU 32 are the limit, with a decay per key channel 16.
        sequential: use `recurrent_delta_rule`, which is twice differentiable; short inputs use it anyway.
        implementation: "chunked" (PyTorch), "triton" (kernels, for tensors on a GPU; a decay of −80 or less a step
            forgets all there), or None: what the model around the call was asked for, see `backend.py`.

    Returns:
        Output [B, H, T, V] in query's dtype, and the state after the last token [B, H, K, V] in at least fp32 (None
        unless `output_final_state`). Half precision is computed in fp32, fp64 in fp64. Gradients reach every tensor.

    Raises:
        ValueError: shapes do not fit together.
    """
    _check_shapes(query, key, erase, write, log_decay, initial_state)
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    if not sequential and use_triton(implementation, query, key, erase, write, log_decay, initial_state):
        from .triton.delta_rule import triton_delta_rule

        output, state = triton_delta_rule(
            query, key, erase, write, log_decay, scale=scale, initial_state=initial_state, chunk_size=chunk_size
        )
        return output, state if output_final_state else None
    if sequential or key.shape[2] <= SHORT:
        return recurrent_delta_rule(
            query, key, erase, write, log_decay, scale=scale,
            initial_state=initial_state, output_final_state=output_final_state,
        )  # fmt: skip
    return _run_chunked(
        (query, key, write, log_decay, erase), chunk_size, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, gated=False,
    )  # fmt: skip


def _run_chunked(
    inputs: tuple[Tensor | None, ...],
    chunk_size: int,
    *,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    gated: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """`inputs` are query, key, value (or write), log decay, and the gates of erasing and writing (or erase)."""
    query, key, value, log_decay, *rest = inputs
    assert query is not None and key is not None and value is not None
    B, H, T, K = key.shape
    if log_decay is None:
        log_decay = key.new_zeros(1, 1, 1).expand(B, H, T)
    if log_decay.dim() == 4:
        chunk_size = min(chunk_size, PER_KEY_CHUNK)
    elif query.device.type == "cpu":
        chunk_size = min(chunk_size, CPU_CHUNK)
    if initial_state is None:
        initial_state = at_least_fp32(key.new_zeros(1)).expand(B, H, K, value.shape[-1])
    C = torch.sym_min(chunk_size, T)
    chunked = _traced if exporting() else _chunked
    erase, write = (*rest, None)[:2]
    output, state = chunked(query, key, value, log_decay, erase, write, initial_state, scale, C, gated)
    return output, state if output_final_state else None


def _check_shapes(q: Tensor, k: Tensor, e: Tensor, z: Tensor, g: Tensor | None, state: Tensor | None) -> None:
    if k.dim() != 4 or q.shape != k.shape or e.shape != k.shape:
        shapes = f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(e.shape)}"
        raise ValueError(f"query, key and erase must share one shape [B, H, T, K], got {shapes}")
    B, H, T, K = k.shape
    if T < 1 or z.dim() != 4 or z.shape[:3] != k.shape[:3]:
        raise ValueError(f"write must be [B, H, T, V] with T ≥ 1 beside key {tuple(k.shape)}, got {tuple(z.shape)}")
    if g is not None and g.shape != {3: (B, H, T), 4: (B, H, T, K)}.get(g.dim()):
        raise ValueError(f"log_decay must be {(B, H, T)} or {(B, H, T, K)}, got {tuple(g.shape)}")
    if state is not None and state.shape != (B, H, K, z.shape[-1]):
        raise ValueError(f"initial_state must be {(B, H, K, z.shape[-1])}, got {tuple(state.shape)}")


class _Segment(NamedTuple):
    """The parallel part of one time segment; every tensor is [N, B·H, …]."""

    x: Tensor  # X = [Q; E]: [2, C, K]
    k: Tensor  # [C, K]
    from_start: Tensor  # exp(G): [C, 1] or [C, K]
    to_end: Tensor  # exp(G_C − G): like G
    decay: Tensor  # exp(G_C), as a column: [1, 1] or [K, 1]
    x_S: Tensor  # [2, C, K]
    k_S: Tensor  # [C, K]
    scores: Tensor  # [P; A]: [2, C, C]
    inverse: Tensor  # (I + A)⁻¹: [C, C]
    factors: tuple[Tensor, ...]  # of the scores: exp(G_t − G_s), or in fp64 x·exp(G), k·exp(−G) and exp(G)


def _prepare(q: Tensor, k: Tensor, e: Tensor, g: Tensor) -> _Segment:
    """From [N, B·H, C, …] tensors; g is [C, K], or [C, 1] for one decay per head (with K = 1 the two are the same)."""
    C, per_key = k.shape[2], g.shape[-1] > 1
    x = torch.stack([q, e], dim=2)
    # fp64, because differences of long sums are exponentiated
    G = _upto(C, k.device) @ g.double().clamp_min(_min_log_decay(g))
    end = G[:, :, -1:]
    to_end, decay = decay_exp((end - G).to(k.dtype)), decay_exp(end.mT.to(k.dtype))
    hidden = _hidden(C, k.device)
    factors: tuple[Tensor, ...]
    if per_key:
        grow = G.exp()
        from_start = flush_tiny(grow.to(k.dtype))
        factors = (x.double() * grow.unsqueeze(2), k.double() / grow, grow)
        scores = (factors[0].flatten(2, 3) @ factors[1].mT).unflatten(2, (2, C))
        scores = flush_tiny(scores.masked_fill_(hidden, 0.0)).to(k.dtype)
    else:
        from_start = decay_exp(G.to(k.dtype))
        between = (G - G.mT).to(k.dtype).unsqueeze(2).masked_fill(hidden, 2 * LOG_TINY)
        factors = (decay_exp(between),)
        scores = (x.flatten(2, 3) @ k.mT).unflatten(2, (2, C)).mul_(factors[0])
    # solved in fp64: products of small entries would be subnormal numbers in fp32
    erased = scores[:, :, 1].double()
    if exporting():
        inverse = unit_lower_inverse(erased)
    else:
        identity = torch.eye(C, dtype=torch.float64, device=k.device).expand(*k.shape[:2], C, C)
        inverse = torch.linalg.solve_triangular(erased, identity, upper=False, unitriangular=True)
    inverse = flush_tiny(inverse).to(k.dtype)
    x_S = x * from_start.unsqueeze(2)
    return _Segment(x, k, from_start, to_end, decay, x_S, k * to_end, scores, inverse, factors)


def _scan(seg: _Segment, z: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """States before each chunk and after the last [N + 1, B·H, K, V], and what is written, U [N, B·H, C, V]."""
    states, u = S.new_empty(len(z) + 1, *S.shape), torch.empty_like(z)
    states[0] = S
    rest, after = torch.empty_like(z[0]), states.unbind()
    steps = (z, seg.x_S[:, :, 1], seg.inverse, seg.decay, seg.k_S.mT, u)
    for n, (z_n, e_n, inverse_n, decay_n, k_n, u_n) in enumerate(zip(*(x.unbind() for x in steps))):
        torch.baddbmm(z_n, e_n, after[n], alpha=-1, out=rest)
        torch.bmm(inverse_n, rest, out=u_n)
        torch.mul(after[n], decay_n, out=after[n + 1]).baddbmm_(k_n, u_n)
    return states, u


@full_precision
def _traced(*args: Any) -> tuple[Tensor, Tensor]:
    """The chunked form as operations a traced graph can hold; the number of tokens is known."""
    *given, S, scale, C, gated = args
    inputs = [x for x in given if x is not None]
    (B, H, T, V), outputs = inputs[2].shape, []
    dtype = core_dtype(*inputs, S)
    S = S.to(dtype).flatten(0, 1)
    for part in segments(1, T, C, C):  # one chunk each
        x = _load_segment(inputs, part, dtype, gated)
        seg = _prepare(x.q, x.k, x.e, x.g)
        u = seg.inverse @ (x.z - seg.x_S[:, :, 1] @ S)
        outputs.append((seg.x_S[:, :, 0] @ S + seg.scores[:, :, 0] @ u)[0])
        S = flush_tiny(seg.decay[0] * S + seg.k_S[0].mT @ u[0])
    output = scale * torch.cat(outputs, dim=1).view(B, H, T, V)
    return output.to(inputs[0].dtype), S.view(B, H, -1, V)


def _segment_backward(
    seg: _Segment, states: Tensor, u: Tensor, g: Tensor, do: Tensor, dS: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of q, k, e, z, g [N, B·H, …], and of the state at the segment's start."""
    (N, BH, C, V), K = u.shape, seg.k.shape[-1]
    du = seg.scores[:, :, 0].mT @ do
    dr = torch.empty_like(du)  # of R = Z − E_S S, so also dZ
    d_states = dS.new_empty(N + 1, BH, K, V)
    torch.matmul(seg.x_S[:, :, 0].mT, do, out=d_states[:N])
    d_states[N] = dS
    d_after = d_states.unbind()
    steps = [x.unbind() for x in (seg.k_S, seg.inverse.mT, seg.decay, seg.x_S[:, :, 1].mT, du, dr)]
    for n in reversed(range(N)):
        k_n, inverse_n, decay_n, e_n, du_n, dr_n = (x[n] for x in steps)
        torch.bmm(inverse_n, du_n.baddbmm_(k_n, d_after[n + 1]), out=dr_n)
        d_after[n].addcmul_(d_after[n + 1], decay_n).baddbmm_(e_n, dr_n, alpha=-1)

    rows = torch.cat([do, -dr], dim=2)  # what arrives at the rows of X_S S
    dx_S = (rows @ states[:N].mT).unflatten(2, (2, C))
    d_scores = (rows @ u.mT).unflatten(2, (2, C))
    dk_S = u @ d_states[1:].mT
    dx, dk = dx_S * seg.from_start.unsqueeze(2), dk_S * seg.to_end
    # G_t − G_s contains the decays after s up to t. So what such a pair contributes is a gradient of all decays up to
    # its reader t, less those up to its writer s; `_upto(C).T` then sums over later tokens.
    at_reader, at_writer = dx_S.mul_(seg.x_S).sum(2), dk_S.mul_(seg.k_S)
    d_decay = (d_states[1:] * states[:N]).sum(-1, keepdim=True).mul_(seg.decay)
    if len(seg.factors) == 1:
        at_reader, at_writer = at_reader.sum(-1, keepdim=True), at_writer.sum(-1, keepdim=True)
        d_decay = d_decay.sum(2, keepdim=True)
        pairs = d_scores * seg.scores
        pairs[:, :, 0].diagonal(dim1=-2, dim2=-1).zero_()  # a token's own write has not decayed: exactly no gradient
        at_reader += (pairs.sum((2, 4)) - pairs.sum((2, 3))).unsqueeze(-1)
        d_scores = d_scores.mul_(seg.factors[0]).flatten(2, 3)
        dx += (d_scores @ seg.k).view_as(dx)
        dk += d_scores.mT @ seg.x.flatten(2, 3)
    else:
        xg, kg, grow = seg.factors
        d_scores = d_scores.masked_fill_(_hidden(C, u.device), 0.0).flatten(2, 3).double()
        dxg, dkg = (d_scores @ kg).view_as(xg), d_scores.mT @ xg.flatten(2, 3)
        dx += (dxg * grow.unsqueeze(2)).to(dx.dtype)
        dk += (dkg / grow).to(dk.dtype)
        # stays in fp64 until a token's own write has cancelled
        at_reader += dxg.mul_(xg).sum(2).sub_(dkg.mul_(kg)).to(dx.dtype)
    upto = _upto(C, u.device).to(dx.dtype)
    dg = upto.mT @ at_reader + upto.tril(-1) @ at_writer + d_decay.mT
    dg = dg.masked_fill_(g < _min_log_decay(g), 0.0)
    return dx[:, :, 0], dk, dx[:, :, 1], dr, dg, flush_tiny(d_states[0])


def _upto(C: int, device: torch.device) -> Tensor:
    """[C, C] in fp64; the product with it sums over all tokens up to the row's own (faster than `cumsum`)."""
    return torch.ones(C, C, dtype=torch.float64, device=device).tril_()


def _hidden(C: int, device: torch.device) -> Tensor:
    """[2, C, C]: what scores of queries (all later tokens) and of erase vectors (also the own one) must not see."""
    ones = torch.ones(C, C, dtype=torch.bool, device=device)
    return torch.stack([ones.triu(1), ones.triu()])


def _min_log_decay(g: Tensor) -> float:
    return PER_KEY_MIN_LOG_DECAY if g.shape[-1] > 1 else LOG_TINY


class _Loaded(NamedTuple):
    """One segment of the inputs, [N, B·H, C, …]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    e: Tensor
    z: Tensor
    gates: tuple[Tensor, ...]  # of erasing, and of writing if that is another one


def _load_segment(inputs: list[Tensor], part: Segment, dtype: torch.dtype, gated: bool) -> _Loaded:
    q, k, v, g, *rest = (load(x, part, dtype) for x in inputs)
    if not gated:
        return _Loaded(q, k, v, g, rest[0], v, ())
    return _Loaded(q, k, v, g, rest[0] * k, rest[-1] * v, tuple(rest))


def _gate_gradients(x: _Loaded, dk: Tensor, de: Tensor, dz: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Gradients of k, of v, and of the gates, from those of k, e and z."""
    if not x.gates:
        return dk, dz, [de]

    def summed(gate: Tensor, product: Tensor) -> Tensor:
        return product.sum(-1, keepdim=True) if gate.shape[-1] == 1 else product

    erase, write = x.gates[0], x.gates[-1]
    d_gates = [summed(erase, de * x.k), summed(write, dz * x.v)]
    if len(x.gates) == 1:
        d_gates = [d_gates[0].add_(d_gates[1])]
    return dk.addcmul_(erase, de), dz.mul_(write), d_gates


class _ChunkDeltaRule(Core):
    tensors = "query key value log_decay erase write? state"
    scalars = "float scale, SymInt size, bool gated"

    @staticmethod
    def outline(*args: Any) -> tuple[Tensor, ...]:
        query, key, value, *_, S, _, C, _ = args
        (B, H, T, K), V, dtype = key.shape, value.shape[-1], core_dtype(*args[:-3])
        starts = S.new_empty(num_segments(B * H, T, C, SEGMENT_ROWS), B * H, K, V, dtype=dtype)
        return torch.empty_like(value, dtype=query.dtype), S.new_empty(B, H, K, V, dtype=dtype), starts

    @staticmethod
    def remember(ctx: Any, *scalars: Any) -> None:
        ctx.scale, ctx.C, ctx.gated = scalars

    @staticmethod
    @full_precision
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *given, S, scale, C, gated = args
        inputs = [x for x in given if x is not None]
        (B, H, T, K), V = inputs[1].shape, inputs[2].shape[-1]
        dtype = core_dtype(*inputs, S)
        S = S.to(dtype).reshape(B * H, K, V)
        output = torch.empty_like(inputs[2], dtype=inputs[0].dtype)  # its strides: callers transpose back for free
        starts = []
        for part in segments(B * H, T, C, SEGMENT_ROWS):
            starts.append(S)
            x = _load_segment(inputs, part, dtype, gated)
            seg = _prepare(x.q, x.k, x.e, x.g)
            states, u = _scan(seg, x.z, S)
            store(output, part, (seg.x_S[:, :, 0] @ states[:-1]).add_(seg.scores[:, :, 0] @ u).mul_(scale))
            S = flush_tiny(states[-1])
        ctx.save_for_backward(*args[:-3], torch.stack(starts))
        _ChunkDeltaRule.remember(ctx, scale, C, gated)
        ctx.set_materialize_grads(False)
        return output, S.view(B, H, K, V)

    @staticmethod
    @once_differentiable
    @full_precision
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        *given, _, starts = ctx.saved_tensors
        inputs = [x for x in given if x is not None]
        (B, H, T, K), V = inputs[1].shape, starts.shape[-1]
        d_output, d_final = grad_outputs
        if d_output is None:
            d_output = starts.new_zeros(1).expand(B, H, T, V)
        dS = torch.zeros_like(starts[0]) if d_final is None else d_final.to(starts.dtype).reshape(starts[0].shape)
        grads: list[Any] = [torch.empty_like(x) for x in inputs]
        for start, part in reversed(list(zip(starts, segments(B * H, T, ctx.C, SEGMENT_ROWS)))):
            x, do = _load_segment(inputs, part, starts.dtype, ctx.gated), load(d_output, part, starts.dtype)
            seg = _prepare(x.q, x.k, x.e, x.g)
            states, u = _scan(seg, x.z, start)
            dq, dk, de, dz, dg, dS = _segment_backward(seg, states, u, x.g, do * ctx.scale, dS)
            dk, dv, d_gates = _gate_gradients(x, dk, de, dz)
            for grad, chunks in zip(grads, (dq, dk, dv, dg, *d_gates)):
                store(grad, part, chunks)
        if len(grads) < len(given):
            grads.append(None)  # erasing and writing share a gate
        return *grads, dS.view(B, H, K, V), None, None, None


_chunked = operator("delta_rule", _ChunkDeltaRule)
