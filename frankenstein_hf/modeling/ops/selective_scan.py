"""The selective scan of Mamba (arXiv 2312.00752), h_t = exp(Δ_t A) h_{t-1} + B̄_t x_t and y_t = C_tᵀ h_t + D x_t.

Shapes: B batch, T time, E channels, N states a channel, S steps a segment. The state is [B, E, N] outside and [B, N, E]
inside, where time stands first: the broadcasts over channels then vectorise and each step touches one contiguous block.

`sequential=True` is the recurrence as written. The fast form does what has no recurrence for a whole segment at once,
leaves two in-place multiply-adds a step to the loop (one forward, one backward), and keeps for the backward pass only
the state at each segment's start. Segments are sized so that a segment's buffers stay in a core's cache.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .numerics import LOG_TINY, TINY, decay_exp, flush_tiny, full_precision, untraced
from .tracing import exporting


@full_precision
def selective_scan(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    discretization: str = "euler",
    exclude_own: bool = False,
    sequential: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Scan a row with input-dependent step sizes, writes and reads.

    Args:
        x, delta: [B, T, E]; delta is the step size Δ > 0, its softplus already taken.
        A: [E, N], negative.
        B, C: [B, T, N].
        D: [E] or None, the skip's factors.
        initial_state: [B, E, N], zeros when None.
        output_final_state: whether to return the state after the last token.
        discretization: "euler" for B̄ = Δ B (the released code) or "zoh" for B̄ = (exp(Δ A) - 1) / A · B (the paper).
        exclude_own: read exp(Δ_t A) h_{t-1} instead of h_t, i.e. leave out what token t itself writes.
        sequential: the plain token loop: slow, readable, differentiable twice.

    Returns:
        y [B, T, E] in the dtype of `x`, and the final state [B, E, N] in at least fp32 (all is computed there) or None.

    Raises:
        ValueError: if shapes do not fit or `discretization` is unknown.
    """
    _check(x, delta, A, B, C, D, initial_state, discretization)
    dtype = torch.float32
    for tensor in (x, delta, A, B, C):
        dtype = torch.promote_types(dtype, tensor.dtype)
    wide_x, delta, A, B, C = (tensor.to(dtype) for tensor in (x, delta, A, B, C))
    if initial_state is None:
        h = x.new_zeros(x.shape[0], *A.shape, dtype=dtype)
    else:
        h = initial_state.to(dtype)
    zoh = discretization == "zoh"
    if sequential or x.shape[1] == 1:
        y, h = _sequential_scan(wide_x, delta, A, B, C, h, zoh, exclude_own)
    elif exporting():
        y, h = _traced_scan(wide_x, delta, A, B, C, h, zoh, exclude_own)
    else:
        time_first = [tensor.transpose(0, 1).contiguous() for tensor in (wide_x, delta, B, C)]
        y, h = _scan(*time_first, A.t().contiguous(), h.mT.contiguous(), zoh, exclude_own)
        y, h = y.transpose(0, 1), h.mT
    if D is not None:
        y = y + D.to(dtype) * wide_x
    return y.to(x.dtype), h.contiguous() if output_final_state else None


def _sequential_scan(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, h: Tensor, zoh: bool, exclude_own: bool
) -> tuple[Tensor, Tensor]:
    ys = []
    for x_t, delta_t, B_t, C_t in zip(*(tensor[..., None].unbind(1) for tensor in (x, delta, B, C))):
        kept = decay_exp(delta_t * A) * h
        B_bar = torch.expm1(delta_t * A) / A * B_t.mT if zoh else delta_t * B_t.mT
        h = kept + B_bar * x_t
        ys.append((kept if exclude_own else h) @ C_t)
    return torch.cat(ys, dim=2).mT, h


