"""Cutting [B, H, T, …] tensors into time segments of whole chunks, and putting results together again.

Shapes: B batch, H heads, T time, C chunk, N chunks of a segment.

Inside a core tensors are [N, B·H, C, …], chunk-first, so that a loop over chunks reads contiguous slices. The last
T mod C tokens are a segment of one shorter chunk: nothing is padded. Every tensor is copied once in, once out.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Segment(NamedTuple):
    """Tokens `start` … `stop` − 1 as chunks of `size` tokens."""

    start: int
    stop: int
    size: int


def segments(rows: int, T: int, C: int, most: int) -> list[Segment]:
    """T tokens as segments of whole chunks with about `most` tokens times `rows` each, and one of what is left."""
    step, whole = C * max(1, most // (rows * C)), T - T % C
    parts = [Segment(start, min(start + step, whole), C) for start in range(0, whole, step)]
    return parts + ([Segment(whole, T, T - whole)] if whole < T else [])


def num_segments(rows: int, T: int, C: int, most: int) -> int:
    """How many `segments` there are; also for the symbolic sizes of a compiler."""
    step, whole = C * torch.sym_max(1, most // (rows * C)), T - T % C
    return (whole + step - 1) // step + (T - whole + C - 1) // C


def chunks_of(x: Tensor, part: Segment) -> Tensor:
    """One segment of [B, H, T, …] as a view [N, B, H, C, …]."""
    return x[:, :, part.start : part.stop].unflatten(2, (-1, part.size)).movedim(2, 0)


def load(x: Tensor, part: Segment, dtype: torch.dtype) -> Tensor:
    """One segment of [B, H, T, …] as contiguous chunks [N, B·H, C, …]; [B, H, T] becomes [N, B·H, C, 1]."""
    chunks = chunks_of(x if x.dim() == 4 else x.unsqueeze(-1), part)
    return chunks.to(dtype, memory_format=torch.contiguous_format).contiguous().flatten(1, 2)


def store(whole: Tensor, part: Segment, chunks: Tensor) -> None:
    """Fill one segment of `whole` [B, H, T, …] from chunks [N, B·H, C, …]."""
    target = chunks_of(whole if whole.dim() == 4 else whole.unsqueeze(-1), part)
    target.copy_(chunks.unflatten(1, whole.shape[:2]))


def add_product(total: Tensor, a: Tensor, b: Tensor, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """beta · total + alpha · a @ b for [N, B·H, …] tensors, written over `total`."""
    total.flatten(0, 1).baddbmm_(a.flatten(0, 1), b.flatten(0, 1), beta=beta, alpha=alpha)
    return total


def core_dtype(*tensors: Tensor | None) -> torch.dtype:
    """What a core computes in: the widest dtype given, at least fp32."""
    dtype = torch.float32
    for x in tensors:
        dtype = dtype if x is None else torch.promote_types(dtype, x.dtype)
    return dtype
