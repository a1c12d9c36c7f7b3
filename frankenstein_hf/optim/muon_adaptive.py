"""Orthogonalised momentum with second moments: AdaMuon, NorMuon, Muon²."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..configuration.component import param
from .base import Batch, ParamGroup
from .matrix_method import (
    FALLBACK,
    MatrixMethod,
    OrthogonalParams,
    Stack,
    accumulate,
    frobenius,
    orthogonal,
    with_statistics,
)
from .spec import OptimizerSpec, below_one, floats, or_adamw

TINY = 1e-30  # a norm of 0 is replaced by it


def with_rms(o: Tensor, rms: float) -> Tensor:
    """o scaled to this root mean square, matrix by matrix, in place."""
    return o.mul_(rms * (o.shape[-2] * o.shape[-1]) ** 0.5 / frobenius(o).clamp_min_(TINY))


# ---------------------------------------------------------------------- AdaMuon


@dataclass(frozen=True, kw_only=True)
class AdaMuonParams(OrthogonalParams):
    """Parameters of `adamuon`."""

    lr: float = param(3e-3, "learning rate, on AdamW's scale", minimum=0.0)
    eps: float = param(1e-8, "ε, added to the root of the second moment", minimum=0.0)
    rms: float = param(0.2, "root mean square of the step before the learning rate", minimum=0.0)


class AdaMuon(MatrixMethod):
    """The orthogonal direction divided by its own second moment, element by element (arXiv 2507.11005, algorithm 1):

        M ← β M + G;  O = NS(sign M);  V ← β V + (1 − β) O²
        Ô = O / (√V + ε);  W ← W − η (0.2 √(mn) / ‖Ô‖_F · Ô + λ W)

    β is "momentum" in both. Neither moment has a bias correction: the scaling of Ô cancels it. The authors' code also
    has a Nesterov momentum; the algorithm has none.
    """

    params_class = AdaMuonParams

    def statistics(self, s: int, m: int, n: int, group: ParamGroup) -> dict[str, tuple[int, ...]]:
        return {"v": (s, m, n)}

    def signals(self, batch: Batch, group: ParamGroup) -> list[Tensor]:
        return list(torch._foreach_sign(accumulate(batch, group["momentum"])))

    def direction(self, x: Tensor, stack: Stack, group: ParamGroup) -> Tensor:
        o = orthogonal(x, group)
        v = stack.average("v", o.square(), group["momentum"])
        return with_rms(o.div_(v.sqrt_().add_(group["eps"])), group["rms"])


# ---------------------------------------------------------------------- NorMuon


@dataclass(frozen=True, kw_only=True)
class NorMuonParams(OrthogonalParams):
    """Parameters of `normuon`."""

    lr: float = param(3e-3, "learning rate, on AdamW's scale", minimum=0.0)
    beta2: float = below_one(0.95, "β₂, decay rate of the rows' second moment")
    eps: float = param(1e-8, "ε, added to its root", minimum=0.0)
    rms: float = param(0.2, "root mean square of the step before the learning rate", minimum=0.0)


class NorMuon(MatrixMethod):
    """The orthogonal direction with every row, a neuron, divided by its own size (arXiv 2510.05491, algorithm 1):

        M ← β₁ M + (1 − β₁) G;  O = NS(M);  v ← β₂ v + (1 − β₂) mean_columns(O²)
        Ô = O / (√v + ε);  W ← W − η λ W − 0.2 η √(mn) / ‖Ô‖_F · Ô

    ε stands outside the root, as in algorithm 2. β₁ is "momentum".
    """

    params_class = NorMuonParams

    def statistics(self, s: int, m: int, n: int, group: ParamGroup) -> dict[str, tuple[int, ...]]:
        return {"v": (s, m, 1)}

    def direction(self, x: Tensor, stack: Stack, group: ParamGroup) -> Tensor:
        o = orthogonal(x, group)
        v = stack.average("v", o.square().mean(-1, keepdim=True), group["beta2"])
        return with_rms(o.div_(v.sqrt_().add_(group["eps"])), group["rms"])


# ---------------------------------------------------------------------- Muon²


@dataclass(frozen=True, kw_only=True)
class Muon2Params(OrthogonalParams):
    """Parameters of `muon2`."""

    momentum: float = below_one(0.9, "β₁, decay rate of the momentum")
    beta2: float = below_one(0.95, "β₂, decay rate of the second moment")
    eps: float = param(1e-8, "ε, added to the root of the second moment", minimum=0.0)
    factored: bool = param(False, "keep only sums over rows and columns of the second moment (Muon²-F)")


class Muon2(MatrixMethod):
    """Momentum preconditioned as Adam's, then orthogonalised (arXiv 2604.09967, equations 2 to 6):

        M ← β₁ M + (1 − β₁) G;  V ← β₂ V + (1 − β₂) G²;  W ← W − η √(rows/columns) NS(M / (√V + ε))

    factored: r, c average the sums of G² over columns and rows, V = r cᵀ / Σ r. There is no bias correction. The paper
    fixes no β; defaults are those of its description. Its factor √(m/n) is Bernstein's √(fan-out/fan-in), hence rows
    over columns of a weight [out, in], also where that is below 1. Weight decay is decoupled (the equations have none).
    """

    params_class = Muon2Params

    def statistics(self, s: int, m: int, n: int, group: ParamGroup) -> dict[str, tuple[int, ...]]:
        return {"r": (s, m, 1), "c": (s, 1, n)} if group["factored"] else {"v": (s, m, n)}

    def direction(self, x: Tensor, stack: Stack, group: ParamGroup) -> Tensor:
        (rows, columns), beta2 = stack.shape, group["beta2"]
        squares = stack.of(stack.batch.grads).square()
        if group["factored"]:
            r = stack.average("r", squares.sum(-1, keepdim=True), beta2)
            c = stack.average("c", squares.sum(-2, keepdim=True), beta2)
            v = r / r.sum(-2, keepdim=True).clamp_min_(TINY) * c
        else:
            v = stack.average("v", squares, beta2)
        return orthogonal(x / v.sqrt_().add_(group["eps"]), group).mul_((rows / columns) ** 0.5)


SPECS = (
    OptimizerSpec(
        name="adamuon",
        family="orthogonal",
        summary="Muon with an element-wise second moment of the orthogonal direction, at AdamW's step size.",
        reference="AdaMuon: Adaptive Muon Optimizer, arXiv 2507.11005",
        params=AdaMuonParams,
        implementation="muon_adaptive:AdaMuon",
        state_bytes=floats(2),
        fallback=FALLBACK,
    ),
    OptimizerSpec(
        name="normuon",
        family="orthogonal",
        summary="Muon with rows of equal size, at AdamW's step size.",
        reference="NorMuon: Making Muon more efficient and scalable, arXiv 2510.05491",
        params=NorMuonParams,
        implementation="muon_adaptive:NorMuon",
        state_bytes=or_adamw(with_statistics(lambda params, m, n: m)),
        fallback=FALLBACK,
    ),
    OptimizerSpec(
        name="muon2",
        family="orthogonal",
        summary="Muon on momentum preconditioned by Adam's second moment, which may be factored.",
        reference="Muon²: Boosting Muon via Adaptive Second-Moment Preconditioning, arXiv 2604.09967",
        params=Muon2Params,
        implementation="muon_adaptive:Muon2",
        state_bytes=or_adamw(with_statistics(lambda params, m, n: m + n if params.factored else m * n)),
        fallback=FALLBACK,
    ),
)
