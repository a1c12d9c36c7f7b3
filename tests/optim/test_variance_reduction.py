"""Adan, AdEMAMix and MARS against derivations from their papers, and where they become AdamW."""

import math

import numpy as np

from .test_first_order import adamw
from .toy import check_parity

MATRICES = ((4, 3), (3, 2, 6), (1, 7))


def test_adan():
    def derive(w, gradients, *, lr, weight_decay, betas, eps, no_prox):
        m = v = n = 0.0
        previous = gradients[0]
        for t, g in enumerate(gradients, 1):
            difference, previous = g - previous, g
            m = betas[0] * m + (1 - betas[0]) * g
            v = betas[1] * v + (1 - betas[1]) * difference
            n = betas[2] * n + (1 - betas[2]) * (g + betas[1] * difference) ** 2
            m_hat, v_hat, n_hat = (x / (1 - beta**t) for x, beta in zip((m, v, n), betas))
            step = lr * (m_hat + betas[1] * v_hat) / (np.sqrt(n_hat) + eps)
            w = w * (1 - lr * weight_decay) - step if no_prox else (w - step) / (1 + lr * weight_decay)
        return w

    check_parity("adan", derive)
    check_parity("adan", derive, no_prox=True, betas=(0.9, 0.8, 0.7))


def ademamix(w, gradients, *, lr, weight_decay, betas, eps, alpha, alpha_warmup, beta3_warmup):
    fast = slow = v = 0.0
    for t, g in enumerate(gradients, 1):
        alpha_t = alpha * min(1.0, t / alpha_warmup) if alpha_warmup else alpha
        beta3 = betas[2]
        if t < beta3_warmup:
            # the number of steps in which a weight halves grows linearly
            steps = np.interp(t, (0, beta3_warmup), [math.log(0.5) / math.log(b) - 1 for b in (betas[0], betas[2])])
            beta3 = 0.5 ** (1 / (steps + 1))
        fast = betas[0] * fast + (1 - betas[0]) * g
        slow = beta3 * slow + (1 - beta3) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        update = (fast / (1 - betas[0] ** t) + alpha_t * slow) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
        w = w - lr * (update + weight_decay * w)
    return w


def test_ademamix():
    check_parity("ademamix", ademamix)
    check_parity("ademamix", ademamix, alpha_warmup=0, beta3_warmup=0, alpha=5.0)


def test_ademamix_without_the_slow_average_is_adamw():
    check_parity("ademamix", adamw, alpha=0.0)


def test_mars():
    def derive(w, gradients, *, lr, weight_decay, betas, eps, gamma, clip_norm, recursive, **_):
        m = v = 0.0
        g_prev = c = np.zeros_like(w)
        for t, g in enumerate(gradients, 1):
            c = g + gamma * (c - g_prev) if recursive else g + gamma * betas[0] / (1 - betas[0]) * (g - g_prev)
            g_prev = g
            if clip_norm is not None:
                c = c / max(1.0, np.linalg.norm(c) / clip_norm)
            w = w * (1 - lr * weight_decay)
            m = betas[0] * m + (1 - betas[0]) * c
            v = betas[1] * v + (1 - betas[1]) * c**2
            w = w - lr * (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
        return w

    check_parity("mars_adamw", derive, shapes=MATRICES)
    check_parity("mars_adamw", derive, shapes=MATRICES, gamma=0.1, recursive=True, clip_norm=5.0)


def test_mars_without_correction_and_clipping_is_adamw():
    check_parity("mars_adamw", adamw, shapes=MATRICES, gamma=0.0, clip_norm=None)
