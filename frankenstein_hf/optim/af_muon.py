"""Muon without AdamW: AF-Muon."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..configuration.component import param
from .base import Batch, ParamGroup, zeros
from .matrix_method import MatrixMethod, Stack, accumulate, bf16_products, orthogonal, scale_of
from .spec import OptimizerParams, OptimizerSpec, below_one, floats

ROWS = 8192  # of a table treated at a time


@dataclass(frozen=True, kw_only=True)
class AFMuonParams(OptimizerParams):
    """Parameters of `af_muon`."""

    lr: float = param(0.02, "η_M, learning rate of matrices; the others' are multiples of it", minimum=0.0)
    momentum: float = below_one(0.95, "μ, decay rate of the momentum")
    ns_steps: int = param(5, "Newton–Schulz steps", minimum=1, maximum=20)
    ns_bf16: bool | None = bf16_products()
    cap: float = param(
        3.0, "c, largest entry of a table's step; 1: signs, √d and more: rows of equal size", minimum=1.0
    )
    table_scale: float = param(0.5, "s, factor of the tables' learning rate", minimum=0.0)
    radius_ratio: float = param(60.0, "ρ_out/ρ_hid, another one", minimum=0.0)
    vector_lr_ratio: float = param(0.05, "η_vec/η_M, of vectors' learning rate", minimum=0.0)
    eps: float = param(1e-8, "ε, least root mean square of a vector", minimum=0.0)


class AFMuon(MatrixMethod):
    """A geometry for each kind of parameter, and one momentum (arXiv 2610.01395):

        matrices  M ← μ M + (1 − μ) G;  W ← W − η_M √max(1, m/n) NS((1 − μ) G + μ M)
        tables    B ← μ B + G;  W ← W − η_M (ρ_out/ρ_hid) s/d · L_c(B), row by row
        vectors   B ← μ B + G;  W ← W − η_vec B / max(RMS(B), ε)

    See `capped_rows` for L_c. The paper's tied table stands here for every table. η_vec is given as a multiple of η_M,
    so that a schedule moves both. Weight decay is decoupled; tables and vectors have none unless asked for.
    """

    params_class = AFMuonParams

    def init_state(self, p: Tensor, g: Tensor, group: ParamGroup) -> dict[str, Any]:
        return {"m": zeros(p)}

    def signals(self, batch: Batch, group: ParamGroup) -> list[Tensor]:
        m = super().signals(batch, group)
        return list(torch._foreach_lerp(batch.grads, m, group["momentum"]))

    def direction(self, x: Tensor, stack: Stack, group: ParamGroup) -> Tensor:
        return orthogonal(x, group)

    def scale(self, shape: tuple[int, int], group: ParamGroup) -> float:
        return scale_of("original", *shape)

    def update(self, batch: Batch, group: ParamGroup) -> None:
        if group["kind"] == "matrix":
            super().update(batch, group)
            return
        lr = group["lr"]
        batch.decay(lr * group["weight_decay"])
        m = accumulate(batch, group["momentum"])
        if group["kind"] == "table":
            for p, b in zip(batch.params, m):
                d = p.shape[-1]
                step = lr * group["radius_ratio"] * group["table_scale"] / d
                for rows, own in zip(p.reshape(-1, d).split(ROWS), b.reshape(-1, d).split(ROWS)):
                    rows.sub_(capped_rows(own, group["cap"]), alpha=step)
        else:
            sizes = [x.square().mean().sqrt_().clamp_min_(group["eps"]) for x in m]
            torch._foreach_addcdiv_(batch.params, m, sizes, -lr * group["vector_lr_ratio"])


def capped_rows(b: Tensor, c: float) -> Tensor:
    """L_c: u = sign(b) min(c, τ |b|) in each row, with τ such that ‖u‖² = min(d, c² · nonzeros).

    The paper finds τ by bisection. Sorted, it is exact: with the k largest entries at the cap, τ² is what is left of
    the square of the norm, d − k c², over the squares of the other entries; k is the least for which none exceeds c.

    Args:
        b: [rows, d].
        c: The cap, at least 1.
    """
    d = b.shape[-1]
    b = b / b.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(b.dtype).tiny)
    squares = b.square().sort(-1).values
    capped = torch.arange(d - 1, -1, -1, device=b.device, dtype=b.dtype)  # entries above each one
    left = (d - c * c * capped).clamp_min_(0)
    sums = squares.cumsum(-1).clamp_min_(torch.finfo(b.dtype).tiny)
    fits = squares * left <= c * c * sums
    last = torch.where(fits, d - 1 - capped, 0).amax(-1, keepdim=True).long()
    tau = (left.expand_as(sums).gather(-1, last) / sums.gather(-1, last)).sqrt_()
    saturated = c * c * (b != 0).sum(-1, keepdim=True) <= d
    return torch.where(saturated, c * b.sign(), (tau * b).clamp_(-c, c))


SPECS = (
    OptimizerSpec(
        name="af_muon",
        family="orthogonal",
        summary="Muon for matrices, capped rows for tables, normalised momentum for vectors; no second moments.",
        reference="AF-Muon: An AdamW-free Muon optimizer for tied-embedding models, arXiv 2610.01395",
        params=AFMuonParams,
        implementation="af_muon:AFMuon",
        state_bytes=floats(1),
        by_kind=True,
    ),
)
