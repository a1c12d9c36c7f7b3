"""Adam in the singular basis of the momentum: Conda."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..configuration.component import param
from .base import Batch, ParamGroup
from .decompositions import eigh, svd
from .matrix_method import MatrixMethod, Stack, with_statistics
from .spec import HybridParams, OptimizerSpec, below_one, or_adamw

VECTORS = frozenset({"vector"})


@dataclass(frozen=True, kw_only=True)
class CondaParams(HybridParams):
    """Parameters of `conda`."""

    lr: float = param(0.01, "learning rate", minimum=0.0)
    betas: tuple[float, float] = below_one((0.9, 0.99), "decay rates of the first and second moment")
    eps: float = param(1e-8, "ε, added to the root of the second moment", minimum=0.0)
    update_proj_gap: int = param(2000, "T, steps between singular value decompositions", minimum=1)
    scale: float = param(0.25, "α, factor of the learning rate", minimum=0.0)
    correct_bias: bool = param(True, "divide the moments by 1 − βᵗ")
    adamw_lr: float = param(3e-3, "learning rate of the parameters AdamW trains", minimum=0.0)


class Conda(MatrixMethod):
    """Adam's second moment taken in the singular basis of the momentum (arXiv 2509.24218), for m ≤ n:

        M ← β₁ M + (1 − β₁) G;  every T steps, from the first: Ū = left singular vectors of M
        N ← β₂ N + (1 − β₂) (Ūᵀ G)²;  W ← (1 − η λ) W − η α Ū ((Ūᵀ M̂) / (√N̂ + ε))

    for m > n with the right singular vectors from the right, as in the authors' code. All parameters of two axes and
    more, tables too; vectors by AdamW. N is kept where the basis changes. α and β are those of the paper's pretraining.
    """

    params_class = CondaParams

    def statistics(self, s: int, m: int, n: int, group: ParamGroup) -> dict[str, tuple[int, ...]]:
        r = min(m, n)
        return {"n": (s, r, max(m, n)), "u": (s, r, r)}

    def signals(self, batch: Batch, group: ParamGroup) -> list[Tensor]:
        torch._foreach_lerp_(batch["m"], batch.grads, 1 - group["betas"][0])
        return batch["m"]

    def direction(self, x: Tensor, stack: Stack, group: ParamGroup) -> Tensor:
        (beta1, beta2), t = group["betas"], stack.step
        tall = stack.shape[0] > stack.shape[1]
        g = stack.of(stack.batch.grads)
        if tall:
            x, g = x.mT, g.mT
        if (t - 1) % group["update_proj_gap"] == 0:
            u = left_basis(x)
            stack.keep("u", u)
        else:
            u = stack.state("u")
        second = stack.average("n", (u.mT @ g).square_(), beta2)
        corrections = (1 - beta1**t, 1 - beta2**t) if group["correct_bias"] else (1.0, 1.0)
        denominator = second.div_(corrections[1]).sqrt_().add_(group["eps"])
        step = (u @ (u.mT @ x).div_(denominator)).mul_(group["scale"] / corrections[0])
        return step.mT if tall else step


def left_basis(x: Tensor) -> Tensor:
    """Left singular vectors of wide matrices [S, m, n], reproducible up to signs where the rank is below m.

    Any basis of the vectors without a singular value would do, and rounding errors would pick one; two processes and
    one, say, would then differ. Here they diagonalise a fixed matrix D restricted to their space.
    """
    u, s, _ = svd(x)
    null = (s <= max(x.shape[-2:]) * torch.finfo(x.dtype).eps * s[:, :1])[:, None, :]  # the last columns of u
    within = u * null
    projection = within @ within.mT
    d = torch.linspace(1, 2, x.shape[1], dtype=x.dtype, device=x.device)
    return torch.where(null, eigh(projection @ (d[:, None] * projection)).eigenvectors, u)


SPECS = (
    OptimizerSpec(
        name="conda",
        family="orthogonal",
        summary="Adam in the singular basis of the momentum, for everything with two axes.",
        reference="Conda: Column-Normalized Adam for Training Large Language Models Faster, arXiv 2509.24218",
        params=CondaParams,
        implementation="conda:Conda",
        state_bytes=or_adamw(with_statistics(lambda params, m, n: m * n + min(m, n) ** 2), VECTORS),
        fallback=VECTORS,
        small_params={"update_proj_gap": 3},
    ),
)
