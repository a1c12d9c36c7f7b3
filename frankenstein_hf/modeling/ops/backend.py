"""Whether a recurrent core runs in PyTorch or on Triton kernels.

A core can be told (`implementation="triton"`). Otherwise it does what the model around it was asked for:
`RowMixer.forward` announces the backend while a mixer works, and the cores look at the announcement, so that no mixer
has to pass it on. Every thread has its own announcement, and gradient checkpointing, which replays a layer's forward
in whatever thread runs the backward, makes it again. Backward passes need none; they belong to the form that ran
forwards.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from torch import Tensor
from transformers.utils import logging

logger = logging.get_logger(__name__)

TRITON = "triton"  # as in attn_implementation="triton"
IMPLEMENTATIONS = ("chunked", TRITON)
WIDEST_HEAD = 256  # keys of a head whose state one program can hold


class _Announcement(threading.local):  # unlike a context variable, torch.compile can trace it
    def __init__(self) -> None:
        self.backend: str | None = None
        self.reached_a_kernel = False  # whether a core that has kernels was called


_announced = _Announcement()


@contextmanager
def computing(backend: str, mixer: str | None = None) -> Iterator[None]:
    """Let the cores called in this context know the backend in force.

    Args:
        backend: The model's `attn_implementation`.
        mixer: Who is working, if it is expected to use a core that has kernels; it is named in a warning if not.
    """
    before = _announced.backend, _announced.reached_a_kernel
    _announced.backend, _announced.reached_a_kernel = backend, False
    try:
        yield
        reached = _announced.reached_a_kernel
    finally:
        _announced.backend, _announced.reached_a_kernel = before
    if backend == TRITON and mixer is not None and not reached:
        logger.warning_once(f"{mixer} has no Triton kernel; attn_implementation='triton' computes it in PyTorch.")


def plain_forms() -> bool:
    """Whether fused operations give way to plain PyTorch: for backend "eager", which is differentiable any number of
    times, and for compilers, which fuse by themselves."""
    return _announced.backend == "eager" or torch.compiler.is_compiling()


def use_triton(implementation: str | None, *tensors: Tensor | None) -> bool:
    """Whether a core is to run its kernels on `tensors`, the first of which is [B, H, T, K].

    What the kernels cannot do (fp64, heads wider than 256) falls back to PyTorch with one warning.

    Args:
        implementation: What the caller of the core asked for: "chunked", "triton", or None for what is announced.

    Raises:
        ValueError: an unknown implementation, or kernels for tensors that are not on a GPU.
        ImportError: there is no triton.
    """
    if implementation is None:
        if _announced.backend != TRITON:
            return False
        _announced.reached_a_kernel = True
    elif implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}")
    elif implementation != TRITON:
        return False
    given = [x for x in tensors if x is not None]
    check_triton(given[0].device)
    problem = None
    if any(x.dtype == torch.float64 for x in given):
        problem = "fp64 tensors"
    elif max(x.shape[-1] for x in given if x.dim() == 4) > WIDEST_HEAD:
        problem = f"heads wider than {WIDEST_HEAD}"
    if problem:
        logger.warning_once(f"The Triton kernels do not take {problem}; PyTorch computes them.")
    return problem is None


def interpreting() -> bool:
    """Whether Triton's interpreter is on, which runs kernels on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def check_triton(device: torch.device) -> None:
    """Raise ValueError or ImportError, saying what to do, if kernels cannot run on tensors of `device`."""
    if device.type != "cuda" and not interpreting():
        raise ValueError(
            f"attn_implementation='triton' needs tensors on a GPU, got them on {str(device)!r}. Move model and inputs "
            "to the GPU, or compute with attn_implementation='sdpa', which needs none "
            "(model.set_attn_implementation('sdpa'))."
        )
    if find_spec("triton") is None:
        raise ImportError("attn_implementation='triton' needs the package triton: pip install triton")
