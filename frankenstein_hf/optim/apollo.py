"""APOLLO, APOLLO-Mini and Q-APOLLO for hidden matrices; AdamW trains everything else."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..configuration.component import param
from .base import Batch, FrankensteinOptimizer, ParamGroup, adam_moments
from .exact_state import seeded_generator
from .low_rank import ONE_SIDED, REST, LowRankParams, is_left
from .matrices import as_matrices, from_matrices, matrix_shape
from .quantized import dequantize, quantize, quantized_bytes
from .spec import OptimizerParams, OptimizerSpec, or_adamw

NORM_GROWTH = 1.01  # γ, largest growth of an update's norm from one step to the next
NORM_EPS = 1e-8  # added to norms in denominators, as in the authors' code
PARTS = ("codes", "scale", "offset")


@dataclass(frozen=True, kw_only=True)
class ApolloMiniParams(LowRankParams):
    """Parameters of `apollo_mini`."""

    scale: float = param(128.0, "updates are multiplied by the root of this", minimum=0.0)
    proj_type: str = param("std", "axis to project: the shorter, the longer or a fixed side", choices=ONE_SIDED)
    scale_front: bool = param(False, "multiply by the scale before the norm-growth limiter instead of after it")
    disable_nl: bool = param(False, "leave the norm-growth limiter out")
    seed: int = param(0, "of the random projections", minimum=0)


@dataclass(frozen=True, kw_only=True)
class ApolloParams(ApolloMiniParams):
    """Parameters of `apollo`."""

    rank: int = param(128, "r, rank of the projected gradient; at most the projected axis counts", minimum=1)
    scale: float = param(1.0, "updates are multiplied by the root of this", minimum=0.0)
    scale_type: str = param("channel", "one factor a channel or one a matrix", choices=("channel", "tensor"))


class Apollo(FrankensteinOptimizer):
    """The gradient scaled by how Adam would scale its random projection (arXiv 2412.05270, algorithm 1), m < n:

        R = P G with P ~ N(0, 1/r) [r, m], new every T steps;  M, V: moments of R;  R̃ = M / (√V + ε)
        s_j = ‖R̃[:, j]‖ / ‖R[:, j]‖ ("channel") or ‖R̃‖ / ‖R‖ ("tensor");  U = G diag(s)
        U ← U / max(‖U‖ / (γ ‖U_prev‖), 1), γ = 1.01;  W ← W − η √(1 − β₂ᵗ)/(1 − β₁ᵗ) √scale U

    and R = G Pᵀ, one s for each row, for m ≥ n. Bias corrections, √scale (the paper's α) and the limiter's place are
    those of the authors' code. P is drawn anew from the seed in every step instead of being stored, the rank is at most
    the projected axis, and a previous update of norm 0 limits nothing (it would for ever). Each matrix of a stack is on
    its own. APOLLO-Mini is rank 1 with one factor a matrix.
    """

    params_class: ClassVar[type[OptimizerParams]] = ApolloParams
    needs_kind = True

    def init_state(self, p: Tensor, g: Tensor, group: ParamGroup) -> dict[str, Any]:
        shape = projected_shape(p.shape, group.get("rank", 1), group["proj_type"], group["layout"])
        return self.init_moments(p, shape, group) | self._init_norm(p, shape[0], group)

    def init_moments(self, p: Tensor, shape: Sequence[int], group: ParamGroup) -> dict[str, Any]:
        """Moments of the projected gradient."""
        return {"m": p.new_zeros(shape), "v": p.new_zeros(shape)}

    def moments(self, batch: Batch, low: list[Tensor], group: ParamGroup) -> tuple[list[Tensor], list[Tensor]]:
        """M and V after `low` has entered them."""
        beta1, beta2 = group["betas"]
        adam_moments(batch, beta1, beta2, low)
        return batch["m"], batch["v"]

    def _init_norm(self, p: Tensor, stack: int, group: ParamGroup) -> dict[str, Any]:
        return {} if group["disable_nl"] else {"norm": p.new_zeros(stack, 1, 1)}

    def update(self, batch: Batch, group: ParamGroup) -> None:
        (beta1, beta2), t, rank, proj_type = group["betas"], batch.step, group.get("rank", 1), group["proj_type"]
        epoch = (t - 1) // group["update_proj_gap"]
        gradients = [as_matrices(g, group["layout"]) for g in batch.grads]
        left = [is_left(g.shape[1], g.shape[2], proj_type) for g in gradients]
        low = []
        for g, at_left, i in zip(gradients, left, batch.positions):
            p = projection(g, rank, at_left, group["seed"], epoch, i)
            low.append(p @ g if at_left else g @ p.mT)
        m, v = self.moments(batch, low, group)
        roots = torch._foreach_sqrt(v)
        torch._foreach_add_(roots, group["eps"])
        updates = []
        for state, g, r, normed, at_left in zip(batch.states, gradients, low, torch._foreach_div(m, roots), left):
            axes = (-2 if at_left else -1,) if group.get("scale_type", "tensor") == "channel" else (-2, -1)
            s = normed.norm(dim=axes, keepdim=True) / (r.norm(dim=axes, keepdim=True) + NORM_EPS)
            u = g * s
            if group["scale_front"]:
                u.mul_(group["scale"] ** 0.5)
            if not group["disable_nl"]:
                _limit(u, state["norm"])
            updates.append(u)
        batch.decay(group["lr"] * group["weight_decay"])
        size = group["lr"] * (1 - beta2**t) ** 0.5 / (1 - beta1**t)
        size *= 1.0 if group["scale_front"] else group["scale"] ** 0.5
        shaped = [from_matrices(u, p.shape, group["layout"]) for u, p in zip(updates, batch.params)]
        torch._foreach_add_(batch.params, shaped, alpha=-size)


def _limit(u: Tensor, previous: Tensor) -> None:
    """Divide u [S, m, n] so that its norms are at most γ times the previous ones, and keep these."""
    norm = u.norm(dim=(-2, -1), keepdim=True)
    limiter = (norm / (previous + NORM_EPS)).clamp_(min=NORM_GROWTH).div_(NORM_GROWTH)
    limiter.masked_fill_(previous == 0, 1.0)
    u.div_(limiter)
    previous.copy_(norm / limiter)


def projection(g: Tensor, rank: int, at_left: bool, seed: int, epoch: int, position: int) -> Tensor:
    """P [S, r, m] for gradients g [S, m, n] (or [S, r, n] if it goes to the right), entries N(0, 1/r)."""
    size = g.shape[1] if at_left else g.shape[2]
    r = min(rank, size)
    generator = seeded_generator(seed, epoch, position, device=g.device)
    return torch.randn(g.shape[0], r, size, generator=generator, dtype=g.dtype, device=g.device).mul_(r**-0.5)


def projected_shape(shape: Sequence[int], rank: int, proj_type: str, layout: str = "stack") -> tuple[int, int, int]:
    """Of R, for a parameter of `shape`."""
    stack, m, n = matrix_shape(shape, layout)
    return (stack, min(rank, m), n) if is_left(m, n, proj_type) else (stack, m, min(rank, n))


def _apollo_bytes(params: Any, shape: Sequence[int], kind: str) -> int:
    stack, rows, columns = projected_shape(shape, getattr(params, "rank", 1), params.proj_type)
    return 4 * stack * (2 * rows * columns + (not params.disable_nl))


class ApolloMini(Apollo):
    __doc__ = Apollo.__doc__
    params_class = ApolloMiniParams


# ---------------------------------------------------------------------- Q-APOLLO


@dataclass(frozen=True, kw_only=True)
class QApolloParams(ApolloParams):
    """Parameters of `q_apollo`."""

    quant_bits: int = param(8, "bits of a number in the moments", minimum=2, maximum=8)
    quant_group: int = param(128, "numbers that share a scale and an offset; 0: the whole tensor", minimum=0)


class QApollo(Apollo):
    """APOLLO whose moments M and √V are kept in a few bits, with a scale and an offset for each group of numbers.

    The paper's own Q-APOLLO quantises the weights, which is the model's business; this is the one of the project's
    source. Beyond that: √V instead of V, which halves the range in decades; groups instead of the whole tensor
    (`quant_group=0`); and stochastic rounding (from the seed), as a moment that decays by less than half a level would
    otherwise never move.
    """

    params_class = QApolloParams

    def init_moments(self, p: Tensor, shape: Sequence[int], group: ParamGroup) -> dict[str, Any]:
        nothing = quantize(p.new_zeros(shape), group["quant_bits"], group["quant_group"], seeded_generator(0))
        return {f"{name}_{part}": value.clone() for name in "mv" for part, value in nothing.items()}

    def moments(self, batch: Batch, low: list[Tensor], group: ParamGroup) -> tuple[list[Tensor], list[Tensor]]:
        (beta1, beta2), bits, size = group["betas"], group["quant_bits"], group["quant_group"]
        ms, vs = [], []
        for r, state, i in zip(low, batch.states, batch.positions):
            old = {
                name: dequantize(
                    {part: state[f"{name}_{part}"] for part in ("codes", "scale", "offset")}, r.shape, bits
                )
                for name in "mv"
            }
            m = old["m"].lerp_(r, 1 - beta1)
            v = old["v"].square_().mul_(beta2).addcmul_(r, r, value=1 - beta2)
            generator = seeded_generator(group["seed"], batch.step, i, 1, device=r.device)
            for name, value in (("m", m), ("v", v.sqrt())):
                for part, tensor in quantize(value, bits, size, generator).items():
                    state[f"{name}_{part}"] = tensor
            ms.append(m)
            vs.append(v)
        return ms, vs


def _q_apollo_bytes(params: QApolloParams, shape: Sequence[int], kind: str) -> int:
    stack, rows, columns = projected_shape(shape, params.rank, params.proj_type)
    moments = 2 * quantized_bytes(stack * rows * columns, params.quant_bits, params.quant_group)
    return moments + 4 * stack * (not params.disable_nl)


SPECS = (
    OptimizerSpec(
        name="apollo",
        family="low-rank",
        summary="Gradients scaled channel by channel as Adam would scale a random projection of them.",
        reference="APOLLO: SGD-like Memory, AdamW-level Performance, arXiv 2412.05270",
        params=ApolloParams,
        implementation="apollo:Apollo",
        state_bytes=or_adamw(_apollo_bytes, REST),
        fallback=REST,
        small_params={"rank": 2, "update_proj_gap": 3},
    ),
    OptimizerSpec(
        name="apollo_mini",
        family="low-rank",
        summary="APOLLO of rank 1: one scale for each matrix.",
        reference="APOLLO: SGD-like Memory, AdamW-level Performance, arXiv 2412.05270",
        params=ApolloMiniParams,
        implementation="apollo:ApolloMini",
        state_bytes=or_adamw(_apollo_bytes, REST),
        fallback=REST,
        small_params={"update_proj_gap": 3},
    ),
    OptimizerSpec(
        name="q_apollo",
        family="low-rank",
        summary="APOLLO with moments of two to eight bits.",
        reference="APOLLO: SGD-like Memory, AdamW-level Performance, arXiv 2412.05270",
        params=QApolloParams,
        implementation="apollo:QApollo",
        state_bytes=or_adamw(_q_apollo_bytes, REST),
        fallback=REST,
        small_params={"rank": 2, "update_proj_gap": 3, "quant_group": 8},
    ),
)