def _traced_scan(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, h: Tensor, zoh: bool, exclude_own: bool
) -> tuple[Tensor, Tensor]:
    """The same in log₂ T rounds, in each of which every step takes in as many steps before it as it has already.

    A traced graph then holds a few operations instead of a few a token; the number of tokens is known.
    """
    x, delta, B, T = x[..., None], delta[..., None], B.unsqueeze(2), x.shape[1]
    decay = decay_exp(delta * A)  # [B, T, E, N] like all below
    writes = (torch.expm1(delta * A) / A if zoh else delta) * B * x
    kept, states = decay, writes
    for reach in (1 << r for r in range((T - 1).bit_length())):
        earlier = F.pad(states[:, :-reach], (0, 0, 0, 0, reach, 0))
        states = states + kept * earlier
        kept = flush_tiny(kept * F.pad(kept[:, :-reach], (0, 0, 0, 0, reach, 0), value=1.0))
    states = states + kept * h[:, None]
    read = decay * torch.cat([h[:, None], states[:, :-1]], dim=1) if exclude_own else states
    return (read @ C[..., None])[..., 0], states[:, -1]


class _SelectiveScan(torch.autograd.Function):
    """x, delta [T, B, E], B, C [T, B, N], A [N, E], h [B, N, E] -> y [T, B, E] and the last h."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor, B: Tensor, C: Tensor, A: Tensor, h: Tensor, zoh: bool, exclude_own: bool
    ) -> tuple[Tensor, Tensor]:
        (T, _, E), N = x.shape, A.shape[0]
        segment = _Segment(x, delta, B, A, zoh)
        starts = h.new_empty(-(-T // segment.size), *h.shape)
        y = torch.empty_like(x)
        for index, start in enumerate(starts):
            span = slice(index * segment.size, min((index + 1) * segment.size, T))
            start.copy_(h)
            h = flush_tiny(segment.run(span, h))
            read = segment.kept() if exclude_own else segment.states[1 : segment.n + 1]
            torch.bmm(C[span].view(-1, 1, N), read.view(-1, N, E), out=y[span].view(-1, 1, E))
        ctx.save_for_backward(x, delta, B, C, A, starts)
        ctx.zoh, ctx.exclude_own = zoh, exclude_own
        return y, h

    @staticmethod
    @once_differentiable
    @full_precision
    def backward(ctx: Any, dy: Tensor, dh: Tensor) -> tuple[Tensor | None, ...]:
        x, delta, B, C, A, starts = ctx.saved_tensors
        (T, _, E), N = x.shape, A.shape[0]
        dy = dy.contiguous()
        segment = _Segment(x, delta, B, A, ctx.zoh)
        dx, ddelta, dB, dC, dA = (torch.empty_like(tensor) for tensor in (x, delta, B, C, A))
        dA.zero_()
        grads = torch.empty_like(segment.decay)
        grad_steps = grads.unbind(0)
        for index in reversed(range(len(starts))):
            span = slice(index * segment.size, min((index + 1) * segment.size, T))
            segment.run(span, starts[index])
            n, decay, read = segment.n, segment.decay[: segment.n], segment.states[1 : segment.n + 1]
            x_NE, delta_NE, dy_NE = (tensor[span, :, None] for tensor in (x, delta, dy))  # [n, B, 1, E]
            B_NE, C_NE = B[span, ..., None], C[span, ..., None]  # [n, B, N, 1]

            # What reaches exp(Δ_t A) h_{t-1}: G_t = C_t dy_t + exp(Δ_{t+1} A) G_{t+1}.
            G = torch.mul(C_NE, dy_NE, out=grads[:n])
            g = grad_steps[n - 1].add_(dh)
            for t in range(n - 2, -1, -1):
                g = grad_steps[t].addcmul_(segment.decay_steps[t + 1], g)
            # A write is reached by the same, or, when its own read leaves it out, only by what comes later.
            dwrite = torch.cat([decay[1:] * G[1:], dh[None]]) if ctx.exclude_own else G
            dh = flush_tiny(segment.decay_steps[0] * g)

            dz_by_write = None
            if ctx.zoh:  # write = B x w, w = (exp(z) - 1) / A, z = Δ A
                w = segment.write_factor[:n]
                dw_over_A = dwrite * B_NE * x_NE / A
                dA -= (dw_over_A * w).sum((0, 1))
                dz_by_write = dw_over_A * decay
                dwrite = dwrite * w
            kept = segment.kept()  # over the decays
            if ctx.exclude_own:
                read = kept
            torch.sum(torch.mul(read, dy_NE, out=segment.states[1 : n + 1]), dim=-1, out=dC[span])
            dz = kept.mul_(G) if dz_by_write is None else torch.addcmul(dz_by_write, kept, G, out=kept)
            torch.bmm(B[span].view(-1, 1, N), dwrite.view(-1, N, E), out=dx[span].view(-1, 1, E))
            torch.sum(dwrite.mul_(x_NE if ctx.zoh else x_NE * delta_NE), dim=-1, out=dB[span])
            dA += torch.mul(dz, delta_NE, out=dwrite).sum((0, 1))
            torch.sum(dz.mul_(A), dim=2, out=ddelta[span])
        if not ctx.zoh:  # write = B (x Δ); so far dx is the gradient of the bracket
            ddelta.addcmul_(dx, x)
            dx.mul_(delta)
        return dx, ddelta, dB, dC, dA, dh, None, None


_scan = untraced(_SelectiveScan.apply)


class _Segment:
    """Buffers for S steps, filled by `run` for one span of the row at a time."""

    def __init__(self, x: Tensor, delta: Tensor, B: Tensor, A: Tensor, zoh: bool) -> None:
        T, batch, _ = x.shape
        step = (batch, *A.shape)
        # Buffers of 1 MB stay in cache and are large enough to hide the cost of launching an operation; with fewer than
        # 16 steps the saved states would outweigh the activations.
        self.size = min(T, max(16, min(64, 2**18 // (batch * A.numel()))))
        self.x, self.delta, self.B, self.A = x, delta, B, A
        self.decay = x.new_empty(self.size, *step)
        self.states = x.new_empty(self.size + 1, *step)  # h before the segment, then after each of its steps
        self.write_factor = torch.empty_like(self.decay) if zoh else x.new_empty(0)
        self.decay_steps, self.state_steps = self.decay.unbind(0), self.states.unbind(0)
        self.zoh = zoh
        # Ordinary gates never underflow, which one look decides. Nothing `decay_exp` would change passes as ordinary
        # (exp(-59) > TINY), so a later token's step size cannot alter earlier outputs through this switch.
        self.may_underflow = bool(delta.amax() * A.amin() < -59.0)
        self.n = 0

    def run(self, span: slice, h: Tensor) -> Tensor:
        """Fill `decay` and `states` for the steps of `span`, starting from h [B, N, E]; returns the last state."""
        self.n = n = span.stop - span.start
        x_NE, delta_NE = self.x[span, :, None], self.delta[span, :, None]
        decay, writes = self.decay[:n], self.states[1 : n + 1]
        torch.mul(delta_NE, self.A, out=decay)
        if self.zoh:
            factor = torch.expm1(decay, out=self.write_factor[:n]).div_(self.A)
            torch.mul(factor, x_NE, out=writes).mul_(self.B[span, ..., None])
        else:
            torch.mul(self.B[span, ..., None], x_NE * delta_NE, out=writes)
        if self.may_underflow:
            torch.threshold_(decay.clamp_min_(LOG_TINY).exp_(), TINY, 0.0)
        else:
            decay.exp_()
        self.state_steps[0].copy_(h)
        h = self.state_steps[0]
        for decay_t, state_t in zip(self.decay_steps[:n], self.state_steps[1:]):
            h = state_t.addcmul_(decay_t, h)
        return h

    def kept(self) -> Tensor:
        """exp(Δ_t A) h_{t-1} of every step, written over the decays."""
        return self.decay[: self.n].mul_(self.states[: self.n])


def _check(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
    discretization: str,
) -> None:
    if discretization not in ("euler", "zoh"):
        raise ValueError(f"selective_scan: discretization must be 'euler' or 'zoh', got {discretization!r}")
    if x.dim() != 3 or x.shape[1] < 1 or A.dim() != 2:
        raise ValueError(f"selective_scan wants x [B, T ≥ 1, E] and A [E, N]; got {list(x.shape)}, {list(A.shape)}")
    (batch, T, E), N = x.shape, A.shape[1]
    for name, tensor, shape in (
        ("delta", delta, (batch, T, E)),
        ("A", A, (E, N)),
        ("B", B, (batch, T, N)),
        ("C", C, (batch, T, N)),
        ("D", D, (E,)),
        ("initial_state", initial_state, (batch, E, N)),
    ):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"selective_scan: {name} must be {list(shape)}, got {list(tensor.shape)}")
