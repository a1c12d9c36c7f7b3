"""The gated delta rule on Triton kernels; `ops/delta_rule.py` describes its arguments."""

import torch
from torch import Tensor

from .chunk_scan import BLOCK, SHORT_CHUNK, ChunkScan, block_size, flat, flat_state


@torch.compiler.disable  # launches kernels from inside an autograd function
def triton_delta_rule(
    query: Tensor,
    key: Tensor,
    erase: Tensor,
    write: Tensor,
    log_decay: Tensor | None,
    *,
    scale: float,
    initial_state: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, V] in the dtype of `query`, and the last state [B, H, K, V] in fp32."""
    B, H, T, K = key.shape
    V = write.shape[-1]
    if log_decay is None:
        log_decay = torch.zeros(B, H, T, device=key.device)
    if log_decay.dim() == 3:
        log_decay = log_decay.unsqueeze(-1)
    # a program holds the whole of K, and its tiles must fit into shared memory
    C = block_size(min(chunk_size, T), 16 if K > BLOCK else SHORT_CHUNK)
    q, k, e, z, g = (flat(x) for x in (query, key, erase, write, log_decay))
    output, S = ChunkScan.apply(q, k, z, e, g, flat_state(initial_state, (B, H, K, V), key), scale, C)
    return output.view(B, H, T, V), S.view(B, H, K, V)
