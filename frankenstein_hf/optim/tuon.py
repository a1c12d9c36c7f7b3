"""Muon across layers: TUON."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..configuration.component import param
from .base import ParamGroup
from .decompositions import eigh
from .matrices import matrix_shape
from .matrix_method import FALLBACK, MatrixMethod, OrthogonalParams, Stack, orthogonal
from .spec import OptimizerSpec, floats, or_adamw


@dataclass(frozen=True, kw_only=True)
class TuonParams(OrthogonalParams):
    """Parameters of `tuon`."""

    transform: str = param("decorq", "Q, the transform across layers", choices=("decorq", "dct", "haar", "dft"))
    refresh_interval: int = param(200, "T, steps between refreshes of decorq's Q", minimum=1)
    stack: str = param(
        "full", "transform all matrices of a shape together, or pairs of them", choices=("full", "pairs")
    )
    rms_eps: float = param(1e-8, "ε, added to the root mean square of the step", minimum=0.0)


class Tuon(MatrixMethod):
    """Momentum mixed across the K matrices of one shape and orthogonalised there (arXiv 2610.35130, algorithm 1):

        M_k ← β M_k + (1 − β) G_k;  every T steps: C = [⟨M_j, M_k⟩] = U Λ Uᵀ, Q = Uᵀ
        P̃_j = NS(Σ_k Q_jk M_k);  P = Qᴴ P̃;  W ← (1 − η λ) W − η s / (RMS(P) + ε) P,  s = 1 / √max(m, n)

    A stack is what one parameter group has of a shape, in order of registration; the RMS is over the stack. K = 1 is
    Muon's direction. dct, haar and dft are fixed orthonormal (unitary) Q; haar splits K into powers of two. The paper
    gives no β; 0.95 as in Muon. Q is kept in the shared state, by the position of the stack's first parameter.
    """

    params_class = TuonParams
    shapewise = False  # a stack needs all of its matrices

    def direction(self, x: Tensor, stack: Stack, group: ParamGroup) -> Tensor:
        m, n = stack.shape
        size = len(x) if group["stack"] == "full" else 2
        whole = len(x) - len(x) % size if size > 1 else 0
        if not whole:
            return _to_rms(orthogonal(x, group)[:, None], group["rms_eps"]).squeeze(1)
        blocks = x[:whole].reshape(-1, size, m * n)
        q = self._transform(blocks, stack, group)
        mixed = (q @ blocks.to(q.dtype)).reshape(whole, m, n)
        if whole == len(x) or mixed.is_complex():
            p = orthogonal(mixed, group)
            alone = x[whole:] if whole == len(x) else orthogonal(x[whole:], group)
        else:
            p, alone = orthogonal(torch.cat([mixed, x[whole:]]), group).split([whole, len(x) - whole])
        back = q.mH @ p.reshape(-1, size, m * n)
        back = (back.real if back.is_complex() else back).reshape(-1, size, m, n)
        together = _to_rms(back, group["rms_eps"]).reshape(whole, m, n)
        return torch.cat([together, _to_rms(alone[:, None], group["rms_eps"]).squeeze(1)])

    def _transform(self, blocks: Tensor, stack: Stack, group: ParamGroup) -> Tensor:
        """Q of each block [B, K, mn]: [B or 1, K, K]."""
        size = blocks.shape[1]
        if group["transform"] != "decorq":
            return FIXED[group["transform"]](size).to(blocks.device, _dtype(group["transform"], blocks.dtype))[None]
        shared, m, n = self.shared_state(), *stack.shape
        key = f"q {stack.batch.positions[stack.indices[0]]} {m}x{n}"
        q = shared.get(key)
        if q is None or q.shape != (len(blocks), size, size) or (stack.step - 1) % group["refresh_interval"] == 0:
            q = shared[key] = eigh(blocks @ blocks.mT).eigenvectors.mT.contiguous()
        return q


def _to_rms(p: Tensor, eps: float) -> Tensor:
    """Each stack [·, K, m, n] scaled to a root mean square of 1/√max(m, n)."""
    s = max(p.shape[-2:]) ** -0.5
    return p * (s / (p.square().mean((-3, -2, -1), keepdim=True).sqrt() + eps))


def _dtype(transform: str, dtype: torch.dtype) -> torch.dtype:
    if transform != "dft":
        return dtype
    return torch.complex128 if dtype == torch.float64 else torch.complex64


def dct(k: int) -> Tensor:
    """The orthonormal discrete cosine transform (type II)."""
    j = torch.arange(k, dtype=torch.float64)
    q = torch.cos(math.pi / k * torch.outer(j, j + 0.5)) * (2 / k) ** 0.5
    q[0] *= 0.5**0.5
    return q


def haar(k: int) -> Tensor:
    """The orthonormal Haar transform, one block for each power of two that k consists of."""
    blocks = []
    for power in range(k.bit_length() - 1, -1, -1):
        if not k >> power & 1:
            continue
        h = torch.ones(1, 1, dtype=torch.float64)
        for _ in range(power):
            same, other = h.new_tensor([[1.0, 1.0]]), h.new_tensor([[1.0, -1.0]])
            h = torch.cat([torch.kron(h, same), torch.kron(torch.eye(len(h), dtype=h.dtype), other)]) * 0.5**0.5
        blocks.append(h)
    return torch.block_diag(*blocks)


def dft(k: int) -> Tensor:
    """The unitary discrete Fourier transform."""
    j = torch.arange(k, dtype=torch.float64)
    return torch.polar(torch.full((k, k), k**-0.5, dtype=torch.float64), -2 * math.pi / k * torch.outer(j, j))


FIXED = {"dct": dct, "haar": haar, "dft": dft}


def _q_bytes(params: Any, shapes: Sequence[tuple[Sequence[int], str]]) -> int:
    """Of decorq, where no two groups share a shape (a group's stacks are its own)."""
    counts: dict[tuple[int, int], int] = {}
    for shape, kind in shapes:
        if kind == "matrix":
            s, m, n = matrix_shape(shape)
            counts[m, n] = counts.get((m, n), 0) + s
    if params.transform != "decorq":
        return 0
    if params.stack == "pairs":
        return 4 * sum(4 * (k // 2) for k in counts.values())
    return 4 * sum(k * k for k in counts.values() if k > 1)


SPECS = (
    OptimizerSpec(
        name="tuon",
        family="orthogonal",
        summary="Muon on matrices of equal shape mixed across layers by a decorrelating transform.",
        reference="TUON: A tensor-aware optimizer utilizing tensor-SVD and polarization, arXiv 2610.35130",
        params=TuonParams,
        implementation="tuon:Tuon",
        state_bytes=or_adamw(floats(1)),
        shared_state_bytes=_q_bytes,
        fallback=FALLBACK,
        small_params={"refresh_interval": 3},
    ),
)
