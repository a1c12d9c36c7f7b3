"""The optimizers' common ground: state that is saved exactly, fp32 arithmetic, steps batched over parameters."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from .spec import AdamParams, OptimizerParams

GLOBAL = "global"  # key of the state that belongs to no single parameter
CPU_CHUNK = 1 << 17  # elements updated together on a CPU, so that temporaries stay in its cache
LOW_PRECISION = (torch.float16, torch.bfloat16)

ParamGroup = dict[str, Any]


class ExactState(torch.optim.Optimizer):
    """An optimizer whose state keeps its dtypes through `load_state_dict`, shares no memory with it, and is counted."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch's, which however would cast every state to the dtype of its parameter."""
        super().load_state_dict(state_dict)
        params = [p for group in self.param_groups for p in group["params"]]
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        owners = dict(zip(ids, params))
        for key, saved in state_dict["state"].items():
            owner = owners.get(key)
            device = owner.device if owner is not None else params[0].device
            self.state[key if owner is None else owner] = {
                name: _copy(value, device) if isinstance(value, Tensor) else value for name, value in saved.items()
            }

    def state_bytes(self) -> int:
        """Bytes of all state tensors."""
        tensors = (value for state in self.state.values() for value in state.values() if isinstance(value, Tensor))
        return sum(tensor.nbytes for tensor in tensors)


def _copy(value: Tensor, device: torch.device) -> Tensor:
    # counters and random states live on the CPU whatever the parameters do
    stays = value.dim() == 0 and value.device.type == "cpu" and device.type != "cpu"
    return value.detach().clone() if stays or value.dtype == torch.uint8 else value.detach().to(device, copy=True)


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
        self.low = originals[0].dtype in LOW_PRECISION
        self.params = [p.float() for p in originals] if self.low else originals
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

    def write_back(self) -> None:
        """Round the copies of 16-bit parameters back."""
        if self.low:
            torch._foreach_copy_(self.originals, self.params)


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
    needs_kind: ClassVar[bool] = False  # groups must say which kind of parameter they hold
    iterates: ClassVar[tuple[str, ...]] = ()  # states that are weights too: what rescales a parameter rescales them

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
        """Update every parameter that has a gradient.

        Args:
            closure: Recomputes and returns the loss, gradients included.

        Returns:
            What the closure returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batches, position = [], 0
        for group in self.param_groups:
            batches += [(batch, group) for batch in self._batches(group, position)]
            position += len(group["params"])
        self.prepare(batches)
        for batch, group in batches:
            update = adamw_update if group.get("method") == "adamw" else self.update
            update(batch, group)
            batch.write_back()
        return loss

    def _batches(self, group: ParamGroup, position: int) -> Iterator[Batch]:
        """The group's parameters that have gradients, in batches of equal dtype, device and step count."""
        alike: dict[tuple, list[tuple[Tensor, int]]] = {}
        for i, p in enumerate(group["params"], position):
            if p.grad is None:
                continue
            if p.grad.is_sparse:
                raise RuntimeError(f"{type(self).__name__} does not take sparse gradients; use sparse=False.")
            state = self.state[p]
            if not state:
                state["step"] = 0
                state.update(self._first_state(p, group))
            state["step"] += 1
            alike.setdefault((p.dtype, p.device, state["step"]), []).append((p, i))
        cut = self.elementwise or group.get("method") == "adamw"
        for (_, device, _), members in alike.items():
            for part in _parts(members) if cut and device.type == "cpu" else [members]:
                yield Batch([p for p, _ in part], [self.state[p] for p, _ in part], [i for _, i in part])

    def _first_state(self, p: Tensor, group: ParamGroup) -> dict[str, Any]:
        wide = p.dtype if p.dtype not in LOW_PRECISION else torch.float32
        p, g = p.detach().to(wide), p.grad.to(wide)  # type: ignore[union-attr]
        if group.get("method") == "adamw":
            return {"m": zeros(p), "v": zeros(p)}
        return self.init_state(p, g, group)

    def shared_state(self) -> dict[str, Any]:
        """State of the whole optimizer, saved with it: tensors and plain numbers by name, at first empty."""
        state: dict[Any, dict[str, Any]] = self.state  # torch allows other keys too
        return state.setdefault(GLOBAL, {})


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
    """AdamW (arXiv 1711.05101), operation for operation as `torch.optim.AdamW`; states m and v."""
    beta1, beta2 = group["betas"]
    batch.decay(group["lr"] * group["weight_decay"])
    adam_moments(batch, beta1, beta2)
    denominator = adam_denominator(batch["v"], beta2, group["eps"], batch.step)
    torch._foreach_addcdiv_(batch.params, batch["m"], denominator, -group["lr"] / (1 - beta1**batch.step))


def seeded_generator(seed: int, *counters: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A random generator that depends on `seed` and `counters` (step, position …) only, so that a resumed run draws
    the same numbers: nothing but the seed needs saving, and every process draws alike.
    """
    mixed = seed & (2**63 - 1)
    for counter in counters:  # splitmix64
        mixed = (mixed * 0x9E3779B97F4A7C15 + counter + 1) & (2**64 - 1)
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        mixed = (mixed ^ (mixed >> 27)) & (2**63 - 1)
    return torch.Generator(device).manual_seed(mixed)
