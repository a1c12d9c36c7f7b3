"""`raf`: a learned ratio of polynomials as an activation, fitted to a known function at first (arXiv 1907.06732)."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from .ops.numerics import at_least_fp32

BORDER = 3.0  # the fit and the input scaling cover [−3, 3]

TARGETS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "leaky_relu_0.1": lambda x: F.leaky_relu(x, 0.1),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "swish": F.silu,
    "silu": F.silu,
    "identity": lambda x: x,
}


def horner(coefficients: Tensor, x: Tensor) -> Tensor:
    """Σ cₖ xᵏ, k from 0."""
    y = coefficients[-1] * torch.ones_like(x)
    for k in range(len(coefficients) - 2, -1, -1):
        y = y * x + coefficients[k]
    return y


def rational(x: Tensor, numerator: Tensor, denominator: Tensor, version: str) -> Tensor:
    """P(x)/Q(x); see `RAFParams` for the versions of Q."""
    if version == "A":
        Q = 1 + x.abs() * horner(denominator.abs(), x.abs())
    elif version == "C":
        Q = 0.1 + horner(denominator, x).abs()
    elif version == "N":
        Q = 1 + x * horner(denominator, x)
    else:
        Q = 1 + (x * horner(denominator, x)).abs()
    return horner(numerator, x) / Q


@functools.lru_cache(maxsize=64)
def fitted(version: str, degrees: tuple[int, int], target: str) -> tuple[Tensor, Tensor]:
    """Coefficients of the least-squares fit on [−3, 3] for this version's own denominator.

    Levenberg–Marquardt in fp64 from a few fixed starts; the fit with the smallest largest error is taken.
    """
    m, n = degrees
    x = torch.linspace(-BORDER, BORDER, 301, dtype=torch.float64)
    y = TARGETS[target](x)
    first = 0 if version == "C" else 1
    powers = x[:, None] ** torch.arange(max(m, n) + 1)

    def error_and_slopes(theta: Tensor) -> tuple[Tensor, Tensor]:
        p, q = theta[: m + 1], theta[m + 1 :]
        terms = powers[:, first : n + 1]
        if version == "A":
            slopes = terms.abs() * q.sign()
            Q = 1 + terms.abs() @ q.abs()
        else:
            inner = terms @ q
            slopes = terms if version == "N" else terms * inner.sign()[:, None]
            Q = {"C": 0.1, "N": 1.0}.get(version, 1.0) + (inner if version == "N" else inner.abs())
        value = powers[:, : m + 1] @ p / Q
        return value - y, torch.cat([powers[:, : m + 1] / Q[:, None], -(value / Q)[:, None] * slopes], dim=1)

    best, smallest = torch.zeros(m + 1 + n + 1 - first, dtype=torch.float64), float("inf")
    for scale in (0.5, 0.1, 0.02):
        start = scale / torch.arange(1, n + 2 - first, dtype=torch.float64)
        Q = 1 / rational(x, torch.ones(1, dtype=torch.float64), start, version)
        linear = torch.linalg.lstsq(powers[:, : m + 1] / Q[:, None], y[:, None]).solution[:, 0]
        theta = _levenberg_marquardt(error_and_slopes, torch.cat([linear, start]))
        error = error_and_slopes(theta)[0].abs().max().item()
        if error < smallest:
            best, smallest = theta, error
    return best[: m + 1], best[m + 1 :]


def _levenberg_marquardt(
    error_and_slopes: Callable[[Tensor], tuple[Tensor, Tensor]], theta: Tensor, steps: int = 100
) -> Tensor:
    damping, (r, J) = 1e-3, error_and_slopes(theta)
    for _ in range(steps):
        A = J.T @ J
        step = torch.linalg.solve(A + damping * (A.diagonal() + 1e-9).diag(), J.T @ r)
        tried = error_and_slopes(theta - step)
        if tried[0].square().sum() < r.square().sum():
            theta, (r, J), damping = theta - step, tried, damping / 3
        else:
            damping *= 4
    return theta


class RationalActivation(nn.Module):
    """P(x)/Q(x) with `numerator` [m + 1] and `denominator`, shared by all channels of a layer.

    Args:
        width: Channels F; not used, since the coefficients are shared.
        degrees, version, approx_func, trainable, input_scaling: See `RAFParams`.
    """

    def __init__(
        self,
        width: int,
        degrees: Sequence[int] = (5, 4),
        version: str = "A",
        approx_func: str = "gelu",
        trainable: bool = True,
        input_scaling: bool = False,
    ) -> None:
        super().__init__()
        self.degrees, self.version, self.approx_func = (int(degrees[0]), int(degrees[1])), version, approx_func
        self.input_scaling = input_scaling
        count = self.degrees[1] + (version == "C")
        self.numerator = nn.Parameter(torch.empty(self.degrees[0] + 1), requires_grad=trainable)
        self.denominator = nn.Parameter(torch.empty(count), requires_grad=trainable)

    def init_parameters(self) -> None:
        """The fit to `approx_func`."""
        numerator, denominator = fitted(self.version, self.degrees, self.approx_func)
        init.copy_(self.numerator, numerator)
        init.copy_(self.denominator, denominator)

    def forward(self, x: Tensor) -> Tensor:
        """[..., F] -> [..., F] in the dtype of `x`, computed in at least fp32."""
        z = at_least_fp32(x)
        if self.input_scaling:
            low, high = z.amin(-1, keepdim=True), z.amax(-1, keepdim=True)
            extent = high - low
            z = torch.where(extent > 0, 2 * BORDER * (z - low) / torch.where(extent > 0, extent, 1.0) - BORDER, 0.0)
        denominator = self.denominator.to(z.dtype)
        if self.version == "D" and self.training:
            denominator = denominator * torch.empty_like(denominator).uniform_(0.9, 1.1)
        return rational(z, self.numerator.to(z.dtype), denominator, self.version).to(x.dtype)
