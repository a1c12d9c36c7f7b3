"""The decayed scan on Triton kernels; `ops/decayed_scan.py` describes its arguments.

A decay along the values is the kernels' decay along the keys with the roles exchanged: the loss

    Σ_{i≤t} (d_o_t · exp(G_t − G_i) v_i) (q_t · k_i) + …

is linear in d_o, so what the kernels call the gradient of the query is the output here, and their output is the
gradient of the query here; v stands for their key, k for their value, and states are transposed.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .chunk_scan import CHUNK, SHORT_CHUNK, ChunkScan, Problem, block_size, device_of, flat, flat_state, segments


@torch.compiler.disable  # launches kernels from inside an autograd function
def triton_decayed_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor | None,
    *,
    decay_axis: str,
    scale: float,
    initial_state: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, V] in the dtype of `query`, and the last state [B, H, K, V] in fp32."""
    B, H, T, K = query.shape
    V = value.shape[-1]
    if log_decay is None:
        log_decay = torch.zeros(H, device=query.device)
    if log_decay.dim() == 1:
        log_decay = log_decay[:, None].expand(B, H, T)
    vector = log_decay.dim() == 4
    log_decay = log_decay if vector else log_decay.unsqueeze(-1)
    C = block_size(min(chunk_size, T), SHORT_CHUNK if vector else CHUNK)
    q, k, v, g = (flat(x) for x in (query, key, value, log_decay))
    S = flat_state(initial_state, (B, H, K, V), query)
    if vector and decay_axis == "value":
        output, S = _ValueDecayScan.apply(q, k, v, g, S.mT.contiguous(), scale, C)
        S = S.mT
    else:
        output, S = ChunkScan.apply(q, k, v, None, g, S, scale, C)
    return output.view(B, H, T, V), S.reshape(B, H, K, V)


class _ValueDecayScan(torch.autograd.Function):
    """q, k [B·H, T, K], v, g [B·H, T, V], S [B·H, V, K] fp32 -> output [B·H, T, V] and the last S."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, S: Tensor, scale: float, C: int):
        output = torch.empty_like(v, dtype=q.dtype)
        unused = [torch.empty_like(x) for x in (v, k, g)]
        starts = []
        with device_of(q):
            for part in segments(S, q.shape[1], C):
                starts.append(S)
                problem = Problem(v, v, k, None, g, scale, C, part)  # there is no query yet
                states, S, _ = problem.states(S, S)
                d_scores = problem.score_gradients(problem.z, q[:, part], problem.z)
                grads = Problem(output, unused[0], unused[1], None, unused[2], scale, C, part)
                problem.key_gradients(d_scores, d_scores, problem.z, q[:, part], states, states, grads)
        ctx.save_for_backward(q, k, v, g, *starts)
        ctx.scale, ctx.C = scale, C
        ctx.set_materialize_grads(False)
        return output, S

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, g, *starts = ctx.saved_tensors
        d_output = torch.zeros_like(v) if d_output is None else d_output.contiguous()
        dS = torch.zeros_like(starts[0]) if d_final is None else d_final.contiguous()
        dq, dk, dv, dg, unused = (torch.empty_like(x) for x in (q, k, v, g, d_output))
        with device_of(q):
            for S, part in reversed(list(zip(starts, segments(starts[0], q.shape[1], ctx.C)))):
                problem = Problem(d_output, v, k, None, g, ctx.scale, ctx.C, part)
                P, _, _ = problem.scores()
                problem.output(P, problem.states(P, S)[0], problem.z, dq[:, part])
                grads = Problem(unused, dv, dk, None, dg, ctx.scale, ctx.C, part)
                dS = problem.gradients(S, q[:, part], dS, grads)
        return dq, dk, dv, dg, dS, None, None
