"""Taking back what a step of an optimizer does, so that it can be rehearsed."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def _taken(value: Any) -> Callable[[], Any]:
    """A function that returns `value` as it is now; tensors and containers are the same objects, written back."""
    if isinstance(value, Tensor):
        kept = value.detach().clone()

        def restored() -> Tensor:
            with torch.no_grad():
                value.copy_(kept)
            return value

        return restored
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state)
    if isinstance(value, dict):
        items = {key: _taken(item) for key, item in value.items()}

        def refilled() -> Any:
            now = {key: item() for key, item in items.items()}
            value.clear()
            value.update(now)
            return value

        return refilled
    if isinstance(value, list):
        members = [_taken(item) for item in value]

        def relisted() -> Any:
            value[:] = [member() for member in members]
            return value

        return relisted
    if isinstance(value, tuple):
        parts = [_taken(item) for item in value]

        def rejoined() -> Any:
            for part in parts:
                part()
            return value

        return rejoined
    if isinstance(value, set):
        kept_set = copy.copy(value)

        def reset() -> Any:
            value.clear()
            value.update(kept_set)
            return value

        return reset
    return lambda: value


@contextmanager
def unchanged(model: nn.Module, optimizer: Any = None) -> Iterator[None]:
    """Whatever happens within to weights, buffers, gradients, the optimizer and random numbers is taken back."""
    tensors = [_taken(x.detach()) for x in (*model.parameters(), *model.buffers())]
    gradients = [(p, p.grad, None if p.grad is None else _taken(p.grad)) for p in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    own = None
    if optimizer is not None:
        # weights among them are views of the same memory and are written twice
        own = {key: _taken(value) for key, value in vars(optimizer).items() if not key.endswith("_hooks")}
    devices = sorted({x.device.index or 0 for x in model.parameters() if x.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for restore in tensors:
            restore()
        for p, grad, restore_grad in gradients:
            if restore_grad is not None:
                restore_grad()
            p.grad = grad
        for module, training in modes:
            module.training = training
        if optimizer is not None and own is not None:
            for key in set(vars(optimizer)) - set(own):
                if not key.endswith("_hooks"):
                    delattr(optimizer, key)
            for key, restore in own.items():
                setattr(optimizer, key, restore())
