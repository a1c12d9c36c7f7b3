"""What low-rank methods for hidden matrices share, and GaLore; AdamW trains everything else."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..configuration.component import param
from .base import Batch, FrankensteinOptimizer, ParamGroup, adam_denominator, adam_moments
from .decompositions import svd
from .matrices import as_matrices, from_matrices, matrix_shape
from .spec import HybridParams, OptimizerSpec, below_one, or_adamw

REST = frozenset({"table", "vector"})
ONE_SIDED = ("std", "reverse_std", "left", "right")


def is_left(m: int, n: int, proj_type: str) -> bool:
    """Whether P multiplies an [m, n] gradient from the left: "std" projects the shorter axis."""
    return proj_type == "left" or (proj_type == "std" and m < n) or (proj_type == "reverse_std" and m >= n)


@dataclass(frozen=True, kw_only=True)
class LowRankParams(HybridParams):
    """Of all low-rank methods."""

    lr: float = param(1e-2, "learning rate", minimum=0.0)
    betas: tuple[float, float] = below_one((0.9, 0.999), "decay rates of the projected first and second moment")
    eps: float = param(1e-6, "added to the root of the second moment", minimum=0.0)
    update_proj_gap: int = param(200, "T, steps between new projections", minimum=1)


# ---------------------------------------------------------------------- GaLore


@dataclass(frozen=True, kw_only=True)
class GaLoreParams(LowRankParams):
    """Parameters of `galore_adamw`."""

    rank: int = param(128, "r, rank of the projected gradient; at most the shorter axis counts", minimum=1)
    scale: float = param(0.25, "α, scale of the update", minimum=0.0)
    proj_type: str = param(
        "std", "side to project: the shorter axis, the longer, a fixed one or both", choices=(*ONE_SIDED, "full")
    )


class GaLore(FrankensteinOptimizer):
    """Adam on the gradient's leading singular directions (arXiv 2403.03507, algorithm 2), for W [m, n] with m < n:

        every T steps  P ← U[:, :r] of G = U Σ Vᵀ;  R = Pᵀ G
        M ← β₁ M + (1 − β₁) R;  V ← β₂ V + (1 − β₂) R²;  W ← W − η α P (M̂ / (√V̂ + ε))

    and R = G P with P = V[:, :r] for m ≥ n. As in the authors' code, "full" projects both sides and the moments survive
    a new P. Signs, which the decomposition leaves open, are such that the largest entry of each direction is positive,
    the same on every machine. Weight decay is decoupled. P is kept as "p_left" [m, r] or "p_right" [n, r].
    """

    params_class = GaLoreParams
    needs_kind = True

    def init_state(self, p: Tensor, g: Tensor, group: ParamGroup) -> dict[str, Any]:
        stack, m, n = matrix_shape(p.shape, group["layout"])
        r, sides = min(group["rank"], m, n), galore_sides(m, n, group["proj_type"])
        shape = stack, r if "left" in sides else m, r if "right" in sides else n
        state = {"m": p.new_zeros(shape), "v": p.new_zeros(shape)}
        return state | {f"p_{side}": p.new_zeros(stack, m if side == "left" else n, r) for side in sides}

    def update(self, batch: Batch, group: ParamGroup) -> None:
        (beta1, beta2), t = group["betas"], batch.step
        gradients = [as_matrices(g, group["layout"]) for g in batch.grads]
        if (t - 1) % group["update_proj_gap"] == 0:
            for g, state in zip(gradients, batch.states):
                _refresh(g, state, group["rank"])
        low = [_project(g, state) for g, state in zip(gradients, batch.states)]
        batch.decay(group["lr"] * group["weight_decay"])
        adam_moments(batch, beta1, beta2, low)
        updates = torch._foreach_div(batch["m"], adam_denominator(batch["v"], beta2, group["eps"], t))
        back = [
            from_matrices(_project_back(u, state), p.shape, group["layout"])
            for u, state, p in zip(updates, batch.states, batch.params)
        ]
        torch._foreach_add_(batch.params, back, alpha=-group["lr"] * group["scale"] / (1 - beta1**t))


def galore_sides(m: int, n: int, proj_type: str) -> tuple[str, ...]:
    """The sides GaLore projects."""
    if proj_type == "full":
        return "left", "right"
    return ("left",) if is_left(m, n, proj_type) else ("right",)


def _refresh(g: Tensor, state: dict[str, Any], rank: int) -> None:
    u, _, vh = svd(g)
    if "p_left" in state:
        state["p_left"].copy_(_with_signs(u[..., :rank]))
    if "p_right" in state:
        state["p_right"].copy_(_with_signs(vh.mT[..., :rank]))


def _with_signs(vectors: Tensor) -> Tensor:
    """Columns turned so that the largest entry of each is positive."""
    largest = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    return torch.where(largest < 0, -vectors, vectors)


def _project(g: Tensor, state: dict[str, Any]) -> Tensor:
    if "p_left" in state:
        g = state["p_left"].mT @ g
    return g @ state["p_right"] if "p_right" in state else g


def _project_back(r: Tensor, state: dict[str, Any]) -> Tensor:
    if "p_left" in state:
        r = state["p_left"] @ r
    return r @ state["p_right"].mT if "p_right" in state else r


def _galore_bytes(params: GaLoreParams, shape: Sequence[int], kind: str) -> int:
    stack, m, n = matrix_shape(shape)
    r, sides = min(params.rank, m, n), galore_sides(m, n, params.proj_type)
    moments = (r if "left" in sides else m) * (r if "right" in sides else n)
    return 4 * stack * (2 * moments + sum(r * (m if side == "left" else n) for side in sides))


SPECS = (
    OptimizerSpec(
        name="galore_adamw",
        family="low-rank",
        summary="Adam on the leading singular directions of hidden matrices' gradients.",
        reference="GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection, arXiv 2403.03507",
        params=GaLoreParams,
        implementation="low_rank:GaLore",
        state_bytes=or_adamw(_galore_bytes, REST),
        fallback=REST,
        small_params={"rank": 2, "update_proj_gap": 3},
    ),
)
