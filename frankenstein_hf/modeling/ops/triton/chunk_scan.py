"""The chunked recurrence as an autograd function over the Triton kernels, and how they are launched.

Shapes and letters as in `forward_kernels.py`. The scores and the states between chunks go through memory; long
inputs are cut into segments that bound it. The forward pass keeps its inputs and the state before each segment, the
backward pass computes the rest again.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .backward_kernels import (
    key_gradients_kernel,
    reverse_states_kernel,
    score_gradients_kernel,
    value_gradients_kernel,
)
from .forward_kernels import output_kernel, scores_kernel, states_kernel

SEGMENT_BYTES = 2**28  # of the states between the chunks of a segment
CHUNK, SHORT_CHUNK = 64, 32  # the short one where a chunk costs a loop over its tokens
BLOCK = 64  # width of tiles; products need at least 16
SMALL_BLOCK = 32  # where a program holds several K × V tiles


class Problem:
    """One segment: its tensors, and the kernels on them.

    Args:
        q, k: [B·H, L, K].
        z: [B·H, L, V].
        e: [B·H, L, K], or None for the decayed scan.
        g: [B·H, L, K] or [B·H, L, 1].
        scale: Factor of the output.
        C: Chunk length, a power of two from 16.
        part: The T tokens of the segment. All tensors are contiguous.
    """

    def __init__(
        self, q: Tensor, k: Tensor, z: Tensor, e: Tensor | None, g: Tensor, scale: float, C: int, part: slice
    ) -> None:
        self.L = q.shape[1]
        q, k, z, g = (x[:, part] for x in (q, k, z, g))
        e = None if e is None else e[:, part]
        self.q, self.k, self.z, self.g = q, k, z, g
        self.erase, self.e = e is not None, k if e is None else e
        self.scale, self.C = scale, C
        (self.rows, self.T, self.K), self.V, self.G = k.shape, z.shape[-1], g.shape[-1]
        self.N = -(-self.T // C)
        self.block_k, self.block_v = block_size(self.K, BLOCK), block_size(self.V, BLOCK)
        inputs = (q, k, z) if e is None else (q, k, z, e)
        self.precision = _precision(inputs)

    def _run(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **meta: Any) -> None:
        kernel[grid](*arguments, C=self.C, PRECISION=self.precision, **meta, **_launch_options(self.k, kernel))

    def _blocks(self, block_k: int, block_v: int) -> dict[str, int]:
        return {"BK": block_k, "BV": block_v, "BG": block_k if self.G > 1 else 1}

    def _state_blocks(self) -> tuple[tuple[int, int, int], dict[str, int]]:
        """Grid and tiles of the sequential kernels. Erasing reads a whole column of the state."""
        block_k = block_size(self.K, 256 if self.erase else SMALL_BLOCK)
        block_v = block_size(self.V, 16 if block_k > 128 else SMALL_BLOCK)
        return (self.rows, -(-self.K // block_k), -(-self.V // block_v)), self._blocks(block_k, block_v)

    def _new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.k.device)

    def scores(self) -> tuple[Tensor, Tensor, Tensor]:
        """P, A and (I + A)⁻¹, the last two only when erasing."""
        P = self._new(self.rows, self.N, self.C, self.C)
        A, inverse = (torch.empty_like(P), torch.empty_like(P)) if self.erase else (P, P)
        self._run(
            scores_kernel,
            (self.N, self.rows),
            self.q, self.k, self.e, self.g, P, A, inverse, self.T, self.L, self.K,
            BK=self.block_k, PER_KEY=self.G > 1, ERASE=self.erase,
        )  # fmt: skip
        return P, A, inverse

    def states(self, inverse: Tensor, initial: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The states before the chunks, the one after them, and U."""
        states, final = self._new(self.rows, self.N, self.K, self.V), torch.empty_like(initial)
        U = self._new(self.rows, self.L, self.V)[:, : self.T] if self.erase else self.z
        grid, blocks = self._state_blocks()
        self._run(
            states_kernel,
            grid,
            self.k, self.e, self.z, self.g, inverse, initial, states, final, U,
            self.T, self.L, self.N, self.K, self.V, self.G,
            **blocks, ERASE=self.erase,
        )  # fmt: skip
        return states, final, U

    def output(self, P: Tensor, states: Tensor, U: Tensor, output: Tensor) -> None:
        """Fill `output`."""
        self._run(
            output_kernel,
            (self.N, self.rows, -(-self.V // self.block_v)),
            self.q, U, self.g, P, states, output, self.scale, self.T, self.L, self.K, self.V, self.G,
            **self._blocks(self.block_k, self.block_v),
        )  # fmt: skip

    def reverse_states(
        self, P: Tensor, inverse: Tensor, d_output: Tensor, d_final: Tensor, grads: "Problem"
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the state after each chunk and of the initial one; when erasing, fills the gradient of z too."""
        d_states, d_initial = self._new(self.rows, self.N, self.K, self.V), torch.empty_like(d_final)
        grid, blocks = self._state_blocks()
        self._run(
            reverse_states_kernel,
            grid,
            self.q, self.k, self.e, self.g, P, inverse, d_output, d_final, d_states, d_initial, grads.z, self.scale,
            self.T, self.L, self.N, self.K, self.V, self.G,
            **blocks, ERASE=self.erase,
        )  # fmt: skip
        return d_states, d_initial

    def value_gradients(self, P: Tensor, d_output: Tensor, d_states: Tensor, grads: "Problem") -> None:
        """Fill the gradient of z when nothing is erased."""
        self._run(
            value_gradients_kernel,
            (self.N, self.rows, -(-self.V // self.block_v)),
            self.k, self.g, P, d_output, d_states, grads.z, self.scale, self.T, self.L, self.K, self.V, self.G,
            **self._blocks(self.block_k, self.block_v),
        )  # fmt: skip

    def score_gradients(self, U: Tensor, d_output: Tensor, dZ: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of P and, when erasing, of A."""
        dP = self._new(self.rows, self.N, self.C, self.C)
        dA = torch.empty_like(dP) if self.erase else dP
        self._run(
            score_gradients_kernel,
            (self.N, self.rows),
            U, d_output, dZ, dP, dA, self.scale, self.T, self.L, self.V,
            BV=self.block_v, ERASE=self.erase,
        )  # fmt: skip
        return dP, dA

    def key_gradients(
        self,
        scores: tuple[Tensor, Tensor],
        d_scores: tuple[Tensor, Tensor],
        U: Tensor,
        d_output: Tensor,
        states: Tensor,
        d_states: Tensor,
        grads: "Problem",
    ) -> None:
        """Fill the gradients of q, k, e and g."""
        block_k, block_v = block_size(self.K, SMALL_BLOCK), block_size(self.V, SMALL_BLOCK)
        num_blocks = -(-self.K // block_k)
        # a decay per head collects what every block of K has to say
        dg = grads.g if self.G > 1 else self._new(num_blocks, self.rows, self.L, 1)
        self._run(
            key_gradients_kernel,
            (self.N, self.rows, num_blocks),
            self.q, self.k, self.e, U, self.g, *scores, *d_scores, d_output, grads.z, states, d_states,
            grads.q, grads.k, grads.e, dg, self.scale, self.T, self.L, self.K, self.V, self.G,
            **self._blocks(block_k, block_v), ERASE=self.erase,
        )  # fmt: skip
        if self.G == 1:
            grads.g.copy_(dg[:, :, : self.T].sum(0))

    def gradients(self, initial: Tensor, d_output: Tensor, d_final: Tensor, grads: "Problem") -> Tensor:
        """Fill the tensors of `grads`, and return the gradient of the initial state."""
        P, A, inverse = self.scores()
        states, _, U = self.states(inverse, initial)
        d_states, d_initial = self.reverse_states(P, inverse, d_output, d_final, grads)
        if not self.erase:
            self.value_gradients(P, d_output, d_states, grads)
        d_scores = self.score_gradients(U, d_output, grads.z)
        self.key_gradients((P, A), d_scores, U, d_output, states, d_states, grads)
        return d_initial


def block_size(width: int, largest: int) -> int:
    """The power of two, from 16 to `largest`, that holds `width` or as much of it as it can."""
    return min(largest, max(16, 1 << (width - 1).bit_length()))


def _precision(inputs: tuple[Tensor, ...]) -> str:
    """Of products. TF32 loses nothing of half-precision inputs; fp32 ones get it only if the user allows it."""
    half = all(x.dtype in (torch.bfloat16, torch.float16) for x in inputs)
    fast = half or torch.get_float32_matmul_precision() != "highest"
    return "tf32" if fast and torch.version.hip is None else "ieee"


def _launch_options(x: Tensor, kernel: Any) -> dict[str, int]:
    """Warps and pipeline stages, on a GPU; the interpreter has neither."""
    if not x.is_cuda:
        return {}
    # several tiles of K × V or C × K at once: a second pipeline stage would not fit into smaller GPUs' shared memory
    crowded = kernel in (states_kernel, reverse_states_kernel, key_gradients_kernel)
    return {"num_warps": 4, "num_stages": 1 if crowded else 2}


class ChunkScan(torch.autograd.Function):
    """q, k, e [B·H, T, K] (e may be None), z [B·H, T, V], g [B·H, T, K or 1], S [B·H, K, V] fp32 -> O and the last S.

    All tensors are contiguous; `C` is the chunk length.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, z: Tensor, e: Tensor | None, g: Tensor, S: Tensor, scale: float, C: int
    ):
        output = torch.empty_like(z, dtype=q.dtype)
        starts = []
        with device_of(q):
            for part in segments(S, q.shape[1], C):
                starts.append(S)
                problem = Problem(q, k, z, e, g, scale, C, part)
                P, _, inverse = problem.scores()
                states, S, U = problem.states(inverse, S)
                problem.output(P, states, U, output[:, part])
        ctx.save_for_backward(q, k, z, e, g, *starts)
        ctx.scale, ctx.C = scale, C
        ctx.set_materialize_grads(False)
        return output, S

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, z, e, g, *starts = ctx.saved_tensors
        d_output = torch.zeros_like(z) if d_output is None else d_output.contiguous()
        dS = torch.zeros_like(starts[0]) if d_final is None else d_final.contiguous()
        dq, dk, dz, dg = (torch.empty_like(x) for x in (q, k, z, g))
        de = None if e is None else torch.empty_like(e)
        with device_of(q):
            for S, part in reversed(list(zip(starts, segments(starts[0], q.shape[1], ctx.C)))):
                problem = Problem(q, k, z, e, g, ctx.scale, ctx.C, part)
                grads = Problem(dq, dk, dz, de, dg, ctx.scale, ctx.C, part)
                dS = problem.gradients(S, d_output[:, part], dS, grads)
        return dq, dk, dz, de, dg, dS, None, None


def segments(S: Tensor, T: int, C: int) -> Iterator[slice]:
    """Time slices of whole chunks whose states fit into SEGMENT_BYTES."""
    size = C * max(1, SEGMENT_BYTES // (4 * S.numel()))
    return (slice(start, min(start + size, T)) for start in range(0, T, size))


def device_of(x: Tensor) -> Any:
    """Triton launches on the current device, not on the tensors'."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def flat(x: Tensor) -> Tensor:
    """[B, H, …] -> [B·H, …], contiguous."""
    return x.flatten(0, 1).contiguous()


def flat_state(S: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """The initial state as [B·H, K, V] in fp32; zeros of `shape` [B, H, K, V] on the device of `like` if None."""
    return flat(torch.zeros(shape, device=like.device) if S is None else S.to(torch.float32))
