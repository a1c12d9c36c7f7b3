"""Mask rates drawn anew for every document, as masked diffusion models are trained with.

A schedule is a distribution over [0, 1]: a document draws its rate ρ from it, then each of its tokens is hidden with
probability ρ by itself. The model so learns to fill in texts of which little or nearly everything is there.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor


@dataclass(frozen=True)
class RateDistribution:
    """A distribution of mask rates.

    Attributes:
        summary: What it is, in one line.
        mean: Its mean.
        draw: (count, generator) -> rates [count] in [0, 1].
    """

    summary: str
    mean: float
    draw: Callable[[int, Generator], Tensor]


def _uniform(generator: Generator, *shape: int) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.double)


def _betalinear30(count: int, generator: Generator) -> Tensor:
    beta = _uniform(generator, count, 11).sort(1).values[:, 2]  # the third smallest of eleven is Beta(3, 9)
    return torch.where(_uniform(generator, count) < 0.8, beta, _uniform(generator, count))


RATE_DISTRIBUTIONS: dict[str, RateDistribution] = {
    "betalinear30": RateDistribution(
        "Beta(3, 9) four times in five, else uniform: 30 % on average, any rate now and then (ESM3).",
        0.3,
        _betalinear30,
    ),
    "cosine": RateDistribution(
        "cos(πu/2) of a uniform u: mostly high rates (MaskGIT).",
        2 / math.pi,
        lambda count, generator: torch.cos(math.pi / 2 * _uniform(generator, count)),
    ),
    "sqrt_esm": RateDistribution(
        "1 − √u of a uniform u, the square-root schedule of ESM3's program: mostly low rates.",
        1 / 3,
        lambda count, generator: 1 - _uniform(generator, count).sqrt(),
    ),
    "sqrt_odyssey": RateDistribution(
        "√u of a uniform u, the square-root schedule of Odyssey's program: mostly high rates.",
        2 / 3,
        lambda count, generator: _uniform(generator, count).sqrt(),
    ),
}


class Noise(NamedTuple):
    """Noise levels of documents.

    Attributes:
        rate: ρ = 1 − exp(−total), the probability of a token to be hidden.
        total: σ̄(t), the noise up to time t.
        speed: σ′(t), its derivative, which weighs the loss.
    """

    rate: Tensor
    total: Tensor
    speed: Tensor


@dataclass(frozen=True)
class GeometricNoise:
    """σ̄(t) = sigma_min^(1−t) · sigma_max^t at uniform times: the schedule of SEDD (arXiv 2310.16834).

    Args:
        sigma_min, sigma_max: Noise at time 0, where 1 − exp(−sigma_min) of the tokens are hidden, and at time 1.
        first: Earliest time that is drawn, in [0, 1).
    """

    sigma_min: float = 1e-4
    sigma_max: float = 20.0
    first: float = 1e-3

    def __post_init__(self) -> None:
        if not 0 < self.sigma_min < self.sigma_max < math.inf:
            raise ValueError(
                f"GeometricNoise needs 0 < sigma_min < sigma_max; got {self.sigma_min} and {self.sigma_max}."
            )
        if not 0 <= self.first < 1:
            raise ValueError(f"GeometricNoise(first={self.first}) must be in [0, 1).")

    def at(self, time: Tensor) -> Noise:
        """The noise at times in [0, 1]."""
        total = self.sigma_min ** (1 - time) * self.sigma_max**time
        return Noise(-torch.expm1(-total), total, total * math.log(self.sigma_max / self.sigma_min))

    def draw(self, count: int, generator: Generator) -> Noise:
        """The noise of `count` documents, [count] each."""
        return self.at(1 - (1 - self.first) * _uniform(generator, count))
