"""Cores as custom operators: a compiler sees one named operation each way instead of a loop over chunks.

Outside a compiler a core is its autograd function, which costs less to call. A `Core` says besides what an operator
needs: its schema, the shapes of what it returns, and what the backward pass reads of the arguments.
"""

import hashlib
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

# a bundle's copy of this module must not take the place of the package's, nor that of another bundle's
OWN = __name__.startswith("frankenstein_hf.")
NAMESPACE = "frankenstein" if OWN else "frankenstein_" + hashlib.sha256(__name__.encode()).hexdigest()[:8]


class Core(torch.autograd.Function):
    """An autograd function over chunks that can also be an operator.

    `forward(ctx, *tensors, *scalars)` returns `num_outputs` tensors and saves the tensors it was given, all of them and
    in order, then those it keeps for the backward pass, which returns a gradient or None for every argument. None of
    the outputs is a view of an argument.

    Attributes:
        tensors: Names of the tensor arguments; "w?" may be None.
        scalars: Types and names of the others, which come last, e.g. "float scale, int C".
        num_outputs, num_kept: Tensors returned, and tensors kept besides the arguments.
    """

    tensors: ClassVar[str]
    scalars: ClassVar[str]
    num_outputs: ClassVar[int] = 2
    num_kept: ClassVar[int] = 1

    @staticmethod
    def outline(*args: Any) -> tuple[Tensor, ...]:
        """Empty tensors like the outputs and like what is kept."""
        raise NotImplementedError

    @staticmethod
    def remember(ctx: Any, *scalars: Any) -> None:
        """Put what the backward pass needs besides tensors on `ctx`."""


class _Context:
    """Stands in for autograd's, where the operator calls a core's forward and backward."""

    def __init__(self, needs: list[bool]) -> None:
        self.needs_input_grad = needs
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Gradients are given as they are."""


def operator(name: str, core: type[Core]) -> Callable[..., Any]:
    """`core.apply`, which is the operator `frankenstein::name` where a compiler looks.

    It returns what `core.apply` returns.
    """
    names, scalars = core.tensors.split(), core.scalars
    arguments = ", ".join(f"Tensor? {n[:-1]}" if n.endswith("?") else f"Tensor {n}" for n in names)
    kept = [f"kept_{i}" for i in range(core.num_kept)]
    grads = [f"grad_{i}" for i in range(core.num_outputs)]
    count, num_outputs, total = len(names), core.num_outputs, core.num_outputs + core.num_kept
    apply = core.apply

    def forward(*args: Any) -> tuple[Tensor, ...]:
        ctx = _Context([True] * len(args))
        core.remember(ctx, *args[count:])
        outputs = core.forward(ctx, *args)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        # no tensor may come out twice
        return *outputs, *(x.clone() if any(x is y for y in outputs) else x for x in ctx.saved_tensors[count:])

    def backward(*args: Any) -> list[Tensor]:
        *rest, needs = args
        given, rest = rest[: len(grads)], rest[len(grads) :]
        ctx = _Context(list(needs))
        ctx.saved_tensors = tuple(rest[: count + len(kept)])
        core.remember(ctx, *rest[count + len(kept) :])
        result = core.backward(ctx, *given)
        return [_filled(x, grad, need) for x, grad, need in zip(ctx.saved_tensors[:count], result, needs)]

    def outline_backward(*args: Any) -> list[Tensor]:
        *rest, needs = args
        inputs = rest[len(grads) : len(grads) + count]
        return [_room(x, need) for x, need in zip(inputs, needs)]

    returns = "Tensor" if total == 1 else f"({', '.join(['Tensor'] * total)})"
    given = ", ".join(part for part in (arguments, scalars) if part)
    run = torch.library.custom_op(
        f"{NAMESPACE}::{name}", _single(forward, total), mutates_args=(), schema=f"({given}) -> {returns}"
    )
    run.register_fake(_single(core.outline, total))
    parts = [*(f"Tensor? {n}" for n in grads), arguments, *(f"Tensor {n}" for n in kept), scalars, "bool[] needs"]
    run_backward = torch.library.custom_op(
        f"{NAMESPACE}::{name}_backward", backward, mutates_args=(),
        schema=f"({', '.join(part for part in parts if part)}) -> Tensor[]",
    )  # fmt: skip
    run_backward.register_fake(outline_backward)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.save_for_backward(*inputs[:count], *outputs[core.num_outputs :])
        ctx.scalars = inputs[count:]
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, *given: Any) -> tuple[Any, ...]:
        needs = list(ctx.needs_input_grad[:count])
        result = run_backward(*given[: core.num_outputs], *ctx.saved_tensors, *ctx.scalars, needs)
        return *(g if need else None for g, need in zip(result, needs)), *(None for _ in ctx.scalars)

    run.register_autograd(differentiate, setup_context=setup)

    def call(*args: Any) -> Any:
        if not torch.compiler.is_compiling():
            return apply(*args)
        outputs = run(*args)
        return outputs[0] if num_outputs == 1 and total > 1 else outputs if total == 1 else outputs[:num_outputs]

    return call


def _single(function: Callable[..., tuple[Tensor, ...]], total: int) -> Callable[..., Any]:
    """An operator with one result returns it bare."""
    return function if total > 1 else lambda *args: function(*args)[0]


def _room(x: Tensor | None, need: bool) -> Tensor:
    """Where the gradient of an argument goes; an operator must return something where there is none."""
    return torch.empty(0) if x is None else torch.empty_like(x) if need else x.new_empty(0)


def _filled(x: Tensor | None, grad: Tensor | None, need: bool) -> Tensor:
    room = _room(x, need)
    if x is None or not need:
        return room
    if grad is None:
        return room.zero_()
    return grad if grad.stride() == room.stride() and grad.dtype == room.dtype else room.copy_(grad)
