"""Recurrences in a graph that `torch.export` traces once for all lengths.

Shapes: R rows, L row length, C chunk, N chunks.

A traced graph cannot look at values and cannot loop over a length it does not know. What it can hold is the scan
operator, whose body is traced once. Its steps here are chunks of C tokens with C fixed: by contract, a mixer that reads
a row in pieces gives what it gives for the whole row, so that the body is the mixer's own recurrence.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 32  # tokens a step of a traced recurrence takes
States = dict[str, Tensor]
Step = Callable[[States, States, Tensor], tuple[Tensor, States]]  # (inputs, states, lengths) -> (readout, states)


# whether `torch.export` (and so `torch.onnx.export`) is tracing; torch 2.6 cannot say
exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", bool)


def refusing(function: Callable, name: str, sizes: Sequence[int]) -> Callable:
    """`function`, traced under the name of what it is, and refused where its graph would not serve all sizes.

    Looking at values, and looping over a length, ends in an error of PyTorch's, to which the name is added. But code
    that branches on a size leaves a condition, or fixes the size, and a file for another runtime keeps no conditions:
    it would give wrong results for other sizes without a word.

    Args:
        function: A layer.
        name: Begins the message.
        sizes: Batch and length of the call, symbols where they are dynamic.

    Raises:
        ValueError: By the wrapped function.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        dynamic: list[Any] = (
            [] if torch.compiler.is_dynamo_compiling() else [x for x in sizes if isinstance(x, torch.SymInt)]
        )
        known = len(dynamic[0].node.shape_env.guards) if dynamic else 0
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            raise ValueError(f"{name} cannot be exported: {error}") from error
        for size in dynamic:
            if (fixed := size.node.maybe_as_int()) is not None:
                raise ValueError(f"{name} cannot be exported with dynamic sizes: it works for the size {fixed} only.")
        for condition in [guard.expr for guard in dynamic[0].node.shape_env.guards[known:]] if dynamic else []:
            if (wrong := _counterexample(condition, dynamic)) is not None:
                raise ValueError(
                    f"{name} cannot be exported with dynamic sizes: its graph would hold while {condition}, so not for "
                    f"sizes {wrong}. Export it for one fixed size."
                )
        return result

    return run


SIZES = (1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 256, 257, 512, 1000, 4096)


def _counterexample(condition: Any, dynamic: Sequence[Any]) -> list[int] | None:
    """Sizes for which a condition on them does not hold, None if it holds for all that are tried."""
    symbols = [size.node.expr for size in dynamic]
    if not condition.free_symbols & set(symbols):
        return None
    for values in product(SIZES, repeat=len(symbols)):
        if bool(condition.subs(dict(zip(symbols, values))) == False):  # noqa: E712 (sympy's, or still open)
            return list(values)
    return None


def scan_chunks(
    step: Step, inputs: States, states: States, lengths: Tensor | None, chunk_size: int = CHUNK
) -> tuple[Tensor, States]:
    """Run `step` over chunks of a row whose length need not be known.

    Args:
        step: The recurrence over a few tokens, started by empty states. What lies behind `lengths` must not reach the
            states it returns.
        inputs: [R, L, …].
        states: Before the first token; empty at the start.
        lengths: [R] real tokens, None when all L are real.
        chunk_size: C.

    Returns:
        Readout [R, L, …] and the states after the last real token.
    """
    from torch._higher_order_ops.scan import scan

    first = next(iter(inputs.values()))
    R, L = first.shape[:2]
    if lengths is None:
        lengths = torch.full((R,), L, dtype=torch.long, device=first.device)
    # one chunk more than needed: a scan of a single step would be another graph, right for short rows only
    N = (L - 1) // chunk_size + 2

    def chunks(x: Tensor) -> Tensor:
        filled = F.pad(x, (0, 0) * (x.dim() - 2) + (0, N * chunk_size - L))
        return filled.unflatten(1, (N, chunk_size)).transpose(0, 1).contiguous()

    starts = chunk_size * torch.arange(N, device=lengths.device)
    real = (lengths - starts[:, None]).clamp(0, chunk_size)  # [N, R]
    # no token at all, for the shapes and dtypes of states nothing has been written to
    _, states = step({name: x[:, :1] for name, x in inputs.items()}, states, torch.zeros_like(lengths))

    def body(states: States, xs: tuple[States, Tensor]) -> tuple[States, Tensor]:
        readout, states = step(xs[0], states, xs[1])
        return {name: _fresh(x) for name, x in states.items()}, _fresh(readout)

    states = {name: _fresh(x) for name, x in states.items()}
    last, readout = scan(body, states, ({name: chunks(x) for name, x in inputs.items()}, real))
    return readout.transpose(0, 1).flatten(1, 2)[:, :L], last


def _fresh(x: Tensor) -> Tensor:
    """A contiguous copy: what a step returns must look like what it was given, and share nothing with it."""
    return x.clone(memory_format=torch.contiguous_format)


def unit_lower_inverse(A: Tensor) -> Tensor:
    """(I + A)⁻¹ of strictly lower triangular A […, C, C] by products of blocks: ONNX has no triangular solve.

    The inverse of two neighbouring blocks on the diagonal is theirs, with −D⁻¹ L B⁻¹ below: log₂ C rounds.
    """
    C = A.shape[-1]
    size = 1 << (C - 1).bit_length()
    A = F.pad(A, (0, size - C, 0, size - C))
    inverse, s = torch.ones_like(A[..., :1]).unsqueeze(-1), 1  # […, blocks, s, s]
    while s < size:
        n = size // (2 * s)
        on_diagonal = torch.eye(n, dtype=A.dtype, device=A.device).view(n, 1, n, 1)
        pairs = (A.unflatten(-1, (n, 2 * s)).unflatten(-3, (n, 2 * s)) * on_diagonal).sum(-2)
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        below = -(second @ pairs[..., s:, :s] @ first)
        inverse = torch.cat([F.pad(first, (0, s)), torch.cat([below, second], dim=-1)], dim=-2)
        s *= 2
    return inverse[..., 0, :C, :C]
