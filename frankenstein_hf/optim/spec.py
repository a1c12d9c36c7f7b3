"""What an optimizer's specification says, and the registry of all of them."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ..configuration.component import ComponentSpec, Params, Registry, param

NEEDS = ("nothing", "callback")
# What a user may set per role in `groups`, where the method has it.
GROUP_PARAMS = ("lr", "weight_decay", "betas", "eps")
# What every optimizer has beside its method's own: how 16-bit parameters are written, what becomes of bad gradients.
COMMON_PARAMS = ("bf16_update", "nonfinite")
BF16_UPDATES = ("round", "stochastic", "compensated")
NONFINITE = ("skip", "raise", "take")


def below_one(default: Any, doc: str, *, minimum: float = 0.0) -> Any:
    """A `param` in [minimum, 1): decay rates, or tuples of them."""
    return param(default, doc, minimum=minimum, below=1.0)


@dataclass(frozen=True, kw_only=True)
class OptimizerParams(Params):
    """Hyperparameters every optimizer has; a method redeclares `lr` with its own default."""

    lr: float = param(1e-3, "learning rate", minimum=0.0)
    weight_decay: float = param(0.0, "decoupled weight decay of matrices", minimum=0.0)
    bf16_update: str = param(
        "stochastic",
        "how 16-bit parameters are written back: rounded to the nearest, at random so that the mean is exact, or with "
        "the rounding error kept in 16 more bits",
        choices=BF16_UPDATES,
    )
    nonfinite: str = param(
        "skip",
        "what happens to a parameter whose gradient is not finite or too large to be squared: left out of the step and "
        "counted, an error, or no check at all",
        choices=NONFINITE,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in dataclasses.fields(self):
            if isinstance(value := getattr(self, field.name), list):
                object.__setattr__(self, field.name, tuple(value))

    def as_dict(self) -> dict[str, Any]:
        """The values by name, as torch's parameter groups keep them."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@dataclass(frozen=True, kw_only=True)
class AdamParams(OptimizerParams):
    """Of methods with Adam's two moments."""

    betas: tuple[float, float] = below_one((0.9, 0.999), "decay rates of the first and second moment")
    eps: float = param(1e-8, "added to the root of the second moment", minimum=0.0)


@dataclass(frozen=True, kw_only=True)
class HybridParams(OptimizerParams):
    """Of methods for matrices, whose other parameters an inner AdamW trains."""

    adamw_lr: float = param(1e-3, "learning rate of the parameters AdamW trains", minimum=0.0)
    adamw_betas: tuple[float, float] = below_one((0.9, 0.95), "their decay rates")
    adamw_eps: float = param(1e-8, "their eps", minimum=0.0)


def floats(per_element: float) -> Callable[[Any, Sequence[int], str], int]:
    """A `state_bytes` of so many fp32 numbers for each element of the parameter."""
    return lambda params, shape, kind: int(4 * per_element * math.prod(shape))


def or_adamw(
    state_bytes: Callable[[Any, Sequence[int], str], int], kinds: frozenset[str] = frozenset({"table", "vector"})
) -> Callable[[Any, Sequence[int], str], int]:
    """`state_bytes`, but AdamW's two moments for parameters of `kinds`."""
    return lambda params, shape, kind: (floats(2) if kind in kinds else state_bytes)(params, shape, kind)


_NO_STATE = floats(0)


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec(ComponentSpec):
    """An optimizer; `implementation` is "module:Class" below this package.

    Attributes:
        params: Its `OptimizerParams`; their defaults are the documented ones.
        state_bytes: `(params, shape, kind) -> bytes` kept for an fp32 (or 16-bit) parameter; `kind` is "matrix",
            "table" or "vector" (see `grouping`). Every tensor counts, plain numbers do not.
        shared_state_bytes: `(params, [(shape, kind), …]) -> bytes` kept once for all parameters.
        needs: What must join it in transformers' `Trainer`: "nothing", or "callback" (see `trainer_callbacks`;
            without it `step` raises or a warning says what is missing).
        callback: "module:Class" of the callback, built without arguments.
        by_kind: Parameters of different kinds come in different groups, each with its "kind" and "layout".
        fallback: Kinds that the inner AdamW trains; implies `by_kind`.
        closure: `step` needs a closure that recomputes the loss.
        gradient: Uses gradients at all.
        stabilizers: Those built in; their parameters are among the optimizer's own.
        small_params: Values at which a few steps on tiny tensors reach every branch; tests run with them.
    """

    params: type[OptimizerParams] = OptimizerParams
    state_bytes: Callable[[Any, Sequence[int], str], int] = _NO_STATE
    shared_state_bytes: Callable[[Any, Sequence[tuple[Sequence[int], str]]], int] = lambda params, shapes: 0
    needs: str = "nothing"
    callback: str = ""
    by_kind: bool = False
    fallback: frozenset[str] = frozenset()
    closure: bool = False
    gradient: bool = True
    stabilizers: tuple[str, ...] = ()
    small_params: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.needs not in NEEDS:
            raise ValueError(f"Optimizer {self.name!r}: needs must be one of {NEEDS}, got {self.needs!r}.")
        if self.fallback and not issubclass(self.params, HybridParams):
            raise ValueError(f"Optimizer {self.name!r}: with a fallback its params must be HybridParams.")


@dataclass(frozen=True, kw_only=True)
class StabilizerSpec(ComponentSpec):
    """A measure against growing attention logits that joins any optimizer; see `stabilizer.Stabilizer`."""


def _discover(attribute: str) -> list[Any]:
    """The `SPECS` of every module beside this one that has some: a new optimizer needs no edit here.

    Modules whose names begin with an underscore are left out: those that import transformers' Trainer.
    """
    modules = sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py"))
    return [spec for name in modules for spec in getattr(import_module(f"{__package__}.{name}"), attribute, ())]


OPTIMIZERS: Registry[OptimizerSpec] = Registry("optimizer", lambda: _discover("SPECS"))
STABILIZERS: Registry[StabilizerSpec] = Registry("stabilizer", lambda: _discover("STABILIZER_SPECS"))


def load(reference: str) -> Any:
    """The object "module:name" of this package."""
    module, _, name = reference.partition(":")
    return getattr(import_module(f"{__package__}.{module}"), name)
