"""Normalisation layers and plain normalising functions; statistics in at least fp32."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .implementations import implementation
from .ops.numerics import at_least_fp32


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


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / √(Σx² + eps) over the last axis, in at least fp32; the result keeps that precision."""
    x = at_least_fp32(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
