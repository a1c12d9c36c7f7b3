"""Activation functions with weights, one per channel; [..., F] -> [..., F], computed in at least fp32."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from .ops.numerics import at_least_fp32


def within(weight: Tensor, low: float, high: float | None = None) -> Tensor:
    """`weight` clamped to [low, high], with the gradient of the identity: a weight at the border can come back."""
    return weight + (weight.clamp(low, high) - weight).detach()


class LearnedActivation(nn.Module):
    """Base: `weights` names the learned vectors and their first values.

    Args:
        width: Channels F.
        params: Parameters of the spec, kept as attributes.
    """

    weights: dict[str, float] = {}  # noqa: RUF012  (never written to)

    def __init__(self, width: int, **params: Any) -> None:
        super().__init__()
        self.__dict__.update(params)
        for name in self.weights:
            self.register_parameter(name, nn.Parameter(torch.empty(width)))

    def __getattr__(self, name: str) -> Any:  # for type checkers: attributes come from the spec
        return super().__getattr__(name)

    def init_parameters(self) -> None:
        """The values of `weights`."""
        for name, value in self.weights.items():
            init.constant_(getattr(self, name), value)

    function: Callable[..., Tensor]  # (x [..., F] in at least fp32, the weights [F] by name) -> [..., F]

    def forward(self, x: Tensor) -> Tensor:
        """[..., F] -> [..., F] in the dtype of `x`."""
        x32 = at_least_fp32(x)
        return self.function(x32, **{name: getattr(self, name).to(x32.dtype) for name in self.weights}).to(x.dtype)


class PReLU(LearnedActivation):
    weights = {"weight": 0.25}  # noqa: RUF012

    def init_parameters(self) -> None:
        """The slope the spec gives."""
        init.constant_(self.weight, self.init)

    def function(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.where(x >= 0, x, weight * x)


class PELU(LearnedActivation):
    weights = {"alpha": 1.0, "beta": 1.0}  # noqa: RUF012

    def function(self, x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
        alpha, beta = within(alpha, 0.1), within(beta, 0.1)
        return torch.where(x >= 0, alpha / beta * x, alpha * torch.expm1(x.clamp_max(0) / beta))


class MPELU(LearnedActivation):
    weights = {"alpha": 1.0, "beta": 1.0}  # noqa: RUF012

    def function(self, x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
        below = x.clamp_max(0)
        if self.form == "seed":
            return torch.where(x >= 0, x, alpha * beta * torch.expm1(below))
        return torch.where(x >= 0, x, alpha * torch.expm1((beta * below).clamp_max(50)))


class FELU(LearnedActivation):
    weights = {"alpha": 1.0}  # noqa: RUF012

    def function(self, x: Tensor, alpha: Tensor) -> Tensor:
        return torch.where(x >= 0, x, within(alpha, 0.0, 1.0) * torch.expm1(x.clamp_max(0)))


class EELU(LearnedActivation):
    weights = {"alpha": 1.0, "beta": 1.0}  # noqa: RUF012

    def function(self, x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
        below = x.clamp_max(0)
        if self.form == "seed":
            return torch.where(x >= 0, beta * x, alpha * torch.expm1(below))
        above = x
        if self.training and self.noise:
            above = x * (1 + self.noise * torch.randn_like(x)).clamp(0, 2)
        return torch.where(x >= 0, above, alpha * torch.expm1((beta * below).clamp_max(50)))


class PDELU(LearnedActivation):
    weights = {"alpha": 1.0}  # noqa: RUF012

    def function(self, x: Tensor, alpha: Tensor) -> Tensor:
        below = x.clamp_max(0)
        if self.form == "seed":
            safe = within(alpha, 0.1)
            return torch.where(x >= 0, x, alpha * torch.expm1(below / safe) + (1 - alpha) * below)
        if self.t == 1:
            return torch.where(x >= 0, x, alpha * torch.expm1(below))
        base = F.relu(1 + (1 - self.t) * below)
        return torch.where(x >= 0, x, alpha * (base ** (1 / (1 - self.t)) - 1))


class PREU(LearnedActivation):
    weights = {"alpha": 1.0, "beta": 1.0}  # noqa: RUF012

    def function(self, x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
        below = x.clamp_max(0)
        if self.form == "seed":
            return torch.where(x >= 0, beta * x, alpha * torch.expm1(below))
        return alpha * torch.where(x >= 0, x, below * torch.exp((beta * below).clamp_max(50)))


class SoftExp(LearnedActivation):
    """(e^(αx) − 1)/α + α for α > 0, −ln(1 − α(x + α))/α for α < 0, and x + α(1 + x²/2) next to 0, where both meet."""

    weights = {"alpha": 0.0}  # noqa: RUF012

    def function(self, x: Tensor, alpha: Tensor) -> Tensor:
        small = alpha.abs() < 1e-6
        up, down = torch.where(alpha >= 1e-6, alpha, 1.0), torch.where(alpha <= -1e-6, alpha, -1.0)
        exponential = torch.expm1((up * x).clamp_max(80)) / up + up
        logarithm = -torch.log((1 - down * (x + down)).clamp_min(1e-6)) / down
        series = x + alpha * (1 + x.clamp(-1e4, 1e4).square() / 2)
        return torch.where(small, series, torch.where(alpha > 0, exponential, logarithm))


class TrainableSwish(LearnedActivation):
    weights = {"beta": 1.0}  # noqa: RUF012

    def function(self, x: Tensor, beta: Tensor) -> Tensor:
        return x * torch.sigmoid(beta * x)
