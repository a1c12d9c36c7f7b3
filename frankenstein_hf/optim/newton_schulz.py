"""Nearly orthogonal factors of stacks of matrices by Newton–Schulz iterations."""

import functools
import math
import time

import torch
from torch import Tensor

Triple = tuple[float, float, float]

MUON: Triple = (3.4445, -4.7750, 2.0315)
CUBIC: Triple = (1.5, -0.5, 0.0)

# Optimal polynomials for σ ≥ 10⁻³ (arXiv 2505.16932); later steps equal the last one.
_POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
_SAFETY = 1.01  # of the paper, against rounding in half precision

# By name: a triple (a, b, c) for each step; further steps repeat the last.
COEFFICIENTS: dict[str, tuple[Triple, ...]] = {
    "muon": (MUON,),
    "cubic": (CUBIC,),
    "quintic": (  # tuned step by step; of modded-nanogpt and Dion
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        *((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS),
        (1.875, -1.25, 0.375),
    ),
}
# Turbo-Muon drops the first step of a set: its rescaling does the work of that step. (Its authors' own four triples
# turn the sign of σ = 1, which a matrix with orthogonal rows has after the rescaling.)
COEFFICIENTS["turbo"] = COEFFICIENTS["quintic"][1:]


def schedule(name: str, steps: int) -> tuple[Triple, ...]:
    """The coefficients of so many steps of a set in `COEFFICIENTS`."""
    triples = COEFFICIENTS[name]
    return tuple(triples[min(i, len(triples) - 1)] for i in range(steps))


LARGE = 1 << 13  # elements of a matrix from which bf16 pays where a CPU has instructions for it


@functools.cache
def prefers_bf16() -> bool:
    """Whether this CPU multiplies bf16 matrices clearly faster than fp32 ones: measured once in a process.

    With instructions for it bf16 takes about half the time or less, without them several times as long.
    """
    x = torch.randn(2, 256, 256)

    def fastest(y: Tensor) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            torch.bmm(y, y)
            times.append(time.perf_counter() - start)
        return min(times)

    return fastest(x.bfloat16()) < 0.8 * fastest(x)


def newton_schulz(
    x: Tensor,
    coefficients: tuple[Triple, ...],
    *,
    eps: float = 1e-7,
    almost_orthogonal: bool = False,
    gram: bool | None = None,
    bf16: bool = False,
) -> Tensor:
    """X ← a X + b X XᴴX + c X (XᴴX)², once for each (a, b, c), from X / max(‖X‖_F, eps).

    Args:
        x: [S, m, n], real or complex.
        coefficients: One triple a step.
        eps: Least Frobenius norm that the matrices are divided by.
        almost_orthogonal: First divide each row (column, where m > n) by (Σ_j |X Xᴴ|_ij)^½, which bounds the singular
            values by 1 more tightly than the norm does (arXiv 2208.03160).
        gram: Iterate on X Xᴴ instead of X (see `_by_gram`); None: where that takes fewer operations.
        bf16: Multiply fp32 matrices in bf16 on a CPU; the Gram form is then left to those who ask for it.

    Otherwise the matrices are multiplied in their own precision on a CPU. On accelerators fp32 becomes bf16, as in
    Muon, or fp16 for the Gram form, as in Dion3: in bf16 that can double the largest singular values.

    Returns:
        [S, m, n], close to U Vᴴ of x = U Σ Vᴴ, in the precision of the products.
    """
    tall = x.shape[-2] > x.shape[-1]
    y = (x.mH if tall else x).to(
        torch.bfloat16 if bf16 and x.dtype == torch.float32 else x.dtype,  # before anything else, as torch.optim.Muon
        memory_format=torch.contiguous_format,
    )
    y = y / torch.linalg.matrix_norm(y, keepdim=True).clamp_min(eps)
    if gram is None:
        gram = 2 * y.shape[-1] > 3 * y.shape[-2] and not bf16
    if y.dtype == torch.float32 and x.device.type != "cpu":
        y = y.to(torch.float16 if gram else torch.bfloat16)
    r = None
    if almost_orthogonal:
        r = y @ y.mH
        s = r.abs().sum(-1, keepdim=True).clamp_min(max(eps * eps, torch.finfo(y.dtype).tiny)).rsqrt()
        y, r = s * y, s * r * s.mT
    y = _by_gram(y, r, coefficients) if gram else _by_steps(y, r, coefficients)
    return y.mH if tall else y


def _by_steps(y: Tensor, r: Tensor | None, coefficients: tuple[Triple, ...]) -> Tensor:
    size = y.shape[-2]
    # room for all steps: allocating it anew each time costs a twentieth of the products
    gram, polynomial = y.new_empty(len(y), size, size), y.new_empty(len(y), size, size)
    turns = torch.empty_like(y), torch.empty_like(y)
    for i, (a, b, c) in enumerate(coefficients):
        r = torch.bmm(y, y.mH, out=gram) if r is None else r
        torch.baddbmm(r, r, r, beta=b, alpha=c, out=polynomial)
        y, r = torch.baddbmm(y, polynomial, y, beta=a, out=turns[i % 2]), None
    return y


RESTART = 2  # steps, after which rounding leaves spurious negative eigenvalues in the Gram matrix
NEGLIGIBLE = 0.01  # they grow by a² a step: restart where that makes them larger than this


def _by_gram(y: Tensor, r: Tensor | None, coefficients: tuple[Triple, ...]) -> Tensor:
    """The same on the Gram matrix R = Y Yᴴ, for wide matrices (arXiv 2608.11612): with P = a I + b R + c R²,

    Q ← Q P;  R ← P R P;  at last Y ← Q Y

    and, where rounding errors would grow too far, also after the second step, where R = Y Yᴴ is formed anew.
    """
    growth = math.prod(a * a for a, _, _ in coefficients)
    restart = RESTART if growth * torch.finfo(y.dtype).eps > NEGLIGIBLE else len(coefficients)
    q = None
    for i, (a, b, c) in enumerate(coefficients):
        if i == restart and q is not None:
            y, r, q = q @ y, None, None
        r = y @ y.mH if r is None else r
        p = torch.baddbmm(r, r, r, beta=b, alpha=c)
        p.diagonal(dim1=-2, dim2=-1).add_(a)
        q = p if q is None else q @ p
        if i + 1 < len(coefficients) and i + 1 != restart:
            r = p @ (r @ p)
    return y if q is None else q @ y
