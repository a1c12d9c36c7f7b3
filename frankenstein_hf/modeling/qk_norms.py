"""Norms on queries and keys; statistics in at least fp32.

Shapes: H heads, W head width.
"""

from typing import Any

from torch import Tensor, nn

from .norms import LayerNorm, RMSNorm, l2_normalize


class NoQKNorm(nn.Identity):
    """Heads as they are."""

    def __init__(self, num_heads: int, width: int) -> None:
        super().__init__()


def _over_all(norm: Any, x: Tensor) -> Tensor:
    """`norm` over the channels of all heads of x [B, H, T, W]."""
    flat = x.transpose(1, 2)
    return norm(flat.flatten(2)).view(flat.shape).transpose(1, 2)


class RMSQKNorm(RMSNorm):
    """x / rms(x) · weight [W] over a head, or · weight [H·W] over all heads."""

    def __init__(self, num_heads: int, width: int, eps: float = 1e-6, over: str = "head") -> None:
        super().__init__(width if over == "head" else num_heads * width, eps)
        self.over_all = over == "all_heads"

    def forward(self, x: Tensor) -> Tensor:
        """[B, H, T, W] -> [B, H, T, W] in the dtype of `x`."""
        return _over_all(super().forward, x) if self.over_all else super().forward(x)


class LayerQKNorm(LayerNorm):
    """Layer normalisation over a head, or over all heads."""

    def __init__(self, num_heads: int, width: int, eps: float = 1e-6, over: str = "head") -> None:
        super().__init__(width if over == "head" else num_heads * width, eps)
        self.over_all = over == "all_heads"

    def forward(self, x: Tensor) -> Tensor:
        """[B, H, T, W] -> [B, H, T, W] in the dtype of `x`."""
        return _over_all(super().forward, x) if self.over_all else super().forward(x)


class L2QKNorm(nn.Module):
    """x / √(Σx² + eps), times what makes the logit q · k / √W the scaled cosine asked for (arXiv 2010.04245).

    A learned scale is the mixer's `qk_scale`, a number for every query head.
    """

    def __init__(self, num_heads: int, width: int, eps: float = 1e-6, scale: str = "sqrt_dim") -> None:
        super().__init__()
        self.eps = eps
        # both sides carry the factor; beside a learned scale it only cancels the 1/√W of the logit
        self.factor = {"sqrt_dim": width**0.5, "learned": width**0.25, "inverse_sqrt_dim": 1.0}[scale]

    def forward(self, x: Tensor) -> Tensor:
        """[B, H, T, W] -> [B, H, T, W] in the dtype of `x`."""
        return (l2_normalize(x, self.eps) * self.factor).to(x.dtype)
