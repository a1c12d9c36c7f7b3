"""SGD, RMSProp, AdamW, RAdam and Adafactor: `torch.optim` does the work; here are their specs and fp32 states."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..configuration.component import param
from .base import FUSED_DEVICES, alike
from .exact_state import ExactState
from .low_precision import DTYPES, widen
from .spec import COMMON_PARAMS, AdamParams, OptimizerParams, OptimizerSpec, below_one


class TorchMethod(ExactState):
    """In front of a `torch.optim` class: checks hyperparameters, and computes in fp32 for 16-bit parameters."""

    params_class: ClassVar[type[OptimizerParams]]
    fixed: ClassVar[dict[str, Any]] = {}

    def __init__(self, params: Iterable[Any], **values: Any) -> None:
        settings = self.params_class.from_dict(values, type(self).__name__).as_dict()
        common = {name: settings.pop(name) for name in COMMON_PARAMS}
        super().__init__(params, **settings, **self.fixed)
        self.defaults.update(common)
        for group in self.param_groups:
            group |= common | {name: group[name] for name in common if name in group}
        # fused kernels could do that too, but gradients have to be unscaled before they are screened
        self._step_supports_amp_scaling = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """torch's step, around which 16-bit parameters and gradients are widened, so that the states are fp32."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        left_out, position, low, aside = self.screen(), -1, [], []
        self.count_rounding()
        for group in self.param_groups:
            for p in group["params"]:
                position += 1
                if id(p) in left_out:
                    aside.append((p, p.grad))
                    p.grad = None
                elif p.grad is not None and p.dtype in DTYPES:
                    low.append((p, p.data, p.grad, group, position))
        for p, _, grad, _, _ in low:
            _replace(p, widen(p, self.state.get(p, {})), grad.float())
        asked = [(group, group["fused"]) for group in self.param_groups if "fused" in group]
        for group, _ in asked:
            group["fused"] = self._fuses(group)
        try:
            step: Any = super().step
            # torch wraps the step of classes it has seen to call hooks; this method is wrapped already
            function = step.__func__
            (function.__wrapped__ if getattr(function, "hooked", False) else function)(self)
        finally:
            for group, wanted in asked:
                group["fused"] = wanted
            for p, grad in aside:
                p.grad = grad
            for p, data, grad, group, position in low:
                wide = p.data
                _replace(p, data, grad)
                self.write(p, wide, group, position)
        return loss

    def _fuses(self, group: dict[str, Any]) -> bool:
        """Whether torch's fused kernel serves the group in this step."""
        if group["fused"] is False or group["foreach"]:
            return False
        trained = [p for p in group["params"] if p.grad is not None]
        if group["fused"] is None and any(p.device.type not in FUSED_DEVICES or p.grad.is_sparse for p in trained):
            return False
        states = (self.state.get(p, {}).values() for p in trained)
        return all(
            alike(p, p.grad, *(value for value in values if isinstance(value, Tensor) and value.dim() == p.dim() > 0))
            for p, values in zip(trained, states)
        )


def _replace(p: Tensor, data: Tensor, grad: Tensor) -> None:
    p.grad = None
    p.data = data
    p.grad = grad


def _with_step(per_element: float) -> Callable[[Any, Sequence[int], str], int]:
    """So many fp32 numbers an element, and torch's step counter, which is a tensor."""
    return lambda params, shape, kind: int(4 * per_element * math.prod(shape)) + 4


# ---------------------------------------------------------------------- SGD


def foreach_kernels() -> Any:
    """The parameter of methods that torch has for lists of tensors."""
    return param(None, "work on lists of tensors, faster on accelerators; None: torch decides")


def fused_kernels() -> Any:
    """The parameter of methods for which torch has one kernel."""
    return param(None, "one kernel for the whole update; None: where torch has one for the device, unless foreach")


class Fusible:
    """Of methods with both kinds of kernels."""

    fused: bool | None
    foreach: bool | None

    def __post_init__(self) -> None:
        if self.fused and self.foreach:
            raise ValueError("fused=True and foreach=True exclude each other: choose one.")
        super().__post_init__()  # type: ignore[misc]


@dataclass(frozen=True, kw_only=True)
class SGDParams(Fusible, OptimizerParams):
    """Parameters of `sgd`."""

    lr: float = param(0.1, "learning rate", minimum=0.0)
    weight_decay: float = param(0.0, "λ, added to the gradient as λθ", minimum=0.0)
    fused: bool | None = fused_kernels()
    foreach: bool | None = foreach_kernels()


@dataclass(frozen=True, kw_only=True)
class MomentumParams(SGDParams):
    """Parameters of `sgd_momentum`."""

    lr: float = param(0.03, "learning rate", minimum=0.0)
    momentum: float = below_one(0.9, "β in m ← β m + g")
    dampening: float = param(0.0, "the gradient enters m with weight 1 − dampening", minimum=0.0, maximum=1.0)
    nesterov: bool = param(False, "step along g + β m; needs momentum and no dampening")


class SGD(TorchMethod, torch.optim.SGD):
    """θ ← θ − η g (Robbins and Monro 1951)."""

    params_class = SGDParams
    takes_sparse = True


class SGDMomentum(TorchMethod, torch.optim.SGD):
    """m ← β m + g; θ ← θ − η m (Polyak 1964; Sutskever et al. 2013)."""

    params_class = MomentumParams

    def _fuses(self, group: dict[str, Any]) -> bool:
        # torch's fused kernel cannot give some parameters their first momentum while others have one
        begun = {"momentum_buffer" in self.state.get(p, {}) for p in group["params"] if p.grad is not None}
        return super()._fuses(group) and len(begun) < 2


