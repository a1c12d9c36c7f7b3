"""Cutting [B, H, T, …] tensors into time segments of whole chunks, and putting results together again.

Shapes: B batch, H heads, T time, C chunk, N chunks of a segment.
"""

import torch
from torch import Tensor


def split_chunks(x: Tensor, size: int) -> Tensor:
    """[B, H, T, …] -> [N, B·H, C, …] with C = size, the last chunk filled with zeros.

    Chunk-first, so that a loop reads contiguous slices. With one row and whole chunks the result may be a view.
    """
    B, H, T = x.shape[:3]
    rest = x.shape[3:]
    x = x.reshape(B * H, T, *rest)
    if missing := -T % size:
        x = torch.cat([x, x.new_zeros(B * H, missing, *rest)], dim=1)
    return x.view(B * H, -1, size, *rest).transpose(0, 1).contiguous()


def time_segments(rows: int, T: int, C: int, most: int) -> list[slice]:
    """Time slices of whole chunks with about `most` tokens times `rows` each; the last one may reach beyond T."""
    size = C * max(1, most // (rows * C))
    return [slice(t, t + size) for t in range(0, T, size)]


def load_chunks(tensors: list[Tensor], part: slice, C: int, dtype: torch.dtype) -> list[Tensor]:
    """One segment of [B, H, T, …] tensors as chunks [N, B·H, C, …]; [B, H, T] becomes [N, B·H, C, 1]."""
    return [split_chunks((x if x.dim() == 4 else x.unsqueeze(-1))[:, :, part].to(dtype), C) for x in tensors]


class Chunked:
    """A [B, H, T, …] tensor to be filled with segments of chunks, each copied once."""

    def __init__(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device, C: int) -> None:
        B, H, T = shape[:3]
        self.shape, self.C = shape, C
        self.chunks = torch.empty(B * H, -(-T // C), C, *(shape[3:] or (1,)), dtype=dtype, device=device)

    def store(self, part: slice, chunks: Tensor) -> None:
        """Fill in the segment `part` from [N, B·H, C, …]."""
        first = part.start // self.C
        self.chunks[:, first : first + len(chunks)] = chunks.transpose(0, 1)

    def whole(self) -> Tensor:
        """[B·H, T rounded up to chunks, …]."""
        return self.chunks.flatten(1, 2)

    def result(self) -> Tensor:
        """[B, H, T, …]."""
        B, H, T, *rest = self.shape
        return self.chunks.view(B, H, -1, *rest)[:, :, :T]
