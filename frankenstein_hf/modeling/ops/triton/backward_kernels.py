"""Backward kernels of the chunked linear recurrences; shapes and letters as in `forward_kernels.py`.

`reverse_states_kernel` carries the gradient of the state from chunk to chunk, backwards. Everything else is computed by
one program a chunk from the state before it, the gradient of the state after it, and the gradients of the scores.

A log decay g_s acts on every pair i < s ≤ t, on reads of S at t ≥ s, on writes to the end at i < s, and on S itself.
"""

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("attn_implementation='triton' needs the package triton: pip install triton") from error

from .forward_kernels import FLOOR, decay_between, load_decays, load_row, load_tile, store_tile


@triton.jit
def reverse_states_kernel(
    q, k, e, g, P, inverse, d_output, d_final, d_states, d_initial, dZ, scale, T, L, N, K, V, G,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BG: tl.constexpr,
    ERASE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the state after each chunk [B·H, N, K, V], of the first state, and with ERASE of Z [B·H, L, V].

    Grid as for `states_kernel`.
    """
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BK + tl.arange(0, BK)
    v = tl.program_id(2) * BV + tl.arange(0, BV)
    h = tl.arange(0, BG)
    if BG > 1:
        h += tl.program_id(1) * BG
    q, k, e, g = q + row * L * K, k + row * L * K, e + row * L * K, g + row * L * G
    d_output, dZ = d_output + row * L * V, dZ + row * L * V
    c = tl.arange(0, C)
    dS = load_tile(d_final + row * K * V, d, v, K, V)
    for i in range(N):
        n = N - 1 - i
        start, chunk = n * C, row * N + n
        store_tile(d_states + chunk * K * V, d, v, K, V, dS)
        since_start, to_end, whole = load_decays(g, start, h, T, G, C)
        do = load_tile(d_output, start + c, v, T, V) * scale
        q_S = load_tile(q, start + c, d, T, K) * since_start
        before = dS * whole[:, None] + tl.dot(tl.trans(q_S), do, input_precision=PRECISION)
        if ERASE:
            k_S = load_tile(k, start + c, d, T, K) * to_end
            du = tl.dot(k_S, dS, input_precision=PRECISION)
            du += tl.dot(tl.trans(load_tile(P + chunk * C * C, c, c, C, C)), do, input_precision=PRECISION)
            dz = tl.dot(tl.trans(load_tile(inverse + chunk * C * C, c, c, C, C)), du, input_precision=PRECISION)
            store_tile(dZ, start + c, v, T, V, dz)
            e_S = load_tile(e, start + c, d, T, K) * since_start
            before -= tl.dot(tl.trans(e_S), dz, input_precision=PRECISION)
        dS = before
    store_tile(d_initial + row * K * V, d, v, K, V, dS)


@triton.jit
def value_gradients_kernel(
    k, g, P, d_output, d_states, dZ, scale, T, L, K, V, G,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BG: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of Z [B·H, L, V] without ERASE: Pᵀ dO + K_S dS. Grid (N, B·H, blocks of V)."""
    n, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start, chunk, c = n * C, row * tl.num_programs(0) + n, tl.arange(0, C)
    v = tl.program_id(2) * BV + tl.arange(0, BV)
    do = load_tile(d_output + row * L * V, start + c, v, T, V) * scale
    dz = tl.dot(tl.trans(load_tile(P + chunk * C * C, c, c, C, C)), do, input_precision=PRECISION)
    for k0 in range(0, K, BK):
        d, h = k0 + tl.arange(0, BK), tl.arange(0, BG)
        if BG > 1:
            h += k0
        _, to_end, _ = load_decays(g + row * L * G, start, h, T, G, C)
        k_S = load_tile(k + row * L * K, start + c, d, T, K) * to_end
        dS = load_tile(d_states + chunk * K * V, d, v, K, V)
        dz += tl.dot(k_S, dS, input_precision=PRECISION)
    store_tile(dZ + row * L * V, start + c, v, T, V, dz)


@triton.jit
def score_gradients_kernel(
    U, d_output, dR, dP, dA, scale, T, L, V,
    C: tl.constexpr, BV: tl.constexpr, ERASE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dP = dO Uᵀ and with ERASE dA = −dR Uᵀ, [B·H, N, C, C], where R = Z − E_S S. Grid (N, B·H)."""
    n, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start, c = n * C, tl.arange(0, C)
    dp = tl.zeros([C, C], tl.float32)
    da = tl.zeros([C, C], tl.float32)
    for v0 in range(0, V, BV):
        v = v0 + tl.arange(0, BV)
        u = tl.trans(load_tile(U + row * L * V, start + c, v, T, V))
        do = load_tile(d_output + row * L * V, start + c, v, T, V) * scale
        dp += tl.dot(do, u, input_precision=PRECISION)
        if ERASE:
            da -= tl.dot(load_tile(dR + row * L * V, start + c, v, T, V), u, input_precision=PRECISION)
    chunk = (row * tl.num_programs(0) + n) * C * C
    store_tile(dP + chunk, c, c, C, C, tl.where(c[:, None] >= c[None, :], dp, 0.0))
    if ERASE:
        store_tile(dA + chunk, c, c, C, C, tl.where(c[:, None] > c[None, :], da, 0.0))


@triton.jit
def key_gradients_kernel(
    q, k, e, U, g, P, A, dP, dA, d_output, dR, states, d_states, dq, dk, de, dg, scale, T, L, K, V, G,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BG: tl.constexpr,
    ERASE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of q, k, e [B·H, L, K] and of g, [B·H, L, K] or, of each block of K, [blocks, B·H, L].

    Grid (N, B·H, blocks of K).
    """
    n, row, block = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    start, chunk, c = n * C, row * tl.num_programs(0) + n, tl.arange(0, C)
    d, h = block * BK + tl.arange(0, BK), tl.arange(0, BG)
    if BG > 1:
        h += block * BK
    q, k, e, g = q + row * L * K, k + row * L * K, e + row * L * K, g + row * L * G
    dP, dA = dP + chunk * C * C, dA + chunk * C * C

    # what comes through the states
    dq_S = tl.zeros([C, BK], tl.float32)
    dk_S = tl.zeros([C, BK], tl.float32)
    de_S = tl.zeros([C, BK], tl.float32)
    kept = tl.zeros([BK], tl.float32)
    for v0 in range(0, V, BV):
        v = v0 + tl.arange(0, BV)
        S = load_tile(states + chunk * K * V, d, v, K, V)
        dS = load_tile(d_states + chunk * K * V, d, v, K, V)
        do = load_tile(d_output + row * L * V, start + c, v, T, V) * scale
        u = load_tile(U + row * L * V, start + c, v, T, V)
        dq_S += tl.dot(do, tl.trans(S), input_precision=PRECISION)
        dk_S += tl.dot(u, tl.trans(dS), input_precision=PRECISION)
        kept += tl.sum(S * dS, 1)
        if ERASE:
            dr = load_tile(dR + row * L * V, start + c, v, T, V)
            de_S -= tl.dot(dr, tl.trans(S), input_precision=PRECISION)
    since_start, to_end, whole = load_decays(g, start, h, T, G, C)
    q_c, k_c = load_tile(q, start + c, d, T, K), load_tile(k, start + c, d, T, K)
    dq_c, dk_c, de_c = dq_S * since_start, dk_S * to_end, de_S * since_start
    e_c = tl.zeros([C, BK], tl.float32)
    if ERASE:
        e_c = load_tile(e, start + c, d, T, K)
    writes = dk_c * k_c
    reads = dq_c * q_c + de_c * e_c

    # what comes through the scores
    if BG > 1:
        # Decayed keys y_i as in `scores_kernel`, later tokens only: a token's own write has not decayed.
        y = tl.zeros([C, BK], tl.float32)
        dq_P = tl.zeros([C, BK], tl.float32)
        de_A = tl.zeros([C, BK], tl.float32)
        for t in range(C):
            at_t = c[:, None] == t
            y = y * tl.exp(tl.maximum(load_row(g, start + t, d, T, K), FLOOR))[None, :]
            dp_t = load_row(dP, t, c, C, C)
            dq_P += tl.where(at_t, tl.sum(dp_t[:, None] * y, 0)[None, :], 0.0)
            if ERASE:
                da_t = load_row(dA, t, c, C, C)
                de_A += tl.where(at_t, tl.sum(da_t[:, None] * y, 0)[None, :], 0.0)
            y = tl.where(at_t, load_row(k, start + t, d, T, K)[None, :], y)
        # The mirror image: queries and erase vectors of later tokens as they reach back to token s.
        x_q = tl.zeros([C, BK], tl.float32)
        x_e = tl.zeros([C, BK], tl.float32)
        dk_P = tl.zeros([C, BK], tl.float32)
        for i in range(C):
            s = C - 1 - i
            at_s = c[:, None] == s
            dk_s = tl.sum(tl.load(dP + c * C + s)[:, None] * x_q, 0)
            if ERASE:
                dk_s += tl.sum(tl.load(dA + c * C + s)[:, None] * x_e, 0)
            dk_P += tl.where(at_s, dk_s[None, :], 0.0)
            a_s = tl.exp(tl.maximum(load_row(g, start + s, d, T, K), FLOOR))[None, :]
            x_q = tl.where(at_s, load_row(q, start + s, d, T, K)[None, :], x_q) * a_s
            if ERASE:
                x_e = tl.where(at_s, load_row(e, start + s, d, T, K)[None, :], x_e) * a_s
        reads += dq_P * q_c + de_A * e_c - dk_P * k_c
        own = tl.load(dP + c * (C + 1))[:, None]
        dq_c += dq_P + own * k_c
        dk_c += dk_P + own * q_c
        de_c += de_A
        earlier = tl.where(c[:, None] > c[None, :], 1.0, 0.0)
        dg_c = tl.cumsum(reads, 0, reverse=True) + tl.dot(earlier, writes, input_precision="ieee")
        dg_c += (kept * whole)[None, :]
    else:
        between = decay_between(g, start, T, C)
        dp = load_tile(dP, c, c, C, C)
        pairs = dp * load_tile(P + chunk * C * C, c, c, C, C)
        dp *= between
        dq_c += tl.dot(dp, k_c, input_precision=PRECISION)
        dk_c += tl.dot(tl.trans(dp), q_c, input_precision=PRECISION)
        if ERASE:
            da = load_tile(dA, c, c, C, C)
            pairs += da * load_tile(A + chunk * C * C, c, c, C, C)
            da *= between
            de_c += tl.dot(da, k_c, input_precision=PRECISION)
            dk_c += tl.dot(tl.trans(da), e_c, input_precision=PRECISION)
        written = tl.where(c[:, None] < c[None, :], tl.sum(writes, 1)[:, None], 0.0)
        dg_c = tl.cumsum(tl.sum(reads, 1), 0, reverse=True) + tl.sum(written, 0)
        if block == 0:  # the pairs are of all key channels
            pairs = tl.where(c[:, None] > c[None, :], pairs, 0.0)
            pairs = tl.where(c[:, None] > c[None, :], tl.cumsum(pairs, 0, reverse=True), 0.0)
            dg_c += tl.sum(pairs, 1)
        dg_c = dg_c[:, None] + tl.sum(kept, 0) * whole[None, :]
        dg += block * tl.num_programs(1) * L
    dg_c = tl.where(load_tile(g, start + c, h, T, G) < FLOOR, 0.0, dg_c)
    store_tile(dq + row * L * K, start + c, d, T, K, dq_c)
    store_tile(dk + row * L * K, start + c, d, T, K, dk_c)
    if ERASE:
        store_tile(de + row * L * K, start + c, d, T, K, de_c)
    store_tile(dg + row * L * G, start + c, h, T, G, dg_c)
