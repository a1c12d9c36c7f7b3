"""Lion and AdamPM against derivations from their papers."""

import numpy as np
import pytest

from .test_first_order import adamw
from .toy import check_parity


def test_lion():
    def derive(w, gradients, *, lr, weight_decay, betas):
        m = np.zeros_like(w)
        for g in gradients:
            w = w - lr * (np.sign(betas[0] * m + (1 - betas[0]) * g) + weight_decay * w)
            m = betas[1] * m + (1 - betas[1]) * g
        return w

    check_parity("lion", derive)


@pytest.mark.parametrize("pooling", ["rows", "columns"])
@pytest.mark.parametrize("group_size", [2, 3, 100])
def test_adampm(pooling, group_size):
    def derive(w, gradients, *, lr, weight_decay, betas, eps, group_size, pooling):
        axis = -2 if pooling == "columns" and w.ndim > 1 else -1
        m = v = 0.0
        for t, g in enumerate(gradients, 1):
            square = np.moveaxis(g**2, axis, -1).copy()
            for start in range(0, square.shape[-1], group_size):  # every entry gets the mean of its group
                part = square[..., start : start + group_size]
                part[...] = part.mean(-1, keepdims=True)
            m = betas[0] * m + (1 - betas[0]) * g
            v = betas[1] * v + (1 - betas[1]) * np.moveaxis(square, -1, axis)
            w = w * (1 - lr * weight_decay)
            w = w - lr * (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
        return w

    check_parity("adampm", derive, pooling=pooling, group_size=group_size)


def test_adampm_with_groups_of_one_is_adamw():
    check_parity("adampm", adamw, group_size=1)
