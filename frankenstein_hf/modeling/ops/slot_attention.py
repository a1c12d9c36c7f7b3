"""Causal attention to complete slots of several tokens and to a token's own open ones, without a T×N tensor.

Shapes: R rows, H heads, T tokens, N slots, one every s tokens, K open slots of a token, W head width.

Tokens at the same place within their stretch of s tokens see the same triangle of slots: as s batches of N queries they
go through PyTorch's causal attention, at 1/s of the cost of T tokens. Its softmax is merged with the one over the open
slots, which each token sees as far as they have come; the backward pass of either part takes the merged denominator.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .numerics import at_least_fp32, untraced


def explicit_slot_attention(
    q: Tensor, slot_k: Tensor, slot_v: Tensor, open_k: Tensor, open_v: Tensor, newest: Tensor, dropout: float = 0.0
) -> Tensor:
    """The same with the scores materialised: the readable reference, for any number of tokens before.

    Args:
        q: [R, H, T, W].
        slot_k, slot_v: [R, H, N, W].
        open_k, open_v: [R, H, K, T, W]; the k-th open slot of a token is its k-th newest.
        newest: [R or 1, T] number of the newest slot each token belongs to; it sees those K and more before, and an
            open one if there is one of that number.
        dropout: Probability of dropping a weight.

    Returns:
        [R, H, T, W].
    """
    K, N = open_k.shape[2], slot_k.shape[2]
    scale = q.shape[-1] ** -0.5
    closed = torch.arange(N, device=q.device) <= newest[:, None, :, None] - K  # [R, 1, T, N]
    begun = newest[:, None, :, None] >= torch.arange(K, device=q.device)  # [R, 1, T, K]
    own = (q[:, :, None] * open_k).sum(-1).transpose(2, 3)
    scores = at_least_fp32(torch.cat([q @ slot_k.mT, own], dim=-1)) * scale
    scores = scores.masked_fill(~torch.cat([closed, begun], dim=-1), -torch.inf)
    weights = F.dropout(scores.softmax(-1), dropout, training=dropout > 0).to(q.dtype)
    to_slots, to_open = weights.split([N, K], dim=-1)
    return to_slots @ slot_v + (to_open.transpose(2, 3)[..., None] * open_v).sum(2)


@untraced
def slot_attention(q: Tensor, open_k: Tensor, open_v: Tensor, stride: int, merge_factor: int) -> Tensor:
    """Attention of the first T tokens of a row; token t's newest slot is ⌊t/s⌋.

    Complete slots are what their last token saw them as when they were open. On a GPU the scores are materialised.

    Args:
        q: [R, H, T, W].
        open_k, open_v: [R, H, K, T, W], as above, of any content where a token has no k-th newest slot.
        stride, merge_factor: Slot j covers the tokens s·j … s·j + m − 1; K = ⌈m/s⌉.

    Returns:
        [R, H, T, W].
    """
    if q.device.type != "cpu":
        newest = torch.arange(q.shape[2], device=q.device)[None] // stride
        slot_k, slot_v = (_complete(x, stride, merge_factor) for x in (open_k, open_v))
        return explicit_slot_attention(q, slot_k, slot_v, open_k, open_v, newest)
    return _SlotAttention.apply(q, open_k, open_v, stride, merge_factor)


def _complete(opened: Tensor, stride: int, merge_factor: int) -> Tensor:
    """[R, H, K, T, W] -> the complete slots, a view [R, H, n, W]."""
    return opened[:, :, -1, merge_factor - 1 :: stride]


class _SlotAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, open_k: Tensor, open_v: Tensor, stride: int, merge_factor: int) -> Tensor:
        (*_, T, W), K = q.shape, open_k.shape[2]
        scale, wide_q = W**-0.5, at_least_fp32(q)
        scores = torch.stack([(wide_q * k).sum(-1) for k in open_k.unbind(2)], dim=2).mul_(scale)  # [R, H, K, T]
        missing = torch.arange(T, device=q.device) // stride < torch.arange(K, device=q.device)[:, None]
        lse = torch.logsumexp(scores.masked_fill_(missing, -torch.inf), dim=2)
        output = torch.zeros_like(wide_q)
        if (inputs := _triangle(q, open_k, open_v, stride, merge_factor)) is not None:
            out, out_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*inputs, 0.0, True, scale=scale)
            read_lse = _in_order(out_lse[..., None], stride, K, T, -torch.inf)[..., 0]
            lse = torch.logaddexp(lse, read_lse)
            output = at_least_fp32(_in_order(out, stride, K, T, 0.0)) * (read_lse - lse).exp_()[..., None]
        weights = scores.sub_(lse[:, :, None]).exp_()
        for weight, v in zip(weights.unsqueeze(-1).unbind(2), open_v.unbind(2)):
            output.addcmul_(weight, at_least_fp32(v))
        output = output.to(q.dtype)
        ctx.save_for_backward(q, open_k, open_v, output, lse, weights)
        ctx.sizes = stride, merge_factor
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, open_k, open_v, output, lse, weights = ctx.saved_tensors
        (stride, merge_factor), K, scale = ctx.sizes, open_k.shape[2], q.shape[-1] ** -0.5
        dq, wide_grad = torch.zeros_like(at_least_fp32(q)), at_least_fp32(grad)
        dopen_k, dopen_v = torch.empty_like(open_k), torch.empty_like(open_v)
        inner = (wide_grad * output).sum(-1)  # Σ_j p_j dp_j of every query
        for k in range(K):
            weight = weights[:, :, k]
            dscore = ((wide_grad * open_v[:, :, k]).sum(-1) - inner).mul_(weight).mul_(scale)[..., None]
            torch.mul(weight[..., None].to(grad.dtype), grad, out=dopen_v[:, :, k])
            torch.mul(dscore.to(q.dtype), q, out=dopen_k[:, :, k])
            dq.addcmul_(dscore, at_least_fp32(open_k[:, :, k]))
        if (inputs := _triangle(q, open_k, open_v, stride, merge_factor)) is not None:
            out, dout = (_by_place(x, stride)[:, :, K:] for x in (output, grad))
            out_lse = _by_place(lse[..., None], stride)[:, :, K:, 0].transpose(1, 2).contiguous().transpose(1, 2)
            dq_s, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dout, *inputs, out, out_lse, 0.0, True, scale=scale
            )
            dq += _in_order(dq_s, stride, K, q.shape[2], 0.0)
            for whole, part in ((dopen_k, dk), (dopen_v, dv)):
                _complete(whole, stride, merge_factor)[:, :, : part.shape[2]] += part.unflatten(0, (-1, stride)).sum(1)
        return dq.to(q.dtype), dopen_k, dopen_v, None, None


def _triangle(
    q: Tensor, open_k: Tensor, open_v: Tensor, stride: int, merge_factor: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Queries, keys and values [R·s, H, N − K, W] of which the i-th query sees the first i + 1 keys, if there are."""
    N, K = -(-q.shape[2] // stride), open_k.shape[2]
    if N <= K:
        return None
    slots = (_complete(x, stride, merge_factor)[:, :, : N - K] for x in (open_k, open_v))
    k, v = (x[:, None].expand(-1, stride, -1, -1, -1).flatten(0, 1) for x in slots)
    return _by_place(q, stride)[:, :, K:], k, v


def _by_place(x: Tensor, stride: int) -> Tensor:
    """[R, H, T, C] -> [R·s, H, N, C], the tokens with one place in their stretch together; filled up with zeros."""
    x = F.pad(x, (0, 0, 0, -x.shape[2] % stride))
    return x.unflatten(2, (-1, stride)).permute(0, 3, 1, 2, 4).flatten(0, 1)


def _in_order(x: Tensor, stride: int, K: int, T: int, fill: float) -> Tensor:
    """[R·s, H, N − K, C], of all but the first K stretches, -> [R, H, T, C]."""
    x = F.pad(x, (0, 0, K, 0), value=fill)
    return x.unflatten(0, (-1, stride)).permute(0, 2, 3, 1, 4).flatten(2, 3)[:, :, :T]
