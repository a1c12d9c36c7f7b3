"""What every recurrent core needs from arithmetic: enough precision, and no subnormal numbers.

Ordinary gates push products of decays into the 1e-38 … 1e-45 band, where matrix products run several times slower on a
CPU. Nothing that small can matter beside fp32 rounding, so the helpers here return exact zeros instead.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional as F

TINY = 1e-26
LOG_TINY = -61.0  # exp(-61) < TINY; clamping before exp() also avoids the slow underflow path of vector math libraries


def at_least_fp32(x: Tensor) -> Tensor:
    """`x` in fp32 if it was half precision, unchanged otherwise (fp64 stays fp64)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


Function = TypeVar("Function", bound=Callable[..., Any])


def full_precision(function: Function) -> Function:
    """Decorator: run `function` with autocast off, so that its products keep the precision of their operands."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        device = next((x.device.type for x in args if isinstance(x, Tensor)), "cpu")
        if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return cast(Function, run)


def untraced(function: Function) -> Function:
    """`function` called as it is under torch.compile.

    A core that walks over chunks, with a backward pass of its own, would be unrolled into one graph for every length.
    """
    return torch.compiler.disable(function)


def decay_exp(log_decay: Tensor) -> Tensor:
    """exp(log_decay) for log_decay ≤ 0, exactly zero below 1e-26."""
    return F.threshold(log_decay.clamp_min(LOG_TINY).exp(), TINY, 0.0)


class _FlushTiny(torch.autograd.Function):
    """Flushes values and gradients; a value that is zero still receives its gradient, which hardshrink denies it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return F.hardshrink(x, TINY)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return flush_tiny(grad)


def flush_tiny(x: Tensor) -> Tensor:
    """`x` with entries below 1e-26 in magnitude replaced by exact zeros; its gradient is passed on likewise."""
    return _FlushTiny.apply(x) if x.requires_grad and torch.is_grad_enabled() else F.hardshrink(x, TINY)
