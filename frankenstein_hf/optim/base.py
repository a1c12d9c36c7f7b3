"""The base of the package's own optimizers: fp32 arithmetic, steps batched over parameters."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from .exact_state import ExactState, ParamGroup
from .low_precision import DTYPES, widen
from .spec import AdamParams, OptimizerParams

CPU_CHUNK = 1 << 17  # elements updated together on a CPU, so that temporaries stay in its cache
FUSED_DEVICES = ("cpu", "cuda")  # where torch's fused kernels are used without being asked for


class Batch:
    """Parameters of one group that share dtype, device and step count.

    Attributes:
        params: fp32 or wider: the parameters themselves, or copies of 16-bit ones that are written back afterwards.
            Update them in place.
        grads: Gradients in the same dtype. They may be the user's own: do not write to them.
        states: One dict a parameter; `batch["m"]` is the list of their entries "m".
        positions: Of the parameters among all of the optimizer's: counters for `seeded_generator`.
        step: Which update this is, from 1.
    """

    def __init__(self, originals: list[Tensor], states: list[dict[str, Any]], positions: list[int]) -> None:
        self.originals, self.states, self.positions = originals, states, positions
        self.step: int = states[0]["step"]
        self.low = originals[0].dtype in DTYPES
        self.params = [widen(p, state) for p, state in zip(originals, states)] if self.low else originals
        grads = [p.grad for p in originals if p.grad is not None]
        self.grads = [g.float() for g in grads] if self.low else grads

    def __getitem__(self, name: str) -> list[Tensor]:
        return [state[name] for state in self.states]

    def __len__(self) -> int:
        return len(self.params)

    def decay(self, amount: float) -> None:
        """Decoupled weight decay: θ ← (1 − amount) θ."""
        if amount:
            torch._foreach_mul_(self.params, 1 - amount)


class FrankensteinOptimizer(ExactState):
    """Base of the package's own optimizers.

    A subclass sets `params_class` and writes `init_state` and `update`; see there. State is tensors and plain numbers
    only. Groups with `method="adamw"` are trained by AdamW, whatever the subclass does.

    Args:
        params: Parameters, or groups of them, as any torch optimizer takes.
        values: Hyperparameters by name; those of a single group may stand in its dict.

    Raises:
        ValueError: An unknown hyperparameter, or one out of its range.
    """

    params_class: ClassVar[type[OptimizerParams]]
    elementwise: ClassVar[bool] = False  # `update` may see any part of a group: it is cut to fit the cache
    shapewise: ClassVar[bool] = False  # the same, but what has one shape is better seen together
    needs_kind: ClassVar[bool] = False  # groups must say which kind of parameter they hold

    def __init__(self, params: Iterable[Any], **values: Any) -> None:
        settings = self.params_class.from_dict(values, type(self).__name__)
        super().__init__(params, settings.as_dict())

    def add_param_group(self, param_group: ParamGroup) -> None:
        """torch's, with the group's hyperparameters checked."""
        if self.needs_kind and "kind" not in param_group:
            raise ValueError(
                f"{type(self).__name__} treats matrices, tables and vectors differently and must know which is which: "
                "build it with frankenstein_hf.create_optimizer(model, name), or give every group a 'kind'."
            )
        if param_group.get("method") == "adamw":
            defaults = {key: self.defaults[f"adamw_{key}"] for key in ("lr", "betas", "eps")}
            param_group = {**defaults, **param_group}
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        checked = AdamParams if group.get("method") == "adamw" else self.params_class
        names = [name for name in checked.types() if name in group]
        settings = checked.from_dict({name: group[name] for name in names}, self._owner(group))
        group.update(settings.as_dict())

    def _owner(self, group: ParamGroup) -> str:
        return type(self).__name__ + (f", group {group['role']!r}" if "role" in group else "")

    # ------------------------------------------------------------------ what a method writes

    def init_state(self, p: Tensor, g: Tensor, group: ParamGroup) -> dict[str, Any]:
        """State of a parameter before its first update.

        Args:
            p: The parameter, fp32 or wider.
            g: Its first gradient, of the same dtype.
            group: Hyperparameters.

        Returns:
            Tensors (in the dtype of `p`, see `zeros`) and plain numbers by name; "step" is kept already.
        """
        raise NotImplementedError

    def update(self, batch: Batch, group: ParamGroup) -> None:
        """One step of the method: update `batch.params` and the states in place."""
        raise NotImplementedError

    def prepare(self, batches: list[tuple[Batch, ParamGroup]]) -> None:
        """Before the updates of a step, with all batches: for methods with sums over the whole model."""

    # ------------------------------------------------------------------ step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, except those that `screen` leaves out.

        Args:
            closure: Recomputes and returns the loss, gradients included.

        Returns:
            What the closure returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batches, position, left_out = [], 0, self.screen()
        for group in self.param_groups:
            batches += [(batch, group) for batch in self._batches(group, position, left_out)]
            position += len(group["params"])
        self.prepare(batches)
        self.count_rounding()
        for batch, group in batches:
            update = adamw_update if group.get("method") == "adamw" else self.update
            update(batch, group)
            for p, wide, i in zip(batch.originals, batch.params, batch.positions) if batch.low else ():
                self.write(p, wide, group, i)
        return loss

    def _batches(self, group: ParamGroup, position: int, left_out: set[int]) -> Iterator[Batch]:
        """The group's parameters that have gradients, in batches of equal dtype, device and step count."""
        same: dict[tuple, list[tuple[Tensor, int]]] = {}
        for i, p in enumerate(group["params"], position):
            if p.grad is None or id(p) in left_out:
                continue
            state = self.state_of(p, group)
            state["step"] += 1
            same.setdefault((p.dtype, p.device, state["step"]), []).append((p, i))
        for (_, device, _), members in same.items():
            parts: Iterable[list[tuple[Tensor, int]]] = [members]
            if device.type == "cpu" and group.get("method") != "adamw":  # which works through tensor by tensor
                parts = _parts(members) if self.elementwise else _parts_by_shape(members) if self.shapewise else parts
            for part in parts:
                yield Batch([p for p, _ in part], [self.state[p] for p, _ in part], [i for _, i in part])

    def state_of(self, p: Tensor, group: ParamGroup) -> dict[str, Any]:
        """The state of a parameter with a gradient, made if it has none."""
        if not (state := self.state[p]):
            wide = widen(p, {})
            first = {"m": zeros(wide), "v": zeros(wide)} if group.get("method") == "adamw" else None
            state |= {"step": 0} | (first or self.init_state(wide, p.grad.to(wide.dtype), group))  # type: ignore[union-attr]
        return state


