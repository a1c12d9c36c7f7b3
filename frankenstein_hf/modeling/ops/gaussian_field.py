"""Weights that depend on relative position: softmax of Gaussians over a band, and the product of a band with values.

Shapes: B batch (any leading axes), T time, r radius, W value width, N blocks of C tokens.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from .window_attention import overlapping_windows

BLOCK = 64


def gaussian_band(mean: Tensor, width: Tensor, radius: int, lengths: Tensor | None = None) -> Tensor:
    """softmax_j(−½ ((i − j − mean_i) / width_i)²) over the tokens |i − j| ≤ r that exist.

    Args:
        mean, width: [R, …, T] per looking token; width > 0; at least fp32.
        radius: r ≥ 0.
        lengths: [R] tokens that exist, all T if None. A token that does not exist sees itself.

    Returns:
        [R, …, T, 2r + 1]; entry r + δ weighs token i + δ. Zero where no token is.
    """
    T, device = mean.shape[-1], mean.device
    offsets = torch.arange(-radius, radius + 1, device=device)
    j = torch.arange(T, device=device)[:, None] + offsets
    exists = (j >= 0) & (j < T)
    if lengths is not None:
        exists = exists & ((j < lengths[:, None, None]) | (offsets == 0))
        exists = exists.view(len(lengths), *[1] * (mean.dim() - 2), T, -1)
    logits = -0.5 * ((mean[..., None] + offsets) / width[..., None]).square()
    return logits.masked_fill(~exists, -torch.inf).softmax(-1)


def apply_band(weights: Tensor, values: Tensor) -> Tensor:
    """Σ_δ weights[…, i, r + δ] · values[…, i + δ, :], with zeros where no token is; cost T·(r + C).

    Args:
        weights: [B, T, 2r + 1].
        values: [B, T, W]; its leading axes may broadcast.

    Returns:
        [B, T, W].
    """
    batch = weights.shape[:-2]
    values = values.expand(*batch, -1, -1).flatten(0, -3)
    weights = weights.flatten(0, -3)
    B, T, taps = weights.shape
    radius, C = taps // 2, min(BLOCK, T)
    N = -(-T // C)
    padded = F.pad(values, (0, 0, radius, radius + N * C - T))[:, None]
    window = overlapping_windows(padded, padded[:, :, :0], C, C + 2 * radius)[:, :, 0]  # [N, B, C + 2r, W]
    # A row further, a band begins a column further: rows one longer than the window, read as rows of its length.
    rows = F.pad(weights, (0, C, 0, N * C - T)).view(B, N, -1)
    matrix = rows[:, :, : C * (C + 2 * radius)].view(B, N, C, C + 2 * radius)
    product = matrix.transpose(0, 1) @ window
    return product.transpose(0, 1).reshape(B, N * C, -1)[:, :T].unflatten(0, batch)
