"""Eigenvalues and singular values for preconditioners and projections, with errors that say what to do."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def eigh(a: Tensor) -> Any:
    """`torch.linalg.eigh` of symmetric matrices [S, m, m]: eigenvalues [S, m], rising, and eigenvectors [S, m, m].

    Raises:
        torch.linalg.LinAlgError: The matrices are not finite.
    """
    return _decompose(torch.linalg.eigh, a)


def svd(x: Tensor) -> Any:
    """The reduced `torch.linalg.svd` of [S, m, n]: U, the singular values, Vᴴ.

    Raises:
        torch.linalg.LinAlgError: The matrices are not finite.
    """
    return _decompose(lambda y: torch.linalg.svd(y, full_matrices=False), x)


def _decompose(function: Callable[[Tensor], Any], x: Tensor) -> Any:
    try:
        return function(x)
    except torch.linalg.LinAlgError as error:
        if x.isfinite().all():  # close eigenvalues, with which single precision may not converge
            return type(result := function(x.double()))(part.to(x.dtype) for part in result)
        raise torch.linalg.LinAlgError(
            f"The statistics of gradients [{', '.join(map(str, x.shape))}] that this optimizer decomposes are not "
            "finite: very large gradients have added up to more than the number format holds. Clip gradients, or keep "
            "nonfinite='skip', which leaves single ones of that kind out."
        ) from error
