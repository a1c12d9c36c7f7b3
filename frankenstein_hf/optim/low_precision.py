"""16-bit parameters: updated in fp32, written back without losing what is smaller than a rounding step.

Near 1 neighbouring bf16 numbers are 1/128 apart, so an update of 10⁻³ vanishes when the weight is simply rounded.
"""

from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16)
REMAINDER = "remainder"  # name of the state of "compensated": what rounding has left of the weight


def widen(p: Tensor, state: dict[str, Any]) -> Tensor:
    """A 16-bit parameter in fp32, with its remainder if it has one; others as they are."""
    if p.dtype not in DTYPES:
        return p.detach()
    wide = p.detach().float()
    return wide.add_(state[REMAINDER]) if REMAINDER in state else wide


def narrow_(p: Tensor, wide: Tensor, how: str, generator: torch.Generator | None = None) -> Tensor | None:
    """Write a value in fp32 (or p's own dtype) into a parameter, in place.

    Args:
        p: The parameter.
        wide: Its new value.
        how: What to do if p has 16 bits: "round" to the nearest; "stochastic", up or down at random so that the mean
            is exact; or "compensated", to the nearest with the difference kept for the next step.
        generator: For "stochastic".

    Returns:
        For "compensated" the remainder, in p's dtype.
    """
    if p.dtype in DTYPES and how == "stochastic":
        assert generator is not None
        p.copy_(stochastic(wide, p.dtype, generator))
    else:
        p.copy_(wide)
    return (wide - p.float()).to(p.dtype) if p.dtype in DTYPES and how == "compensated" else None


def stochastic(x: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """fp32 x as a neighbouring number of a 16-bit dtype, the nearer the likelier; exact numbers stay."""
    fours = torch.empty(-(-x.numel() // 4), dtype=torch.int64, device=x.device)
    fours.random_(-(2**63), None, generator=generator)
    noise = fours.view(torch.int16)[: x.numel()].view(x.shape).to(torch.int32).bitwise_and_(0xFFFF)
    if dtype == torch.bfloat16:  # the upper half of an fp32 number
        bits = noise.add_(x.contiguous().view(torch.int32)).bitwise_right_shift_(16)
        return bits.to(torch.int16).view(torch.bfloat16)
    exponent = torch.frexp(x).exponent.clamp_(min=-13)  # below 2⁻¹⁴ the numbers of fp16 are evenly spaced
    spacing = torch.ldexp(torch.ones_like(x), exponent - 11)
    return (torch.floor(x / spacing + noise * 2.0**-16) * spacing).to(dtype)
