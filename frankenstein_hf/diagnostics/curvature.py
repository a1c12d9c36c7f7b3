"""How large a step the loss allows along the optimizer's own update: −2⟨g, u⟩ / ⟨u, H u⟩.

Along an update θ + a u the loss is L + a⟨g, u⟩ + ½a²⟨u, H u⟩ to second order, and lower than L while a is below that
ratio. u is what the optimizer would do on this batch at a learning rate of one, weight decay included.

⟨u, H u⟩ takes two backward passes, the second through the first. The fast forms of most mixers and PyTorch's fused
attention have a first derivative only; `attn_implementation="eager"` has both, for every mixer. A form that lacks the
second says so when `backward()` meets it, but not under `torch.autograd.grad`, which walks past the error and returns a
wrong number: hence `backward()` here. Where a model has no such form, a difference of two gradients takes its place.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.utils import logging

from ..optim.evolution import ClosureMethod
from .snapshot import unchanged

logger = logging.get_logger(__name__)

METHODS = ("auto", "exact", "difference")

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class StableStep:
    """What a batch says of the optimizer's next step.

    Attributes:
        lr: The largest learning rate among the optimizer's groups; those of other groups are taken to keep their ratio
            to it.
        max_lr: The largest at which the loss of this batch is predicted to fall: 0 where the update does not descend,
            infinite where it does and the loss does not curve upwards along it.
        slope: ⟨g, u⟩.
        curvature: ⟨u, H u⟩; NaN where the slope already decides.
    """

    lr: float
    max_lr: float
    slope: float
    curvature: float

    @property
    def descends(self) -> bool:
        """Whether the loss falls along the update at first."""
        return self.slope < 0

    @property
    def is_stable(self) -> bool:
        """Whether it is predicted to fall at the optimizer's learning rate."""
        return self.max_lr > self.lr


def max_stable_lr(
    model: nn.Module,
    optimizer: Any,
    batch: Any,
    *,
    loss: Loss | None = None,
    max_grad_norm: float | None = None,
    method: str = "auto",
) -> StableStep:
    """The largest learning rate at which the optimizer's next step is predicted to lower the loss of `batch`.

    The step is rehearsed with the gradient of `batch` and taken back: weights, gradients, optimizer and random numbers
    are afterwards what they were. Dropout is off.

    Args:
        model: Weights in fp32 or wider: rounding to 16 bits would drown an update.
        optimizer: Any `torch.optim.Optimizer`, ours included, at its present state and learning rate.
        batch: Keyword arguments for `model`, labels included, or whatever `loss` takes.
        loss: `(model, batch) -> loss`; by default the one the model returns.
        max_grad_norm: Clip the gradient the optimizer sees, as training does. ⟨g, u⟩ takes it unclipped.
        method: "exact" (two backward passes, eager attention), "difference" (of the gradients at θ ± εu, in the model's
            own form), or "auto": exact, and the difference where the model cannot be differentiated twice.

    Raises:
        ValueError: An unknown method, 16-bit weights, a learning rate of zero, or no loss.
    """
    with unchanged(model, optimizer):
        model.eval()

        def closure() -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            value = _loss(model, batch, loss)
            value.backward()
            if max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], max_grad_norm)
            return value

        closure()
        update, lr = rehearsed(optimizer, closure)
    return stable_step(model, update, lr, batch, loss=loss, method=method)


def rehearsed(optimizer: Any, closure: Callable[[], Tensor] | None = None) -> tuple[dict[Tensor, Tensor], float]:
    """What the optimizer's step would do with the gradients that are there, at a learning rate of one.

    The step is taken; whoever calls this takes it back (`snapshot.unchanged`).

    Args:
        optimizer: See `max_stable_lr`.
        closure: For methods that evaluate the loss themselves.

    Returns:
        u by parameter, and the largest learning rate of the optimizer's groups.
    """
    inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper
    lr = max(float(group["lr"]) for group in inner.param_groups)
    params = [p for group in inner.param_groups for p in group["params"] if p.requires_grad]
    if narrow := {str(p.dtype) for p in params if p.dtype in (torch.float16, torch.bfloat16)}:
        raise ValueError(
            f"Updates of {', '.join(sorted(narrow))} weights are mostly rounding: keep the weights in fp32 and train "
            "under autocast (bf16=True), or probe a copy, model.float()."
        )
    if not lr > 0:
        raise ValueError("At a learning rate of 0 the optimizer shows no update; probe a later step of the warm-up.")
    before = [p.detach().clone() for p in params]
    # the class's own method: schedulers wrap that of the object, and count
    step = type(inner).step
    if isinstance(inner, ClosureMethod | torch.optim.LBFGS):
        step(inner, closure)
    else:
        step(inner)
    return {p: (p.detach() - old) / lr for p, old in zip(params, before)}, lr


