"""Normalisation layers and plain normalising functions; statistics in at least fp32.

Shapes: D model width.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.utils import logging

from .implementations import implementation
from .ops.numerics import at_least_fp32

logger = logging.get_logger(__name__)


def make_norm(config: Any) -> nn.Module:
    """The norm `config` names, over its model width."""
    spec, params = config.component("norm")
    return implementation(spec)(config.hidden_size, config.rms_norm_eps, **vars(params))


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last axis."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[…, D] -> […, D] in the dtype of `x`."""
        weight = self.weight
        if x.dtype != weight.dtype or x.dtype in (torch.bfloat16, torch.float16):
            x32 = at_least_fp32(x)
            return F.rms_norm(x32, x.shape[-1:], weight.to(x32.dtype), self.eps).to(x.dtype)
        return F.rms_norm(x, x.shape[-1:], weight, self.eps)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class LayerNorm(nn.LayerNorm):
    """Layer normalisation with the signature of `RMSNorm`."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__(hidden_size, eps=eps)


def _leading(hidden_size: int, ratio: float) -> int:
    """How many leading channels a share of them is, rounded up."""
    count = math.ceil(ratio * hidden_size)
    if count < min(4, hidden_size):
        logger.warning_once(
            f"partial_ratio={ratio} of {hidden_size} channels leaves {count} for the root mean square: a noisy one."
        )
    return count


def _inverse_rms(x: Tensor, channels: int, eps: float) -> Tensor:
    """1 / √(mean of squares of the first channels + eps), […, 1]."""
    return torch.rsqrt(x[..., :channels].square().mean(-1, keepdim=True) + eps)


class PartialRMSNorm(RMSNorm):
    """`RMSNorm` whose root mean square is that of the first ⌈partial_ratio · D⌉ channels (arXiv 1910.07467)."""

    def __init__(self, hidden_size: int, eps: float = 1e-6, partial_ratio: float = 0.0625) -> None:
        super().__init__(hidden_size, eps)
        self.channels = _leading(hidden_size, partial_ratio)

    def forward(self, x: Tensor) -> Tensor:
        if self.channels == x.shape[-1]:
            return super().forward(x)
        x32 = at_least_fp32(x)
        return (x32 * _inverse_rms(x32, self.channels, self.eps) * self.weight.to(x32.dtype)).to(x.dtype)


class FlashNorm(nn.Module):
    """x / rms(x) with no parameters of its own (arXiv 2407.09577); see `frankenstein_hf.fold_norms`."""

    def __init__(self, hidden_size: int, eps: float = 1e-6, partial_ratio: float = 0.0) -> None:
        super().__init__()
        self.eps = eps
        self.channels = _leading(hidden_size, partial_ratio or 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """[…, D] -> […, D] in the dtype of `x`."""
        x32 = at_least_fp32(x)
        if self.channels == x.shape[-1]:
            return F.rms_norm(x32, x.shape[-1:], None, self.eps).to(x.dtype)
        return (x32 * _inverse_rms(x32, self.channels, self.eps)).to(x.dtype)


class DynamicTanh(nn.Module):
    """weight · tanh(alpha · x) + bias: every channel on its own, no statistics (arXiv 2503.10622)."""

    def __init__(self, hidden_size: int, eps: float = 1e-6, alpha_init: float = 0.5, affine: bool = True) -> None:
        super().__init__()
        self.alpha_init = alpha_init
        self.alpha = nn.Parameter(torch.empty(1))
        self.weight = nn.Parameter(torch.empty(hidden_size)) if affine else None
        self.bias = nn.Parameter(torch.empty(hidden_size)) if affine else None

    def init_parameters(self) -> None:
        """The slope as given, gain one, bias zero."""
        init.constant_(self.alpha, self.alpha_init)
        if self.weight is not None and self.bias is not None:
            init.ones_(self.weight)
            init.zeros_(self.bias)

    def squash(self, x: Tensor) -> Tensor:
        """[…, D] in at least fp32 -> (−1, 1)."""
        return torch.tanh(self.alpha.to(x.dtype) * x)

    def forward(self, x: Tensor) -> Tensor:
        """[…, D] -> […, D] in the dtype of `x`."""
        y = self.squash(at_least_fp32(x))
        if self.weight is not None and self.bias is not None:
            y = y * self.weight.to(y.dtype) + self.bias.to(y.dtype)
        return y.to(x.dtype)


class Derf(DynamicTanh):
    """weight · erf(alpha · x + shift) + bias (arXiv 2512.10938)."""

    def __init__(self, hidden_size: int, eps: float = 1e-6, alpha_init: float = 0.5, shift_init: float = 0.0) -> None:
        super().__init__(hidden_size, eps, alpha_init)
        self.shift_init = shift_init
        self.shift = nn.Parameter(torch.empty(1))

    def init_parameters(self) -> None:
        """As `DynamicTanh`, and the shift as given."""
        super().init_parameters()
        init.constant_(self.shift, self.shift_init)

    def squash(self, x: Tensor) -> Tensor:
        return torch.erf(self.alpha.to(x.dtype) * x + self.shift.to(x.dtype))


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / √(Σx² + eps) over the last axis, in at least fp32; the result keeps that precision."""
    x = at_least_fp32(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
