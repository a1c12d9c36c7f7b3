"""Newton–Schulz by hand for the tests of orthogonalising optimizers."""

import numpy as np

MATRICES = ((4, 3), (3, 2, 6), (1, 7), (2, 5))
MUON = ((3.4445, -4.7750, 2.0315),)


def polynomial(x, triples):
    """a X + b X XᵀX + c X (XᵀX)², through the singular values."""
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    for a, b, c in triples:
        s = a * s + b * s**3 + c * s**5
    return (u * s[..., None, :]) @ vt


def norm(x):
    """Frobenius norm of each matrix."""
    return np.sqrt((x**2).sum((-2, -1), keepdims=True))


def ns(x, triples=MUON * 5):
    """Orthogonalised x."""
    return polynomial(x / norm(x), triples)
