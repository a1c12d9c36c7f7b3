"""What every optimizer here shares: state that is saved exactly, screened gradients, 16-bit parameters written well."""

import copy
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.utils import logging

from .low_precision import DTYPES, REMAINDER, narrow_
from .screening import usable
from .spec import COMMON_PARAMS

logger = logging.get_logger(__name__)

GLOBAL = "global"  # key of the state that belongs to no single parameter
ROUNDING = 0x16B17  # seed of the random numbers that round 16-bit parameters

ParamGroup = dict[str, Any]


class ExactState(torch.optim.Optimizer):
    """What all optimizers here share.

    State keeps its dtypes through `load_state_dict`, shares no memory with what was loaded, and is counted. Gradients
    are screened before they touch anything: see `screen`. 16-bit parameters are written back as the group's
    "bf16_update" says.
    """

    iterates: ClassVar[tuple[str, ...]] = ()  # states that are weights too: what rescales a parameter rescales them
    takes_sparse: ClassVar[bool] = False

    def add_param_group(self, param_group: ParamGroup) -> None:
        """torch's, without complex parameters; a group added later needs no names, though the others have some."""
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else params if isinstance(params, set) else list(params)
        if (
            isinstance(params, list)
            and self.param_groups
            and "param_names" in self.param_groups[0]
            and params
            and isinstance(params[0], Tensor)
        ):
            number = len(self.param_groups)
            params = [(f"group {number}, parameter {i}", p) for i, p in enumerate(params)]
        super().add_param_group({**param_group, "params": params})
        group = self.param_groups[-1]
        for p, name in zip(group["params"], parameter_names(group)):
            if p.is_complex():
                self.param_groups.pop()
                raise ValueError(
                    f"{type(self).__name__} takes real parameters, but {name} is {p.dtype}: train its real view, "
                    "torch.view_as_real(p), instead."
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch's, which however would cast every state to the dtype of its parameter."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:  # a state of an older version has fewer settings
            for key in COMMON_PARAMS:
                group.setdefault(key, self.defaults[key])
        params = [p for group in self.param_groups for p in group["params"]]
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        owners = dict(zip(ids, params))
        for key, saved in state_dict["state"].items():
            owner = owners.get(key)
            device = owner.device if owner is not None else params[0].device
            self.state[key if owner is None else owner] = {
                name: _copy(value, device) if isinstance(value, Tensor) else copy.deepcopy(value)
                for name, value in saved.items()
            }

    def state_bytes(self) -> int:
        """Bytes of all state tensors."""
        tensors = (value for state in self.state.values() for value in state.values() if isinstance(value, Tensor))
        return sum(tensor.nbytes for tensor in tensors)

    def shared_state(self) -> dict[str, Any]:
        """State of the whole optimizer, saved with it: tensors and plain values by name, at first empty."""
        state: dict[Any, dict[str, Any]] = self.state  # torch allows other keys too
        return state.setdefault(GLOBAL, {})

    # ------------------------------------------------------------------ gradients that are left out

    def screen(self) -> set[int]:
        """Ids of the parameters whose gradients must not be used in this step, counted and reported.

        Those are gradients with infinite entries, with NaN, or of a norm above `screening.largest_norm`. Parameters
        without elements are left out too, silently.

        Raises:
            RuntimeError: There is such a gradient and the group's "nonfinite" is "raise"; a sparse gradient.
        """
        looked_at, left_out, position = [], set(), -1
        for group in self.param_groups:
            for index, p in enumerate(group["params"]):
                position += 1
                if p.grad is None:
                    continue
                if p.grad.is_sparse and not self.takes_sparse:
                    raise RuntimeError(f"{type(self).__name__} does not take sparse gradients; use sparse=False.")
                if p.numel() == 0:
                    left_out.add(id(p))
                elif group["nonfinite"] != "take":
                    looked_at.append((position, index, group, p))
        good = usable([p.grad for *_, p in looked_at])
        self.leave_out([(position, index, group) for (position, index, group, _), ok in zip(looked_at, good) if not ok])
        return left_out | {id(p) for (*_, p), ok in zip(looked_at, good) if not ok}

    def leave_out(self, bad: list[tuple[int, int, ParamGroup]], what: str = "gradient") -> None:
        """Count what is not used, by (position among all parameters, position in the group, group), and report it.

        Raises:
            RuntimeError: The "nonfinite" of one of the groups is "raise".
        """
        if not bad:
            return
        shared, names = self.shared_state(), [parameter_names(group)[index] for _, index, group in bad]
        some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        if any(group["nonfinite"] == "raise" for *_, group in bad):
            raise RuntimeError(
                f"{type(self).__name__}: the {what} of {some} is not finite, or too large to be squared."
            )
        counts, steps = shared.setdefault("skipped", {}), shared.get("skipping_steps", 0) + 1
        shared["skipping_steps"] = steps
        for position, *_ in bad:
            counts[position] = counts.get(position, 0) + 1
        if steps & (steps - 1) == 0:  # the first, second, fourth, eighth … time
            logger.warning(
                f"{type(self).__name__}: the {what} of {some} is not finite, or too large to be squared, and was left "
                f"out: neither these parameters nor their state have changed. That happened in {steps} step(s) so far; "
                "optimizer.skipped_updates() counts it by parameter, nonfinite='raise' stops instead."
            )

    def skipped_updates(self) -> dict[str, int]:
        """How often the gradient of a parameter was left out, by its name (or position); see `screen`."""
        names = [name for group in self.param_groups for name in parameter_names(group)]
        counts = self.state.get(GLOBAL, {}).get("skipped", {})  # type: ignore[call-overload]
        return {names[position]: number for position, number in sorted(counts.items())}

    # ------------------------------------------------------------------ 16-bit parameters

    def count_rounding(self) -> None:
        """Have the next writes of 16-bit parameters draw new random numbers; once a step."""
        if any(
            group["bf16_update"] == "stochastic" and any(p.dtype in DTYPES for p in group["params"])
            for group in self.param_groups
        ):
            shared = self.shared_state()
            shared["roundings"] = shared.get("roundings", 0) + 1

    def write(self, p: Tensor, wide: Tensor, group: ParamGroup, position: int) -> None:
        """Give a parameter a new value, rounded as the group says if it has 16 bits."""
        generator, how = None, group["bf16_update"]
        if p.dtype in DTYPES and how == "stochastic":
            counter = self.shared_state().get("roundings", 0)
            generator = seeded_generator(ROUNDING, counter, position, device=p.device)
        remainder = narrow_(p, wide, how, generator)
        if remainder is not None:
            self.state[p][REMAINDER] = remainder


def parameter_names(group: ParamGroup) -> list[str]:
    """Names of a group's parameters; of unnamed ones their place and shape."""
    named = group.get("param_names")
    return list(named) if named else [f"parameter {i} {list(p.shape)}" for i, p in enumerate(group["params"])]


def _copy(value: Tensor, device: torch.device) -> Tensor:
    # counters and random states live on the CPU whatever the parameters do
    stays = value.dim() == 0 and value.device.type == "cpu" and device.type != "cpu"
    return value.detach().clone() if stays or value.dtype == torch.uint8 else value.detach().to(device, copy=True)


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
