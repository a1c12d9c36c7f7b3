"""`mta`: attention whose scores are convolved over queries, keys and heads.

Shapes: R rows, L row length, S keys, H heads, G key/value heads, W head width; c_q, c_k, c_h sizes of the kernels;
        E = L + tail: a token's weights take the scores of a few queries before it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import initialization as init

from ...cache import States
from ...context import Rows
from ...extras import LayerExtras
from ...ops.numerics import at_least_fp32, full_precision, untraced
from ..base import last_real
from ..row_attention import RowAttention, remember

SCORES, QUERIES = 1 << 21, 64  # computed at a time, at most


@full_precision
def eager_mta(
    q: Tensor, k: Tensor, v: Tensor, θ: Sequence[Tensor | None], w: Tensor | None, i: Tensor, last: Tensor,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A = Mask₀(Conv_post(w · softmax(Mask_−∞(Conv_pre(Mask₀(q kᵀ / √W)))))) and A v.

    A convolution without a kernel is left out; the one over queries takes c_q − 1 rows from the front.

    Args:
        q: [R, H, E, W].
        k, v: [R, G, S, W].
        θ: Kernels [H, c_q, c_k] of logits and weights; the last row meets the own query, column ⌈c_k/2⌉ − 1 the own
            key.
        w: [H/c_h, c_h, c_h] mixes the heads of a group, or None.
        i: [R or 1, E] place of each query among the keys; negative: there is none.
        last: [R or 1, E] place of the last key it sees.
        dropout: Probability of dropping a weight.

    Returns:
        Output [R, H, L, W] and A [R, H, L, S].
    """
    dtype, (k, v) = q.dtype, (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    place = torch.arange(k.shape[2], device=k.device)
    seen = ((place <= last[..., None]) & (i[..., None] >= 0))[:, None]
    A = at_least_fp32(q * q.shape[-1] ** -0.5) @ at_least_fp32(k).mT
    if θ[0] is not None:
        A = convolved(A.masked_fill(~seen, 0.0), θ[0])
        seen = seen[:, :, θ[0].shape[1] - 1 :]
    A = A.masked_fill(~seen, torch.finfo(A.dtype).min).softmax(-1).masked_fill(~seen, 0.0)
    if w is not None:
        A = torch.einsum("gab,rgbls->rgals", w.to(A.dtype), A.unflatten(1, w.shape[:2])).flatten(1, 2)
    if θ[1] is not None:
        seen = seen[:, :, θ[1].shape[1] - 1 :]
        A = convolved(A, θ[1]).masked_fill(~seen, 0.0)
    A = F.dropout(A, dropout, training=dropout > 0)
    return (A @ at_least_fp32(v)).to(dtype), A.to(dtype)


def convolved(scores: Tensor, kernel: Tensor) -> Tensor:
    """Scores [R, H, E, S] with the kernel [H, c_q, c_k] of each head -> [R, H, E − c_q + 1, S]."""
    c_k = kernel.shape[2]
    before = (c_k + 1) // 2 - 1
    return _Convolution.apply(F.pad(scores, (before, c_k - 1 - before)), kernel.to(scores.dtype))


class _Convolution(torch.autograd.Function):
    """x [R, H, E, S + c_k − 1] and weight [H, c_q, c_k] -> [R, H, E − c_q + 1, S], tap by tap and in place.

    On a CPU many times as fast as PyTorch's depthwise convolution, whose backward pass also unfolds its input.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _correlate(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # the same operation once more and products of differentiable tensors: a second derivative comes for free
        x, weight = ctx.saved_tensors
        c_q, c_k = weight.shape[1:]
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = _Convolution.apply(F.pad(grad, (c_k - 1, c_k - 1, c_q - 1, c_q - 1)), weight.flip(1, 2))
        if ctx.needs_input_grad[1]:
            E, S = grad.shape[2:]
            taps = [(x[:, :, r : r + E, o : o + S] * grad).sum((0, 2, 3)) for r in range(c_q) for o in range(c_k)]
            dweight = torch.stack(taps, dim=-1).view_as(weight)
        return dx, dweight


def _correlate(x: Tensor, weight: Tensor) -> Tensor:
    (H, c_q, c_k), E, S = weight.shape, x.shape[2] - weight.shape[1] + 1, x.shape[3] - weight.shape[2] + 1
    out = x.new_zeros(*x.shape[:2], E, S)
    for r in range(c_q):
        for o in range(c_k):
            out.addcmul_(x[:, :, r : r + E, o : o + S], weight[:, r, o].view(H, 1, 1))
    return out


class MultiTokenAttention(RowAttention):
    """Attention decided by several queries and keys at once (arXiv 2504.00927).

    Small convolutions, the identity at first, run over the logits and over the weights of every head; groups of heads
    mix their weights; a group norm and a gate a head follow. Scores exist for a block of queries at a time, twice in
    training. Decoding keeps the last queries beside all keys and values. An encoder masks nothing.
    """

    pre_weight: nn.Parameter | None
    post_weight: nn.Parameter | None

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        p, H = self.params, self.num_heads
        for name, wanted in (("pre_weight", p.pre_softmax), ("post_weight", p.post_softmax)):
            kernel = nn.Parameter(torch.empty(H, p.query_kernel, p.key_kernel)) if wanted else None
            self.register_parameter(name, kernel)
        c_h = p.head_kernel
        self.head_weight = nn.Parameter(torch.empty(H // c_h, c_h, c_h)) if c_h > 1 else None
        if p.group_norm:
            self.norm_weight = nn.Parameter(torch.ones(H, self.head_dim))
            self.norm_bias = nn.Parameter(torch.zeros(H, self.head_dim))
            self.head_gate = nn.Parameter(torch.zeros(H))

    def init_parameters(self) -> None:
        """All kernels are the identity, all gates half open."""
        for kernel in (self.pre_weight, self.post_weight):
            if kernel is not None:
                identity = torch.zeros_like(kernel)
                identity[:, -1, (kernel.shape[2] + 1) // 2 - 1] = 1.0
                init.copy_(kernel, identity)
        if self.head_weight is not None:
            init.copy_(self.head_weight, torch.eye(self.params.head_kernel).expand_as(self.head_weight))
        if self.params.group_norm:
            init.ones_(self.norm_weight)
            init.zeros_(self.norm_bias)
            init.zeros_(self.head_gate)

    def mix(self, x: Tensor, rows: Rows, layer: Any) -> tuple[Tensor, LayerExtras | None]:
        query, new = self.project(x, rows)
        seen, inputs = remember(new, rows, layer), {"query": query}
        states = (None if layer is None else layer.tail.read(self.advance)) or self.empty_tail(query)
        output, weights = self.attend(torch.cat([states["query"].to(query.dtype), query], dim=1), seen, rows)
        if layer is not None and self.params.tail:
            context = rows.context
            layer.tail.write(self.advance(inputs, states, rows.lengths), inputs, context.keep)
        return self.gather(output, x), LayerExtras(weights)

    def empty_tail(self, query: Tensor) -> States:
        """Queries [R, tail, H, W] of nothing."""
        return {"query": query.new_zeros(len(query), self.params.tail, *query.shape[2:])}

    def advance(self, inputs: States, states: States, lengths: Tensor | None) -> States:
        """The last queries [R, tail, H, W]."""
        past = (states or self.empty_tail(inputs["query"]))["query"]
        return {"query": last_real(past.to(inputs["query"].dtype), inputs["query"], lengths)}

    def attend(self, query: Tensor, seen: States, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Queries [R, tail + L, H, W], the tail in front."""
        q, k, v = (x.transpose(1, 2) for x in (query, *seen.values()))
        tail, L = self.params.tail, rows.size
        places = torch.arange(-tail, L, device=q.device)[None]
        i = places if rows.num_past is None else places + rows.num_past[:, None]
        last = i if rows.is_causal else self.last_keys(rows)[:, :1].expand(-1, tail + L)
        kernels = (self.pre_weight, self.post_weight)
        if (self.is_eager(rows) and not self.training) or rows.context.backend == "eager":
            return eager_mta(q, k, v, kernels, self.head_weight, i, last, self.dropout)
        return self.by_blocks(q, k, v, i, last, rows), None

    @untraced
    def by_blocks(self, q: Tensor, k: Tensor, v: Tensor, i: Tensor, last: Tensor, rows: Rows) -> Tensor:
        """As many queries at a time as make `SCORES` scores; only the inputs of a block are kept for its gradient."""
        tail, outputs = self.params.tail, []
        size = min(rows.size, QUERIES, SCORES // (q.shape[0] * q.shape[1] * k.shape[2]) - tail)
        size = max(size, min(rows.size, 2 * tail + 8))
        for start in range(0, rows.size, size):
            part = slice(start, start + size + tail)
            stop = k.shape[2]
            if rows.is_causal:
                stop = min(stop, int(last[:, part].max()) + 1)
            arguments = (
                q[:, :, part], k[:, :, :stop], v[:, :, :stop], (self.pre_weight, self.post_weight), self.head_weight,
                i[:, part], last[:, part], self.dropout,
            )  # fmt: skip
            if torch.is_grad_enabled():
                outputs.append(checkpoint(_output, *arguments, use_reentrant=False))
            else:
                outputs.append(_output(*arguments))
        return torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]

    def gather(self, output: Tensor, x: Tensor) -> Tensor:
        if self.params.group_norm:
            shape = output.shape  # [R, H, L, W]
            grouped = at_least_fp32(output).transpose(1, 2).unflatten(2, (-1, self.params.head_kernel)).flatten(3)
            grouped = F.layer_norm(grouped, grouped.shape[-1:], eps=self.config.rms_norm_eps)
            normed = grouped.view(shape[0], shape[2], shape[1], shape[3]) * self.norm_weight + self.norm_bias
            output = (normed * self.head_gate.sigmoid()[:, None]).to(output.dtype).transpose(1, 2)
        return super().gather(output, x)


def _output(*arguments: Any) -> Tensor:
    return eager_mta(*arguments)[0]
