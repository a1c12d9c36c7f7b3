"""Muon on part of the momentum: Dion3 takes its largest rows, ROOT leaves its outliers out."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..configuration.component import param
from .base import Batch, ParamGroup
from .matrix_method import (
    ADJUST,
    FALLBACK,
    MatrixMethod,
    OrthogonalParams,
    Stack,
    accumulate,
    frobenius,
    in_bf16,
    scale_of,
    with_statistics,
)
from .newton_schulz import MUON, Triple, newton_schulz, schedule
from .spec import OptimizerSpec, below_one, floats, or_adamw

# ---------------------------------------------------------------------- Dion3


@dataclass(frozen=True, kw_only=True)
class Dion3Params(OrthogonalParams):
    """Parameters of `dion3`."""

    fraction: float = param(0.25, "f, share of the rows that are orthogonalised and moved", minimum=1e-6, maximum=1.0)
    normuon: bool = param(False, "divide rows by a running mean of their size")
    beta2: float = below_one(0.95, "β₂, decay rate of that mean")
    eps: float = param(1e-8, "added to its root", minimum=0.0)
    adjust_lr: str = param("none", "factor of the learning rate by shape, as muon's", choices=ADJUST)
    coefficients: str = param(
        "polar_express", "Newton–Schulz coefficients", choices=("polar_express", "muon", "quintic")
    )


class Dion3(MatrixMethod):
    """Muon on the k = ⌈f m⌉ largest rows of the shorter side; the others wait (arXiv 2608.11612):

        M ← M + G;  S = the k rows of largest ‖M_i‖₁;  O = NS(M_S)
        W ← (1 − η λ) W;  W_S ← W_S − η O;  M_S ← μ M_S

    normuon: v_i ← β₂ v_i + (1 − β₂) mean_j O_ij² for i ∈ S, Õ_i = O_i / (√v_i + ε), scaled back to ‖O‖_F. f = 1 is
    Muon without Nesterov. Newton–Schulz runs on the Gram matrix where that is cheaper. Where m > n, rows are columns.
    The five Polar Express triples have that paper's safety factor, 1.01.
    """

    params_class = Dion3Params

    def statistics(self, s: int, m: int, n: int, group: ParamGroup) -> dict[str, tuple[int, ...]]:
        return {"v": (s, min(m, n), 1)} if group["normuon"] else {}

    def signals(self, batch: Batch, group: ParamGroup) -> list[Tensor]:
        torch._foreach_add_(batch["m"], batch.grads)
        return batch["m"]

    def direction(self, x: Tensor, stack: Stack, group: ParamGroup) -> Tensor:
        m, n = stack.shape
        rows = x.mT if m > n else x  # the shorter side
        k = math.ceil(group["fraction"] * min(m, n))
        chosen = rows.abs().sum(-1).topk(k, sorted=False).indices.unsqueeze(-1)  # [S, k, 1]
        wide = chosen.expand(-1, -1, rows.shape[-1])
        taken, triples = rows.gather(1, wide), schedule(group["coefficients"], group["ns_steps"])
        o = newton_schulz(taken, triples, bf16=in_bf16(taken, group)).to(x.dtype)
        if group["normuon"]:
            o = self._even_rows(o, chosen, stack, group)
        step = torch.zeros_like(rows).scatter_(1, wide, o.mul_(scale_of(group["adjust_lr"], m, n)))
        left = torch.ones_like(rows[..., :1]).scatter_(1, chosen, group["momentum"])
        left = (left.mT if m > n else left).expand_as(x)
        torch._foreach_mul_([stack.batch.states[i]["m"] for i in stack.indices], stack.split(left))
        return step.mT if m > n else step

    def _even_rows(self, o: Tensor, chosen: Tensor, stack: Stack, group: ParamGroup) -> Tensor:
        v = stack.state("v")
        new = v.gather(1, chosen).lerp_(o.square().mean(-1, keepdim=True), 1 - group["beta2"])
        stack.keep("v", v.scatter_(1, chosen, new))
        even = o / new.sqrt().add_(group["eps"])
        return even.mul_(frobenius(o) / frobenius(even).clamp_min_(1e-30))


# ---------------------------------------------------------------------- ROOT

# (a, b, c) by shape: table 9 of the paper.
BY_SHAPE: dict[tuple[int, int], Triple] = {
    (2048, 2048): (3.3334, -4.2591, 1.7791),
    (4096, 4096): (3.3732, -4.6134, 2.0576),
    (8192, 8192): (3.3886, -4.9026, 2.3105),
    (3072, 2048): (2.9091, -3.8108, 1.8600),
    (4096, 2048): (2.7739, -3.4911, 1.6992),
    (8192, 2048): (2.5925, -3.0010, 1.4138),
    (16384, 2048): (2.7045, -3.2335, 1.5336),
}


@dataclass(frozen=True, kw_only=True)
class RootParams(OrthogonalParams):
    """Parameters of `root`."""

    percentile: float = param(0.90, "p: larger entries of the momentum are cut to this quantile", minimum=0, maximum=1)
    softthresh: bool = param(True, "cut outliers")
    ada_newton: bool = param(True, "coefficients calibrated for the shape, where the paper gives them")
    adjust_lr: str = param(
        "none",
        "factor of the learning rate by shape, as muon's; the paper's large runs: match_rms_adamw",
        choices=ADJUST,
    )


class Root(MatrixMethod):
    """Muon without outliers and with coefficients made for each shape (arXiv 2511.20626, equations 1 and 7 to 10):

        M ← μ M + G;  ε = quantile_p |M|;  O = sign(M) max(|M| − ε, 0);  W ← (1 − η λ) W − η NS(M − O)

    M − O is M clipped to ±ε; quantiles interpolate linearly. Shapes (either way round) outside the paper's table take
    Muon's coefficients. Weight decay is decoupled (the equations have none).
    """

    params_class = RootParams

    def signals(self, batch: Batch, group: ParamGroup) -> list[Tensor]:
        return accumulate(batch, group["momentum"])

    def direction(self, x: Tensor, stack: Stack, group: ParamGroup) -> Tensor:
        m, n = stack.shape
        if group["softthresh"]:
            bound = quantile(x.abs().flatten(1), group["percentile"])[:, None, None]
            x = torch.minimum(torch.maximum(x, -bound), bound)
        triple = BY_SHAPE.get((max(m, n), min(m, n)), MUON) if group["ada_newton"] else MUON
        return newton_schulz(x, (triple,) * group["ns_steps"], bf16=in_bf16(x, group))

    def scale(self, shape: tuple[int, int], group: ParamGroup) -> float:
        return scale_of(group["adjust_lr"], *shape)


def quantile(x: Tensor, p: float) -> Tensor:
    """`torch.quantile(x, p, dim=1)` of [S, N], for any N and without sorting."""
    at = p * (x.shape[1] - 1)
    low = math.floor(at)
    lower = x.kthvalue(low + 1, dim=1).values
    return lower if low == at else lower.lerp(x.kthvalue(low + 2, dim=1).values, at - low)


SPECS = (
    OptimizerSpec(
        name="dion3",
        family="orthogonal",
        summary="Muon on the largest rows of the momentum only; the others accumulate until their turn.",
        reference="Dion3: Full-stack orthogonal updates, arXiv 2608.11612",
        params=Dion3Params,
        implementation="muon_robust:Dion3",
        state_bytes=or_adamw(with_statistics(lambda params, m, n: min(m, n) if params.normuon else 0)),
        fallback=FALLBACK,
        small_params={"normuon": True},
    ),
    OptimizerSpec(
        name="root",
        family="orthogonal",
        summary="Muon with outliers of the momentum cut and Newton–Schulz calibrated for the shape.",
        reference="ROOT: Robust Orthogonalized Optimizer for Neural Network Training, arXiv 2511.20626",
        params=RootParams,
        implementation="muon_robust:Root",
        state_bytes=or_adamw(floats(1)),
        fallback=FALLBACK,
    ),
)