def stable_step(
    model: nn.Module,
    update: Mapping[Tensor, Tensor],
    lr: float,
    batch: Any,
    *,
    loss: Loss | None = None,
    method: str = "auto",
) -> StableStep:
    """Slope and curvature of the loss of `batch` along `update`; arguments as of `max_stable_lr`."""
    if method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, got {method!r}.")
    params: list[Tensor] = [p for p in model.parameters() if p in update and p.requires_grad]
    u = [update[p].to(p.dtype) for p in params]
    with unchanged(model):
        model.eval()
        slope, curvature = float("nan"), float("nan")
        if method != "difference":
            try:
                slope, curvature = _exact(model, params, u, batch, loss)
            except (RuntimeError, NotImplementedError) as error:
                if method == "exact":
                    raise
                logger.warning_once(
                    f"{type(model).__name__} cannot be differentiated twice ({str(error).splitlines()[0][:100]}); "
                    "curvature is a difference of gradients."
                )
                method = "difference"
        if method == "difference":
            slope, curvature = _difference(model, params, u, batch, loss)
    if not slope < 0:
        return StableStep(lr, 0.0, slope, curvature)
    # NaN stays NaN, which no learning rate is below
    return StableStep(lr, math.inf if curvature <= 0 else -2 * slope / curvature, slope, curvature)


# ---------------------------------------------------------------------- slope and curvature


def _loss(model: nn.Module, batch: Any, loss: Loss | None) -> Tensor:
    if loss is not None:
        return loss(model, batch)
    value = model(**batch).loss
    if value is None:
        raise ValueError("The model returned no loss: put labels into the batch, or give loss=(model, batch) -> loss.")
    return value


def _dot(x: list[Tensor | None], y: list[Tensor]) -> Tensor:
    """⟨x, y⟩ in fp64, where a missing tensor is zero; can be differentiated."""
    products = [(a.double() * b.double()).sum() for a, b in zip(x, y) if a is not None]
    return (
        torch.stack([product.cpu() for product in products]).sum() if products else torch.zeros((), dtype=torch.double)
    )


def _gradient(model: nn.Module, params: list[Tensor], batch: Any, loss: Loss | None, graph: bool = False) -> list[Any]:
    return list(torch.autograd.grad(_loss(model, batch, loss), params, create_graph=graph, allow_unused=True))


def _exact(
    model: nn.Module, params: list[Tensor], u: list[Tensor], batch: Any, loss: Loss | None
) -> tuple[float, float]:
    with _twice_differentiable(model):
        slope = _dot(_gradient(model, params, batch, loss, graph=True), u)
        if not slope < 0:
            return slope.item(), math.nan
        if not slope.requires_grad:  # a loss that is linear in the weights
            return slope.item(), 0.0
        for p in params:
            p.grad = None
        slope.backward()  # `torch.autograd.grad` would not meet the errors of forms without a second derivative
        curved = [p.grad for p in params]
    return slope.item(), _dot(curved, u).item()


def _difference(
    model: nn.Module, params: list[Tensor], u: list[Tensor], batch: Any, loss: Loss | None
) -> tuple[float, float]:
    value = _loss(model, batch, loss)
    slope = _dot(list(torch.autograd.grad(value, params, allow_unused=True)), u).item()
    if not slope < 0:
        return slope, math.nan
    length = math.sqrt(_dot(list(u), u).item())
    size = math.sqrt(_dot(list(params), [p.detach() for p in params]).item())
    ε = torch.finfo(value.dtype).eps ** (1 / 3) * max(size, 1e-3) / length
    slopes = []
    start = [p.detach().clone() for p in params]
    for sign in (1, -1):
        with torch.no_grad():
            for p, origin, direction in zip(params, start, u):
                p.copy_(origin).add_(direction, alpha=sign * ε)
        slopes.append(_dot(_gradient(model, params, batch, loss), u).item())
    return slope, (slopes[0] - slopes[1]) / (2 * ε)


@contextmanager
def _twice_differentiable(model: nn.Module) -> Iterator[None]:
    """Attention written out, where the model can be told; PyTorch's own attention as plain operations."""
    config = getattr(model, "config", None)
    before, tell = getattr(config, "_attn_implementation", None), getattr(model, "set_attn_implementation", None)
    if before is not None and before != "eager" and tell is not None:
        tell("eager")
    else:
        tell = None
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        if tell is not None:
            tell(before)
