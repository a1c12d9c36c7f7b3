"""Kronecker-factored preconditioners: Shampoo, and SOAP, which runs Adam in Shampoo's eigenbasis."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..configuration.component import param
from .base import Batch, FrankensteinOptimizer, ParamGroup, adam_denominator, zeros
from .decompositions import eigh
from .matrices import as_matrices, from_matrices, matrix_shape
from .spec import AdamParams, OptimizerParams, OptimizerSpec, below_one, floats

TIE_BREAK = 1e-6  # share of the mean eigenvalue by which axes are told apart where the statistics do not


def axes_of(m: int, n: int, limit: int) -> str:
    """The axes of an [m, n] matrix that are preconditioned: "LR", "L", "R" or none."""
    return ("L" if m <= limit else "") + ("R" if n <= limit else "")


def gram(g: Tensor, axis: str) -> Tensor:
    """G Gᵀ for "L", Gᵀ G for "R"; [S, m, n] -> [S, m, m] or [S, n, n]."""
    return g @ g.mT if axis == "L" else g.mT @ g


def _kronecker_bytes(params: Any, shape: Sequence[int], kind: str) -> int:
    """Statistics and what is made of them, for each axis."""
    stack, m, n = matrix_shape(shape)
    sides = {"L": m, "R": n}
    return 4 * stack * sum(2 * sides[axis] ** 2 for axis in axes_of(m, n, params.max_precond_dim))


# ---------------------------------------------------------------------- Shampoo


@dataclass(frozen=True, kw_only=True)
class ShampooParams(OptimizerParams):
    """Parameters of `shampoo`."""

    lr: float = param(3e-2, "learning rate", minimum=0.0)
    eps: float = param(1e-6, "ε, L and R begin as ε I", minimum=0.0)
    beta: float = param(1.0, "L ← β L + (1 − β) G Gᵀ; 1: the sum L + G Gᵀ of the paper", minimum=0.0, maximum=1.0)
    momentum: float = below_one(0.0, "μ in M ← μ M + update")
    precondition_frequency: int = param(10, "K, steps between eigendecompositions", minimum=1)
    max_precond_dim: int = param(10000, "longer axes are left alone", minimum=0)


class Shampoo(FrankensteinOptimizer):
    """Full-matrix AdaGrad, factored by axes (arXiv 1802.09568, algorithms 1 and 2), for W [m, n]:

        L ← L + G Gᵀ;  R ← R + Gᵀ G;  W ← W − η L^(−1/4) G R^(−1/4);  L₀ = R₀ = ε I

    Roots by eigendecomposition, every K steps and in each of the first K: the first gradients span few directions, and
    roots of them alone would blow up the others by ε^(−1/2). Eigenvalues count as at least ε, which matters for β < 1.
    The exponent is −1/(2k) for k preconditioned axes, so −1/2 if one axis is longer than `max_precond_dim`. Vectors,
    and matrices with no short axis, have the diagonal h ← h + G², h₀ = ε, instead: W ← W − η G/√h. Each matrix of a
    stack is on its own. Weight decay is decoupled.
    """

    params_class = ShampooParams
    needs_kind = True

    def init_state(self, p: Tensor, g: Tensor, group: ParamGroup) -> dict[str, Any]:
        state = {"m": zeros(p)} if group["momentum"] else {}
        axes = ""
        if group["kind"] != "vector":
            stack, m, n = matrix_shape(p.shape, group["layout"])
            axes = axes_of(m, n, group["max_precond_dim"])
            for axis in axes:
                eye = torch.eye(m if axis == "L" else n, dtype=p.dtype, device=p.device).repeat(stack, 1, 1)
                state |= {axis: eye * group["eps"], f"root_{axis}": eye}
        return state if axes else state | {"h": torch.full_like(p, group["eps"])}

    def update(self, batch: Batch, group: ParamGroup) -> None:
        renew = batch.step <= group["precondition_frequency"] or batch.step % group["precondition_frequency"] == 0
        beta, mu = group["beta"], group["momentum"]
        updates = []
        for state, g in zip(batch.states, batch.grads):
            if "h" in state:
                accumulate(state["h"], g.square(), beta)
                updates.append(g / state["h"].sqrt().clamp_(min=torch.finfo(g.dtype).tiny))
                continue
            u = matrices = as_matrices(g, group["layout"])
            axes = [axis for axis in "LR" if axis in state]
            for axis in axes:
                accumulate(state[axis], gram(matrices, axis), beta)
                if renew:
                    state[f"root_{axis}"] = inverse_root(state[axis], 2 * len(axes), group["eps"])
                u = state["root_L"] @ u if axis == "L" else u @ state["root_R"]
            updates.append(from_matrices(u, g.shape, group["layout"]))
        if mu:
            torch._foreach_mul_(batch["m"], mu)
            torch._foreach_add_(batch["m"], updates)
            updates = batch["m"]
        batch.decay(group["lr"] * group["weight_decay"])
        torch._foreach_add_(batch.params, updates, alpha=-group["lr"])


def accumulate(total: Tensor, new: Tensor, beta: float) -> None:
    """The sum for β = 1, the average otherwise."""
    total.add_(new) if beta == 1 else total.lerp_(new, 1 - beta)


def inverse_root(a: Tensor, power: int, least: float) -> Tensor:
    """A^(−1/power) of symmetric matrices [S, m, m], with eigenvalues of at least `least`."""
    values, vectors = eigh(a)
    values.clamp_(min=max(least, torch.finfo(a.dtype).tiny)).pow_(-1 / power)
    return (vectors * values[:, None, :]) @ vectors.mT


def _shampoo_bytes(params: ShampooParams, shape: Sequence[int], kind: str) -> int:
    kronecker = 0 if kind == "vector" else _kronecker_bytes(params, shape, kind)
    return (kronecker or 4 * math.prod(shape)) + (4 * math.prod(shape) if params.momentum else 0)


# ---------------------------------------------------------------------- SOAP


@dataclass(frozen=True, kw_only=True)
class SoapParams(AdamParams):
    """Parameters of `soap`."""

    lr: float = param(3e-3, "learning rate", minimum=0.0)
    betas: tuple[float, float] = below_one((0.95, 0.95), "decay rates of the first and second moment")
    shampoo_beta: float | None = below_one(None, "decay rate of L and R; None: β₂")
    accumulate: bool = param(False, "sum L and R up instead of averaging them")
    precondition_frequency: int = param(10, "f, steps between renewals of the basis", minimum=1)
    refresh: str = param(
        "qr", "how: a step of power iteration and QR, or an eigendecomposition", choices=("qr", "eigh")
    )
    max_precond_dim: int = param(10000, "longer axes are not rotated", minimum=0)


class Soap(FrankensteinOptimizer):
    """Adam in the eigenbasis of Shampoo's preconditioner (arXiv 2409.11321, algorithms 3 and 4), for W [m, n]:

        G' = Q_Lᵀ G Q_R;  M ← β₁ M + (1 − β₁) G;  M' = Q_Lᵀ M Q_R;  V ← β₂ V + (1 − β₂) G'²
        W ← W − η Q_L (M̂' / (√V̂ + ε)) Q_Rᵀ;  L ← β L + (1 − β) G Gᵀ;  R ← β R + (1 − β) Gᵀ G
        every f steps  Q_L ← QR(L Q_L), Q_R ← QR(R Q_R), columns and V sorted by their eigenvalues

    As in the authors' code, the first gradient only sets L, R and, by eigendecomposition, the basis. L and R get a
    diagonal of 10⁻⁶ of their mean, falling along the axis, before they are decomposed: without it rounding errors would
    decide the basis of directions no gradient has shown. Vectors have no basis: Adam, a step late. Weight decay is
    decoupled; each matrix of a stack is on its own.
    """

    params_class = SoapParams
    needs_kind = True

    def init_state(self, p: Tensor, g: Tensor, group: ParamGroup) -> dict[str, Any]:
        state = {"m": zeros(p), "v": zeros(p)}
        if group["kind"] != "vector":
            stack, m, n = matrix_shape(p.shape, group["layout"])
            for axis in axes_of(m, n, group["max_precond_dim"]):
                size = m if axis == "L" else n
                state |= {axis: p.new_zeros(stack, size, size), f"Q_{axis}": p.new_zeros(stack, size, size)}
        return state

    def update(self, batch: Batch, group: ParamGroup) -> None:
        (beta1, beta2), t, layout = group["betas"], batch.step - 1, group["layout"]
        if t > 0:
            rotated = [_rotate(g, state, layout) for g, state in zip(batch.grads, batch.states)]
            torch._foreach_lerp_(batch["m"], batch.grads, 1 - beta1)
            torch._foreach_mul_(batch["v"], beta2)
            torch._foreach_addcmul_(batch["v"], rotated, rotated, 1 - beta2)
            updates = [_rotate(m, state, layout) for m, state in zip(batch["m"], batch.states)]
            updates = list(torch._foreach_div(updates, adam_denominator(batch["v"], beta2, group["eps"], t)))
            updates = [_rotate(u, state, layout, back=True) for u, state in zip(updates, batch.states)]
            batch.decay(group["lr"] * group["weight_decay"])
            torch._foreach_add_(batch.params, updates, alpha=-group["lr"] / (1 - beta1**t))
        beta = beta2 if group["shampoo_beta"] is None else group["shampoo_beta"]
        for g, state in zip(batch.grads, batch.states):
            for axis in "LR":
                if axis in state:
                    accumulate(state[axis], gram(as_matrices(g, layout), axis), 1 if group["accumulate"] else beta)
                    if t % group["precondition_frequency"] == 0:
                        _renew(state, axis, group["refresh"] if t > 0 else "eigh", layout)


def _rotate(x: Tensor, state: dict[str, Any], layout: str, back: bool = False) -> Tensor:
    """Q_Lᵀ X Q_R, or Q_L X Q_Rᵀ, in the parameter's shape."""
    if "L" not in state and "R" not in state:
        return x
    y = as_matrices(x, layout)
    if "L" in state:
        y = (state["Q_L"] if back else state["Q_L"].mT) @ y
    if "R" in state:
        y = y @ (state["Q_R"].mT if back else state["Q_R"])
    return from_matrices(y, x.shape, layout)


def _renew(state: dict[str, Any], axis: str, how: str, layout: str) -> None:
    """A new basis of the axis, by falling eigenvalues."""
    a = with_ties_broken(state[axis])
    if how == "eigh":
        state[f"Q_{axis}"] = eigh(a).eigenvectors.flip(-1).contiguous()
        return
    q = state[f"Q_{axis}"]
    a_q = a @ q
    order = (q * a_q).sum(-2).argsort(-1, descending=True)  # [S, size]
    state[f"Q_{axis}"] = torch.linalg.qr(a_q.take_along_dim(order[:, None, :], -1)).Q
    v = as_matrices(state["v"], layout)
    chosen = v.take_along_dim(order[:, :, None], -2) if axis == "L" else v.take_along_dim(order[:, None, :], -1)
    state["v"].copy_(from_matrices(chosen, state["v"].shape, layout))


def with_ties_broken(a: Tensor) -> Tensor:
    """A plus a falling diagonal, so small that only equal eigenvalues notice."""
    diagonal = a.diagonal(dim1=-2, dim2=-1)
    falling = torch.linspace(1, 1 / a.shape[-1], a.shape[-1], dtype=a.dtype, device=a.device)
    return a + torch.diag_embed(TIE_BREAK * diagonal.mean(-1, keepdim=True) * falling)


def _soap_bytes(params: SoapParams, shape: Sequence[int], kind: str) -> int:
    return floats(2)(params, shape, kind) + (0 if kind == "vector" else _kronecker_bytes(params, shape, kind))


SPECS = (
    OptimizerSpec(
        name="shampoo",
        family="second-order",
        summary="AdaGrad with a full preconditioner for each axis of a matrix.",
        reference="Shampoo: Preconditioned Stochastic Tensor Optimization, arXiv 1802.09568",
        params=ShampooParams,
        implementation="second_order:Shampoo",
        state_bytes=_shampoo_bytes,
        by_kind=True,
        small_params={"precondition_frequency": 3},
    ),
    OptimizerSpec(
        name="soap",
        family="second-order",
        summary="Adam in the eigenbasis of Shampoo's preconditioner.",
        reference="SOAP: Improving and Stabilizing Shampoo using Adam, arXiv 2409.11321",
        params=SoapParams,
        implementation="second_order:Soap",
        state_bytes=_soap_bytes,
        by_kind=True,
        small_params={"precondition_frequency": 3},
    ),
)
