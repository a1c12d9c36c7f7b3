"""What methods for weight matrices share: stacks of equal shapes, momentum, scales of the learning rate."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..configuration.component import param
from .base import Batch, FrankensteinOptimizer, ParamGroup, zeros
from .matrices import as_matrices, by_shape, from_matrices, matrix_shape
from .newton_schulz import LARGE, newton_schulz, prefers_bf16, schedule
from .spec import HybridParams, below_one

FALLBACK = frozenset({"table", "vector"})
ADJUST = ("original", "match_rms_adamw", "none")


def bf16_products() -> Any:
    """The parameter of methods whose Newton–Schulz steps may be taken in bf16."""
    return param(
        None,
        "multiply in bf16, as torch.optim.Muon does; None: on accelerators, and for large matrices on a CPU that a "
        "measurement at the first step finds faster at it (the choice is saved with the state)",
    )


@dataclass(frozen=True, kw_only=True)
class OrthogonalParams(HybridParams):
    """Of methods that orthogonalise a momentum."""

    lr: float = param(0.02, "learning rate", minimum=0.0)
    momentum: float = below_one(0.95, "decay rate of the momentum")
    ns_steps: int = param(5, "Newton–Schulz steps", minimum=1, maximum=20)
    ns_bf16: bool | None = bf16_products()
    adamw_lr: float = param(3e-3, "learning rate of the parameters AdamW trains", minimum=0.0)


def scale_of(adjust_lr: str, m: int, n: int) -> float:
    """The factor of the learning rate of a matrix [m, n], as in `torch.optim.Muon`.

    "original": √max(1, m/n), Keller Jordan's; "match_rms_adamw": 0.2 √max(m, n), Moonlight's, for AdamW's rates.
    """
    if adjust_lr == "original":
        return max(1.0, m / n) ** 0.5
    return 0.2 * max(m, n) ** 0.5 if adjust_lr == "match_rms_adamw" else 1.0


class Stack:
    """The parameters of a batch whose matrices have the same shape.

    Attributes:
        batch: All parameters.
        indices: Positions in the batch.
        shape: (m, n).
        step: Which update this is, from 1.
    """

    def __init__(self, batch: Batch, indices: list[int], shape: tuple[int, int], layout: str) -> None:
        self.batch, self.indices, self.shape, self.step = batch, indices, shape, batch.step
        self.layout = layout
        self.sizes = [batch.params[i].numel() // (shape[0] * shape[1]) for i in indices]

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The stack's own among the tensors of the batch, as [S, m, n]; not to be written to."""
        own = [as_matrices(tensors[i], self.layout) for i in self.indices]
        return own[0] if len(own) == 1 else torch.cat(own)

    def split(self, stack: Tensor) -> list[Tensor]:
        """[S, m, n] back in the shapes of the parameters."""
        parts = stack.split(self.sizes)
        return [from_matrices(part, self.batch.params[i].shape, self.layout) for part, i in zip(parts, self.indices)]

    def state(self, name: str) -> Tensor:
        """States with one entry a matrix, as [S, …]."""
        return torch.cat([self.batch.states[i][name] for i in self.indices])

    def keep(self, name: str, stack: Tensor) -> None:
        """Write [S, …] back into these states."""
        own = [self.batch.states[i][name] for i in self.indices]
        torch._foreach_copy_(own, list(stack.split(self.sizes)))

    def average(self, name: str, new: Tensor, beta: float) -> Tensor:
        """s ← β s + (1 − β) new for a state with one entry a matrix; the new s."""
        mean = self.state(name).lerp_(new, 1 - beta)
        self.keep(name, mean)
        return mean


class MatrixMethod(FrankensteinOptimizer):
    """A method for matrices: momentum (`signals`), then a direction for each stack of equal shapes.

    State "m" is like the parameter. A method that needs decay of its own sets `decays`.
    """

    needs_kind = True
    shapewise = True
    decays: ClassVar[bool] = True

    def init_state(self, p: Tensor, g: Tensor, group: ParamGroup) -> dict[str, Any]:
        s, m, n = matrix_shape(p.shape, group["layout"])
        return {"m": zeros(p)} | {name: p.new_zeros(shape) for name, shape in self.statistics(s, m, n, group).items()}

    def statistics(self, s: int, m: int, n: int, group: ParamGroup) -> dict[str, tuple[int, ...]]:
        """Shapes of further states of a parameter of s matrices [m, n]; the first axis counts the matrices."""
        return {}

    def signals(self, batch: Batch, group: ParamGroup) -> list[Tensor]:
        """Update the momentum, m ← μ m + (1 − μ) g, and return what is orthogonalised; not to be written to."""
        torch._foreach_lerp_(batch["m"], batch.grads, 1 - group["momentum"])
        return batch["m"]

    def direction(self, x: Tensor, stack: Stack, group: ParamGroup) -> Tensor:
        """What the parameters move along, [S, m, n], from their stacked signals x [S, m, n]."""
        raise NotImplementedError

    def scale(self, shape: tuple[int, int], group: ParamGroup) -> float:
        """Factor of the learning rate of matrices of this shape."""
        return 1.0

    def update(self, batch: Batch, group: ParamGroup) -> None:
        if self.decays:
            batch.decay(group["lr"] * group["weight_decay"])
        signals = self.signals(batch, group)
        for shape, indices in by_shape(batch.params, group["layout"]).items():
            stack = Stack(batch, indices, shape, group["layout"])
            steps = stack.split(self.direction(stack.of(signals), stack, group))
            rate = group["lr"] * self.scale(shape, group)
            torch._foreach_add_([batch.params[i] for i in indices], steps, alpha=-rate)


def accumulate(batch: Batch, mu: float) -> list[Tensor]:
    """m ← μ m + g."""
    m = batch["m"]
    torch._foreach_mul_(m, mu)
    torch._foreach_add_(m, batch.grads)
    return m


def orthogonal(x: Tensor, group: ParamGroup, coefficients: str = "muon") -> Tensor:
    """Newton–Schulz with the group's number of steps and precision."""
    return newton_schulz(x, schedule(coefficients, group["ns_steps"]), bf16=in_bf16(x, group)).to(x.dtype)


def in_bf16(x: Tensor, group: ParamGroup) -> bool:
    """Whether matrices x [S, m, n] are to be multiplied in bf16 on a CPU, as the group says or by `prefers_bf16`.

    The result of the measurement is kept in the group, and so in its state: a resumed run does the same.
    """
    if group["ns_bf16"] is not None or x.device.type != "cpu":
        return bool(group["ns_bf16"])
    if "cpu_prefers_bf16" not in group:
        group["cpu_prefers_bf16"] = prefers_bf16()
    return group["cpu_prefers_bf16"] and x[0].numel() >= LARGE


def frobenius(x: Tensor) -> Tensor:
    """‖X‖_F of each matrix, [S, 1, 1]."""
    return torch.linalg.matrix_norm(x, keepdim=True)


def with_statistics(extra: Callable[[Any, int, int], int]) -> Callable[[Any, Sequence[int], str], int]:
    """`state_bytes` of m and `extra(params, m, n)` fp32 numbers a matrix."""

    def state_bytes(params: Any, shape: Sequence[int], kind: str) -> int:
        s, m, n = matrix_shape(shape)
        return 4 * s * (m * n + extra(params, m, n))

    return state_bytes