def _parts(members: list[tuple[Tensor, int]]) -> Iterator[list[tuple[Tensor, int]]]:
    """Consecutive runs of at most `CPU_CHUNK` elements, or single parameters larger than that."""
    part: list[tuple[Tensor, int]] = []
    size = 0
    for p, i in members:
        if part and size + p.numel() > CPU_CHUNK:
            yield part
            part, size = [], 0
        part.append((p, i))
        size += p.numel()
    yield part


def _parts_by_shape(members: list[tuple[Tensor, int]]) -> list[list[tuple[Tensor, int]]]:
    """Parts whose parameters have one shape: at most `CPU_CHUNK` elements, or single parameters larger than that."""
    by_shape: dict[torch.Size, list[tuple[Tensor, int]]] = {}
    for p, i in members:
        by_shape.setdefault(p.shape, []).append((p, i))
    parts = []
    for shape, own in by_shape.items():
        size = max(1, CPU_CHUNK // shape.numel())
        parts += [own[start : start + size] for start in range(0, len(own), size)]
    return parts


def alike(p: Tensor, *others: Tensor) -> bool:
    """Whether tensors lie in memory as p does: torch's fused kernels do not look, and would mix up elements."""
    return all(other.stride() == p.stride() for other in others)


def zeros(p: Tensor) -> Tensor:
    """A state of zeros like `p`."""
    return torch.zeros_like(p, memory_format=torch.preserve_format)


def adam_moments(batch: Batch, beta1: float, beta2: float, grads: list[Tensor] | None = None) -> None:
    """m ← β₁ m + (1 − β₁) g and v ← β₂ v + (1 − β₂) g², with the batch's gradients unless others are given."""
    m, v, g = batch["m"], batch["v"], batch.grads if grads is None else grads
    torch._foreach_lerp_(m, g, 1 - beta1)
    torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, g, g, 1 - beta2)


def adam_denominator(v: list[Tensor], beta2: float, eps: float, step: int) -> list[Tensor]:
    """√(v / (1 − β₂^t)) + eps, in new tensors."""
    denominator = list(torch._foreach_sqrt(v))
    torch._foreach_div_(denominator, (1 - beta2**step) ** 0.5)
    torch._foreach_add_(denominator, eps)
    return denominator


def adamw_update(batch: Batch, group: ParamGroup) -> None:
    """AdamW (arXiv 1711.05101) by torch's own function, fused where torch has that; states m and v."""
    (beta1, beta2), device = group["betas"], batch.params[0].device
    steps = list(torch.full((len(batch),), float(batch.step - 1), device=device).unbind())
    fused = device.type in FUSED_DEVICES and all(map(alike, batch.params, batch.grads, batch["m"], batch["v"]))
    adamw(
        batch.params, batch.grads, batch["m"], batch["v"], [], steps, fused=fused, foreach=not fused,
        amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"],
        eps=group["eps"], maximize=False,
    )  # fmt: skip
