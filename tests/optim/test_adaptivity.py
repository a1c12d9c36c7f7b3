"""Anon against a derivation from its algorithm."""

import numpy as np
import pytest

from .toy import check_parity


@pytest.mark.parametrize("gamma", [1.0, 0.0, -0.5, 1.7])
def test_anon(gamma):
    def derive(w, gradients, *, lr, weight_decay, betas, eps, gamma):
        m = v = 0.0
        k, fixed = -1, None
        for t, g in enumerate(gradients, 1):
            m = betas[0] * m + (1 - betas[0]) * g
            v = betas[1] * v + (1 - betas[1]) * g**2
            if t in (1, 2, 4, 8):
                k += 1
                v_bar = v / (1 - betas[1] ** max(t / 2, 1)) + eps
                fixed = v_bar ** (-gamma / 2) if k == 0 else np.sqrt(2 / (1 / fixed**2 + v_bar**gamma))
                v = 0.0
            w = w * (1 - lr * weight_decay) - lr / (1 - betas[0] ** t) * m * fixed
        return w

    check_parity("anon", derive, gamma=gamma)
