"""Methods with less state than Adam: Lion, AdamPM (Adafactor stands with torch's own)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..configuration.component import param
from .base import Batch, FrankensteinOptimizer, ParamGroup, adam_denominator, zeros
from .spec import AdamParams, OptimizerParams, OptimizerSpec, below_one, floats

# ---------------------------------------------------------------------- Lion


@dataclass(frozen=True, kw_only=True)
class LionParams(OptimizerParams):
    """Parameters of `lion`."""

    lr: float = param(3e-4, "learning rate; three to ten times smaller than AdamW's", minimum=0.0)
    betas: tuple[float, float] = below_one((0.9, 0.99), "β₁ of the step and β₂ of the momentum")


class Lion(FrankensteinOptimizer):
    """The sign of an interpolated momentum (arXiv 2302.06675, algorithm 2):

    θ ← θ − η (sign(β₁ m + (1 − β₁) g) + λ θ);  m ← β₂ m + (1 − β₂) g
    """

    params_class = LionParams
    elementwise = True

    def init_state(self, p: Tensor, g: Tensor, group: ParamGroup) -> dict[str, Any]:
        return {"m": zeros(p)}

    def update(self, batch: Batch, group: ParamGroup) -> None:
        (beta1, beta2), m, g = group["betas"], batch["m"], batch.grads
        batch.decay(group["lr"] * group["weight_decay"])
        c = list(torch._foreach_lerp(m, g, 1 - beta1))
        torch._foreach_sign_(c)
        torch._foreach_add_(batch.params, c, alpha=-group["lr"])
        torch._foreach_lerp_(m, g, 1 - beta2)


# ---------------------------------------------------------------------- AdamPM


@dataclass(frozen=True, kw_only=True)
class AdamPMParams(AdamParams):
    """Parameters of `adampm`."""

    betas: tuple[float, float] = below_one((0.9, 0.95), "decay rates of the first and second moment")
    group_size: int = param(8, "s, neighbours that share a second moment", minimum=1)
    pooling: str = param("rows", "neighbours along a row or along a column", choices=("rows", "columns"))


class AdamPM(FrankensteinOptimizer):
    """Adam whose second moment is the mean over groups of s neighbours (arXiv 2610.24598, equations 1 to 4):

        v̄ ← β₂ v̄ + (1 − β₂) mean_s(g²);  θ ← θ − η m̂ / (√v̂ + ε), v̂ repeated over each group

    Groups lie along the rows of a weight [out, in] or along its columns; 1-D parameters have only one axis. An
    incomplete last group averages over what it has. s = 1 is AdamW.
    """

    params_class = AdamPMParams
    elementwise = True

    def init_state(self, p: Tensor, g: Tensor, group: ParamGroup) -> dict[str, Any]:
        return {"m": zeros(p), "v": p.new_zeros(pooled_shape(p.shape, group["group_size"], pooled_axis(group)))}

    def update(self, batch: Batch, group: ParamGroup) -> None:
        (beta1, beta2), s, pooling = group["betas"], group["group_size"], pooled_axis(group)
        lr, t = group["lr"], batch.step
        batch.decay(lr * group["weight_decay"])
        torch._foreach_lerp_(batch["m"], batch.grads, 1 - beta1)
        v = batch["v"]
        torch._foreach_lerp_(v, [_group_means(_groups_last(g, pooling), s) for g in batch.grads], 1 - beta2)
        inverse = adam_denominator(v, beta2, group["eps"], t)
        torch._foreach_reciprocal_(inverse)
        torch._foreach_mul_(inverse, -lr / (1 - beta1**t))
        for p, m, scale in zip(batch.params, batch["m"], inverse):
            _add_by_groups(_groups_last(p, pooling), _groups_last(m, pooling), scale, s)


def pooled_axis(group: ParamGroup) -> str:
    """The group's "pooling" as it is in memory: rows of a transposed weight are columns there."""
    other = {"rows": "columns", "columns": "rows"}
    return other[group["pooling"]] if group.get("layout") == "transpose" else group["pooling"]


def pooled_shape(shape: Sequence[int], s: int, pooling: str) -> tuple[int, ...]:
    """Shape of the pooled second moment of a parameter."""
    shape = tuple(shape) or (1,)
    if pooling == "columns" and len(shape) > 1:
        shape = (*shape[:-2], shape[-1], shape[-2])
    return (*shape[:-1], -(-shape[-1] // s))


def _groups_last(x: Tensor, pooling: str) -> Tensor:
    """A view with the pooled axis last."""
    if x.dim() == 0:
        return x.view(1)
    return x.movedim(-2, -1) if pooling == "columns" and x.dim() > 1 else x


def _group_means(g: Tensor, s: int) -> Tensor:
    """Means of g² over groups of s: […, n] -> […, ⌈n/s⌉]."""
    whole = g.shape[-1] - g.shape[-1] % s
    means = g[..., :whole].unflatten(-1, (whole // s, s)).square() @ g.new_full(
        (s,), 1 / s
    )  # `mean` takes twice as long
    return means if whole == g.shape[-1] else torch.cat([means, g[..., whole:].square().mean(-1, keepdim=True)], -1)


def _add_by_groups(p: Tensor, m: Tensor, scale: Tensor, s: int) -> None:
    """p […, n] += m · scale […, ⌈n/s⌉], the scale repeated over groups of s."""
    whole = p.shape[-1] - p.shape[-1] % s
    p[..., :whole].unflatten(-1, (whole // s, s)).addcmul_(
        m[..., :whole].unflatten(-1, (whole // s, s)), scale[..., : whole // s, None]
    )
    if whole < p.shape[-1]:
        p[..., whole:].addcmul_(m[..., whole:], scale[..., -1:])


SPECS = (
    OptimizerSpec(
        name="lion",
        family="memory-efficient",
        summary="Steps of equal size along the sign of the momentum.",
        reference="Symbolic Discovery of Optimization Algorithms, arXiv 2302.06675",
        params=LionParams,
        implementation="memory_efficient:Lion",
        state_bytes=floats(1),
    ),
    OptimizerSpec(
        name="adampm",
        family="memory-efficient",
        summary="AdamW whose second moment is shared by small groups of neighbours.",
        reference="AdamPM: Memory-Efficient LLM Optimization via Moment Pooling, arXiv 2610.24598",
        params=AdamPMParams,
        implementation="memory_efficient:AdamPM",
        state_bytes=lambda params, shape, kind: (
            4 * (math.prod(shape) + math.prod(pooled_shape(shape, params.group_size, params.pooling)))
        ),
        by_kind=True,
        small_params={"group_size": 3},
    ),
)
