"""Forward kernels of the chunked linear recurrences: scores within chunks, states between them, outputs.

    S_t = (I − k_t e_tᵀ) Diag(exp g_t) S_{t-1} + k_t z_tᵀ,   o_t = scale · q_tᵀ S_t        (without e: the decayed scan)

Shapes: B·H rows, T tokens (row stride L ≥ T), N chunks of C tokens, K key width, V value width. With G the sum of the
log decays since a chunk's start, and S the state before it (the same algebra as in `delta_rule.py`):

    P_ti = Σ_d q_td k_id exp(G_td − G_id), i ≤ t      A_ti likewise from e, i < t      U = (I + A)⁻¹ (Z − E_S S), or Z
    O = Q_S S + P U                                   S_next = Diag(exp G_C) S + K_Sᵀ U

Only `states_kernel` is sequential, over chunks. All else is one program a chunk. Every exponent is a sum of log decays
of consecutive tokens, so it is ≤ 0 and nothing can overflow; no sum is formed as a difference, so nothing cancels.

The kernels are plain `@triton.jit` functions with explicit meta-parameters, callable in the interpreter; how many warps
a GPU gives them is decided in `chunk_scan.py`. Half-precision tiles are widened right after loading (products of bf16
tiles are wrong in the interpreter).
"""

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("attn_implementation='triton' needs the package triton: pip install triton") from error

FLOOR = tl.constexpr(-80.0)  # a step below it forgets everything; finite, so that -inf is allowed


