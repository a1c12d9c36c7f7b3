"""Orthogonalised momentum: Muon and Turbo-Muon."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..configuration.component import param
from .base import Batch, ParamGroup
from .matrix_method import ADJUST, FALLBACK, MatrixMethod, OrthogonalParams, Stack, in_bf16, scale_of
from .newton_schulz import COEFFICIENTS, CUBIC, Triple, newton_schulz, schedule
from .spec import OptimizerParams, OptimizerSpec, floats, or_adamw

COEFFICIENT_SETS = tuple(COEFFICIENTS)


@dataclass(frozen=True, kw_only=True)
class MuonParams(OrthogonalParams):
    """Parameters of `muon`."""

    nesterov: bool = param(True, "orthogonalise (1 − μ) g + μ m instead of m")
    adjust_lr: str = param("original", "factor of the learning rate by shape, as in torch.optim.Muon", choices=ADJUST)
    coefficients: str = param("muon", "Newton–Schulz coefficients", choices=COEFFICIENT_SETS)
    eps: float = param(1e-7, "least norm a matrix is divided by", minimum=0.0)


class Muon(MatrixMethod):
    """Momentum with all singular values brought near 1 (Keller Jordan's Muon; torch.optim.Muon):

        m ← μ m + (1 − μ) g;  O = NS((1 − μ) g + μ m);  W ← (1 − η λ) W − η s O

    s is √max(1, rows/columns), or 0.2 √max(rows, columns) to match AdamW's step (arXiv 2502.16982). The matrix
    products are in bf16, as torch's, where the machine is faster at that, otherwise in the parameters' precision: see
    `ns_bf16`. The often quoted shortcut without momentum and with the polynomial 3/2 X − 1/2 X XᵀX is
    momentum=0, coefficients="cubic"; it leaves small singular values small.
    """

    params_class: ClassVar[type[OptimizerParams]] = MuonParams

    def signals(self, batch: Batch, group: ParamGroup) -> list[Tensor]:
        m = super().signals(batch, group)
        return list(torch._foreach_lerp(batch.grads, m, group["momentum"])) if group["nesterov"] else m

    def direction(self, x: Tensor, stack: Stack, group: ParamGroup) -> Tensor:
        triples = schedule(group["coefficients"], group["ns_steps"])
        return self.orthogonalise(x, triples, group)

    def scale(self, shape: tuple[int, int], group: ParamGroup) -> float:
        return scale_of(group["adjust_lr"], *shape)

    def orthogonalise(self, x: Tensor, triples: tuple[Triple, ...], group: ParamGroup) -> Tensor:
        """Newton–Schulz with these coefficients."""
        return newton_schulz(x, triples, eps=group["eps"], bf16=in_bf16(x, group))


@dataclass(frozen=True, kw_only=True)
class TurboMuonParams(MuonParams):
    """Parameters of `turbo_muon`."""

    ns_steps: int = param(4, "Newton–Schulz steps", minimum=1, maximum=20)
    coefficients: str = param(
        "turbo", "Newton–Schulz coefficients; turbo: quintic without its first step", choices=COEFFICIENT_SETS
    )
    preconditioner: str = param(
        "aol", "what comes before them; cubic: a step 3/2 X − 1/2 X XᵀX from X / ‖X‖", choices=("aol", "cubic")
    )


class TurboMuon(Muon):
    """Muon from a better start, with one step less (arXiv 2512.04632): before Newton–Schulz

        X ← S X,  S = diag((Σ_j |X Xᵀ|_ij)^−½)

    over the shorter side of X; the singular values are then at most 1 and mostly near it, and X Xᵀ serves the first
    step too. Of the published coefficients those that keep the sign at σ = 1, which matrices of one row have exactly.
    """

    params_class = TurboMuonParams

    def orthogonalise(self, x: Tensor, triples: tuple[Triple, ...], group: ParamGroup) -> Tensor:
        if group["preconditioner"] == "cubic":
            return super().orthogonalise(x, (CUBIC, *triples), group)
        return newton_schulz(x, triples, eps=group["eps"], bf16=in_bf16(x, group), almost_orthogonal=True)


SPECS = (
    OptimizerSpec(
        name="muon",
        family="orthogonal",
        summary="Momentum orthogonalised by Newton–Schulz steps; everything but hidden matrices by AdamW.",
        reference="Muon: An optimizer for hidden layers in neural networks, kellerjordan.github.io/posts/muon",
        params=MuonParams,
        implementation="muon:Muon",
        state_bytes=or_adamw(floats(1)),
        fallback=FALLBACK,
    ),
    OptimizerSpec(
        name="turbo_muon",
        family="orthogonal",
        summary="Muon whose matrices are rescaled to near orthogonality first, in four steps instead of five.",
        reference="Turbo-Muon: Accelerating Orthogonality-Based Optimization with Pre-Conditioning, arXiv 2512.04632",
        params=TurboMuonParams,
        implementation="muon:TurboMuon",
        state_bytes=or_adamw(floats(1)),
        fallback=FALLBACK,
    ),
)
