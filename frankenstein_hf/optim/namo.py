"""Muon with Adam-like step sizes from norms: NAMO and NAMO-D."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..configuration.component import param
from .base import Batch, ParamGroup
from .matrix_method import (
    FALLBACK,
    MatrixMethod,
    Stack,
    bf16_products,
    frobenius,
    orthogonal,
    with_statistics,
)
from .spec import HybridParams, OptimizerParams, OptimizerSpec, below_one, or_adamw


@dataclass(frozen=True, kw_only=True)
class NamoParams(HybridParams):
    """Parameters of `namo`."""

    lr: float = param(0.012, "learning rate", minimum=0.0)
    betas: tuple[float, float] = below_one((0.95, 0.99), "μ₁ of the momentum and μ₂ of the squared norm")
    eps: float = param(1e-8, "ε, added to the root of the squared norm", minimum=0.0)
    ns_steps: int = param(5, "Newton–Schulz steps", minimum=1, maximum=20)
    ns_bf16: bool | None = bf16_products()
    adamw_lr: float = param(3e-3, "learning rate of the parameters AdamW trains", minimum=0.0)


class Namo(MatrixMethod):
    """Muon whose step shrinks with the noise of the gradient, matrix by matrix (arXiv 2602.17080, algorithm 1):

        M ← μ₁ M + (1 − μ₁) G;  v ← μ₂ v + (1 − μ₂) ‖G‖_F²;  O = NS(M)
        α = √(1 − μ₂ᵗ) / (1 − μ₁ᵗ) · ‖M‖_F / (√v + ε);  W ← W − η α (O + λ W)

    Weight decay is scaled by α too. The authors' release can also do Nesterov momentum, clamp α and scale by shape; the
    algorithm has none of these.
    """

    params_class: ClassVar[type[OptimizerParams]] = NamoParams
    decays = False

    def statistics(self, s: int, m: int, n: int, group: ParamGroup) -> dict[str, tuple[int, ...]]:
        return {"v": (s, 1, 1)}

    def signals(self, batch: Batch, group: ParamGroup) -> list[Tensor]:
        torch._foreach_lerp_(batch["m"], batch.grads, 1 - group["betas"][0])
        return batch["m"]

    def norms(self, x: Tensor) -> Tensor:
        """What is compared of momentum and gradient."""
        return frobenius(x)

    def step_sizes(self, x: Tensor, stack: Stack, group: ParamGroup) -> Tensor:
        """α from the momentum x."""
        (mu1, mu2), t = group["betas"], stack.step
        v = stack.average("v", self.norms(stack.of(stack.batch.grads)).square_(), mu2)
        return self.norms(x).div_(v.sqrt_().add_(group["eps"])).mul_((1 - mu2**t) ** 0.5 / (1 - mu1**t))

    def direction(self, x: Tensor, stack: Stack, group: ParamGroup) -> Tensor:
        alpha = self.step_sizes(x, stack, group)
        o = orthogonal(x, group)
        if group["weight_decay"]:
            o = o.add_(stack.of(stack.batch.params), alpha=group["weight_decay"])
        return o.mul_(alpha)


@dataclass(frozen=True, kw_only=True)
class NamoDParams(NamoParams):
    """Parameters of `namo_d`."""

    lr: float = param(0.009, "learning rate", minimum=0.0)
    clamp: float = param(0.1, "c: step sizes stay between c and 1/c of their mean", minimum=1e-6, maximum=1.0)


class NamoD(Namo):
    """NAMO with a step size for every column (arXiv 2602.17080, algorithm 2):

        v_j ← μ₂ v_j + (1 − μ₂) ‖G_:j‖²;  d_j = √(1 − μ₂ᵗ) / (1 − μ₁ᵗ) · ‖M_:j‖ / (√v_j + ε)
        d̃ = min(max(d, c d̄), d̄/c), d̄ = mean d;  W ← W − η (O + λ W) diag(d̃)

    c is the paper's for 124 M parameters; it takes 0.9 for 355 M, and the authors' release has 0.75.
    """

    params_class = NamoDParams

    def statistics(self, s: int, m: int, n: int, group: ParamGroup) -> dict[str, tuple[int, ...]]:
        return {"v": (s, 1, n)}

    def norms(self, x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, dim=-2, keepdim=True)

    def step_sizes(self, x: Tensor, stack: Stack, group: ParamGroup) -> Tensor:
        d, c = super().step_sizes(x, stack, group), group["clamp"]
        mean = d.mean(-1, keepdim=True)
        return torch.minimum(torch.maximum(d, c * mean), mean / c)


SPECS = (
    OptimizerSpec(
        name="namo",
        family="orthogonal",
        summary="Muon with one Adam-like step size a matrix, from the norms of momentum and gradient.",
        reference="Adam Improves Muon: Adaptive Moment Estimation with Orthogonalized Momentum, arXiv 2602.17080",
        params=NamoParams,
        implementation="namo:Namo",
        state_bytes=or_adamw(with_statistics(lambda params, m, n: 1)),
        fallback=FALLBACK,
    ),
    OptimizerSpec(
        name="namo_d",
        family="orthogonal",
        summary="Muon with one Adam-like step size a column, clamped around their mean.",
        reference="Adam Improves Muon: Adaptive Moment Estimation with Orthogonalized Momentum, arXiv 2602.17080",
        params=NamoDParams,
        implementation="namo:NamoD",
        state_bytes=or_adamw(with_statistics(lambda params, m, n: n)),
        fallback=FALLBACK,
        small_params={"clamp": 0.9},
    ),
)