@triton.jit
def load_tile(x, rows, columns, num_rows, num_columns):
    """A tile of a row-major matrix [num_rows, num_columns] in fp32; zeros outside."""
    inside = (rows[:, None] < num_rows) & (columns[None, :] < num_columns)
    return tl.load(x + rows[:, None] * num_columns + columns[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_tile(x, rows, columns, num_rows, num_columns, tile):
    """The reverse of `load_tile`."""
    inside = (rows[:, None] < num_rows) & (columns[None, :] < num_columns)
    tl.store(x + rows[:, None] * num_columns + columns[None, :], tile, mask=inside)


@triton.jit
def load_decays(g, start, columns, T, G, C: tl.constexpr):
    """Of a chunk: exp of the log decays summed since its start [C, G], after each token [C, G], and in all [G]."""
    c = tl.arange(0, C)
    log_a = tl.maximum(load_tile(g, start + c, columns, T, G), FLOOR)
    later = tl.maximum(load_tile(g, start + c + 1, columns, tl.minimum(T, start + C), G), FLOOR)
    return tl.exp(tl.cumsum(log_a, 0)), tl.exp(tl.cumsum(later, 0, reverse=True)), tl.exp(tl.sum(log_a, 0))


@triton.jit
def load_row(x, row, columns, num_rows, num_columns):
    """One row of such a matrix."""
    inside = (tl.zeros_like(columns) + row < num_rows) & (columns < num_columns)
    return tl.load(x + row * num_columns + columns, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def decay_between(g, start, T, C: tl.constexpr):
    """exp(G_t − G_i) [C, C] for i ≤ t of a decay per head, else 0; summed from i + 1 to t, not subtracted."""
    c = tl.arange(0, C)
    log_a = tl.maximum(tl.load(g + start + c, mask=start + c < T, other=0.0).to(tl.float32), FLOOR)
    between = tl.exp(tl.cumsum(tl.where(c[:, None] > c[None, :], log_a[:, None], 0.0), 0))
    return tl.where(c[:, None] >= c[None, :], between, 0.0)


@triton.jit
def scores_kernel(
    q, k, e, g, P, A, inverse, T, L, K,
    C: tl.constexpr, BK: tl.constexpr, PER_KEY: tl.constexpr, ERASE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """P, and with ERASE A and (I + A)⁻¹, [B·H, N, C, C]. Grid (N, B·H)."""
    n, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    q, k, e = q + row * L * K, k + row * L * K, e + row * L * K
    start, c = n * C, tl.arange(0, C)
    p = tl.zeros([C, C], tl.float32)
    a = tl.zeros([C, C], tl.float32)
    for k0 in range(0, K, BK):
        d = k0 + tl.arange(0, BK)
        if PER_KEY:
            # The keys as they have decayed by token t, y_i = k_i exp(G_t − G_i), from t to t + 1.
            y = tl.zeros([C, BK], tl.float32)
            for t in range(C):
                at_t = c[:, None] == t
                y = y * tl.exp(tl.maximum(load_row(g + row * L * K, start + t, d, T, K), FLOOR))[None, :]
                if ERASE:
                    e_t = load_row(e, start + t, d, T, K)
                    a += tl.where(at_t, tl.sum(y * e_t[None, :], 1)[None, :], 0.0)
                y = tl.where(at_t, load_row(k, start + t, d, T, K)[None, :], y)
                q_t = load_row(q, start + t, d, T, K)
                p += tl.where(at_t, tl.sum(y * q_t[None, :], 1)[None, :], 0.0)
        else:
            keys = tl.trans(load_tile(k, start + c, d, T, K))
            p += tl.dot(load_tile(q, start + c, d, T, K), keys, input_precision=PRECISION)
            if ERASE:
                a += tl.dot(load_tile(e, start + c, d, T, K), keys, input_precision=PRECISION)
    if not PER_KEY:
        between = decay_between(g + row * L, start, T, C)
        p *= between
        a *= tl.where(c[:, None] > c[None, :], between, 0.0)
    chunk = (row * tl.num_programs(0) + n) * C * C
    store_tile(P + chunk, c, c, C, C, p)
    if ERASE:
        store_tile(A + chunk, c, c, C, C, a)
        x = tl.where(c[:, None] == c[None, :], 1.0, 0.0)  # forward substitution: x_t = e_t − Σ_{s<t} a_ts x_s
        for t in range(1, C):
            a_t = tl.sum(tl.where(c[:, None] == t, a, 0.0), 0)
            x -= tl.where(c[:, None] == t, tl.sum(a_t[:, None] * x, 0)[None, :], 0.0)
        store_tile(inverse + chunk, c, c, C, C, x)


@triton.jit
def states_kernel(
    k, e, z, g, inverse, initial, states, final, U, T, L, N, K, V, G,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BG: tl.constexpr,
    ERASE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state before each chunk [B·H, N, K, V], after the last [B·H, K, V], and with ERASE U [B·H, L, V].

    Grid (B·H, blocks of K, blocks of V); with ERASE a block holds the whole of K.
    """
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BK + tl.arange(0, BK)
    v = tl.program_id(2) * BV + tl.arange(0, BV)
    h = tl.arange(0, BG)
    if BG > 1:
        h += tl.program_id(1) * BG
    k, e, g = k + row * L * K, e + row * L * K, g + row * L * G
    z, U = z + row * L * V, U + row * L * V
    c = tl.arange(0, C)
    S = load_tile(initial + row * K * V, d, v, K, V)
    for n in range(N):
        start, chunk = n * C, row * N + n
        store_tile(states + chunk * K * V, d, v, K, V, S)
        since_start, to_end, whole = load_decays(g, start, h, T, G, C)
        u = load_tile(z, start + c, v, T, V)
        if ERASE:
            e_S = load_tile(e, start + c, d, T, K) * since_start
            u -= tl.dot(e_S, S, input_precision=PRECISION)
            u = tl.dot(load_tile(inverse + chunk * C * C, c, c, C, C), u, input_precision=PRECISION)
            store_tile(U, start + c, v, T, V, u)
        k_S = load_tile(k, start + c, d, T, K) * to_end
        S = S * whole[:, None] + tl.dot(tl.trans(k_S), u, input_precision=PRECISION)
    store_tile(final + row * K * V, d, v, K, V, S)


@triton.jit
def output_kernel(
    q, U, g, P, states, output, scale, T, L, K, V, G,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BG: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O [B·H, L, V]. Grid (N, B·H, blocks of V)."""
    n, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start, chunk, c = n * C, row * tl.num_programs(0) + n, tl.arange(0, C)
    v = tl.program_id(2) * BV + tl.arange(0, BV)
    u = load_tile(U + row * L * V, start + c, v, T, V)
    o = tl.dot(load_tile(P + chunk * C * C, c, c, C, C), u, input_precision=PRECISION)
    for k0 in range(0, K, BK):
        d, h = k0 + tl.arange(0, BK), tl.arange(0, BG)
        if BG > 1:
            h += k0
        since_start, _, _ = load_decays(g + row * L * G, start, h, T, G, C)
        q_S = load_tile(q + row * L * K, start + c, d, T, K) * since_start
        S = load_tile(states + chunk * K * V, d, v, K, V)
        o += tl.dot(q_S, S, input_precision=PRECISION)
    store_tile(output + row * L * V, start + c, v, T, V, o * scale)
