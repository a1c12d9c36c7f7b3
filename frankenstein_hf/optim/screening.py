"""Gradients that must not enter an optimizer's state: infinite, not a number, or too large to be squared."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .low_precision import DTYPES

HEADROOM = 2.0**-10  # of the largest norm: states hold squares of sums and differences of gradients


def largest_norm(dtype: torch.dtype) -> float:
    """The largest norm a gradient may have: about 10¹⁶ in fp32, where squares end at 3 · 10³⁸."""
    return torch.finfo(torch.float32 if dtype in DTYPES else dtype).max ** 0.5 * HEADROOM


def usable(gradients: Sequence[Tensor]) -> list[bool]:
    """For each gradient whether its norm is a number and not too large.

    One pass over the gradients, and one transfer from every device for all of them.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, g in enumerate(gradients):
        alike.setdefault((g.device, g.dtype), []).append(i)
    result = [True] * len(gradients)
    for (_, dtype), indices in alike.items():
        values = [gradients[i]._values() if gradients[i].is_sparse else gradients[i] for i in indices]
        norms = [
            norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # sharded: all processes agree
            for norm in torch._foreach_norm(values, 2, torch.float32 if dtype in DTYPES else None)
        ]
        for i, norm in zip(indices, torch.stack(norms).tolist()):
            result[i] = norm <= largest_norm(dtype)  # False for NaN
    return result