# ---------------------------------------------------------------------- RMSProp


@dataclass(frozen=True, kw_only=True)
class RMSPropParams(OptimizerParams):
    """Parameters of `rmsprop`."""

    lr: float = param(1e-3, "learning rate", minimum=0.0)
    weight_decay: float = param(0.0, "λ, added to the gradient as λθ", minimum=0.0)
    alpha: float = below_one(0.9, "decay rate of the squared gradient")
    eps: float = param(1e-8, "added to the root", minimum=0.0)
    momentum: float = below_one(0.0, "of the normalised gradient")
    centered: bool = param(False, "divide by the standard deviation instead of the root mean square")
    foreach: bool | None = foreach_kernels()


class RMSProp(TorchMethod, torch.optim.RMSprop):
    """v ← α v + (1 − α) g²; θ ← θ − η g / (√v + ε) (Tieleman and Hinton 2012)."""

    params_class = RMSPropParams


def _rmsprop_bytes(params: RMSPropParams, shape: Sequence[int], kind: str) -> int:
    return _with_step(1 + (params.momentum > 0) + params.centered)(params, shape, kind)


# ---------------------------------------------------------------------- Adam's relatives


@dataclass(frozen=True, kw_only=True)
class AdamWParams(Fusible, AdamParams):
    """Parameters of `adamw`."""

    weight_decay: float = param(0.01, "decoupled weight decay", minimum=0.0)
    amsgrad: bool = param(False, "divide by the largest second moment so far")
    fused: bool | None = fused_kernels()
    foreach: bool | None = foreach_kernels()


class AdamW(TorchMethod, torch.optim.AdamW):
    """Adam with decoupled weight decay (arXiv 1711.05101)."""

    params_class = AdamWParams


@dataclass(frozen=True, kw_only=True)
class RAdamParams(AdamParams):
    """Parameters of `radam`."""

    foreach: bool | None = foreach_kernels()


class RAdam(TorchMethod, torch.optim.RAdam):
    """Adam with rectified variance, SGD with momentum while it is unknown (arXiv 1908.03265)."""

    params_class = RAdamParams
    fixed: ClassVar[dict[str, Any]] = {"decoupled_weight_decay": True}


@dataclass(frozen=True, kw_only=True)
class AdafactorParams(OptimizerParams):
    """Parameters of `adafactor`."""

    lr: float = param(1e-2, "largest learning rate; the step is relative to the parameter's RMS", minimum=0.0)
    beta2_decay: float = param(-0.8, "1 − β₂ at step t is t to this power", maximum=0.0)
    eps: tuple[float | None, float] = param(
        (None, 1e-3), "ε₁ in the statistics (None: of the dtype) and ε₂, the least RMS of a parameter", minimum=0.0
    )
    d: float = param(1.0, "updates are clipped to this RMS", minimum=1.0)
    foreach: bool | None = foreach_kernels()


class Adafactor(TorchMethod, torch.optim.Adafactor):
    """Second moments of matrices as an outer product of row and column means (arXiv 1804.04235)."""

    params_class = AdafactorParams


def _adafactor_bytes(params: AdafactorParams, shape: Sequence[int], kind: str) -> int:
    if len(shape) < 2:
        return 4 * math.prod(shape) + 4
    stack = math.prod(shape[:-2])
    return 4 * stack * (shape[-2] + shape[-1]) + 4


SPECS = (
    OptimizerSpec(
        name="sgd",
        family="first-order",
        summary="Plain gradient steps, no state.",
        reference="A Stochastic Approximation Method, Robbins and Monro 1951; torch.optim.SGD",
        params=SGDParams,
        implementation="first_order:SGD",
        state_bytes=lambda params, shape, kind: 0,
    ),
    OptimizerSpec(
        name="sgd_momentum",
        family="first-order",
        summary="Gradient steps with heavy-ball or Nesterov momentum.",
        reference="On the importance of initialization and momentum in deep learning, ICML 2013; torch.optim.SGD",
        params=MomentumParams,
        implementation="first_order:SGDMomentum",
        state_bytes=lambda params, shape, kind: 4 * math.prod(shape) if params.momentum else 0,
    ),
    OptimizerSpec(
        name="rmsprop",
        family="first-order",
        summary="The gradient divided by its running root mean square.",
        reference="Lecture 6e of Neural Networks for Machine Learning, Tieleman and Hinton 2012; torch.optim.RMSprop",
        params=RMSPropParams,
        implementation="first_order:RMSProp",
        state_bytes=_rmsprop_bytes,
    ),
    OptimizerSpec(
        name="adamw",
        family="first-order",
        summary="Two moments with bias correction and decoupled weight decay.",
        reference="Decoupled Weight Decay Regularization, arXiv 1711.05101; torch.optim.AdamW",
        params=AdamWParams,
        implementation="first_order:AdamW",
        state_bytes=lambda params, shape, kind: _with_step(2 + params.amsgrad)(params, shape, kind),
    ),
    OptimizerSpec(
        name="radam",
        family="first-order",
        summary="AdamW that rectifies the second moment's early variance.",
        reference="On the Variance of the Adaptive Learning Rate and Beyond, arXiv 1908.03265; torch.optim.RAdam",
        params=RAdamParams,
        implementation="first_order:RAdam",
        state_bytes=_with_step(2),
    ),
    OptimizerSpec(
        name="adafactor",
        family="memory-efficient",
        summary="Second moments kept as row and column means, no first moment.",
        reference="Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, arXiv 1804.04235",
        params=AdafactorParams,
        implementation="first_order:Adafactor",
        state_bytes=_adafactor_bytes,
    ),
)
