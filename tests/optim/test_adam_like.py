"""LaProp, ADOPT and cautious AdamW against derivations from their papers."""

import numpy as np

from .toy import check_parity


def test_laprop():
    def derive(w, gradients, *, lr, weight_decay, betas, eps):
        (mu, nu), m, n = betas, 0.0, 0.0
        for t, g in enumerate(gradients, 1):
            w = w * (1 - lr * weight_decay)
            n = nu * n + (1 - nu) * g**2
            m = mu * m + (1 - mu) * g / (np.sqrt(n / (1 - nu**t)) + eps)
            w = w - lr * m / (1 - mu**t)
        return w

    check_parity("laprop", derive)
    check_parity("laprop", derive, betas=(0.5, 0.7), eps=0.1)


def test_adopt():
    def derive(w, gradients, *, lr, weight_decay, betas, eps, clip_exponent):
        v, m = gradients[0] ** 2, 0.0
        for t, g in enumerate(gradients[1:], 1):
            normed = g / np.maximum(np.sqrt(v), eps)
            if clip_exponent is not None:
                normed = np.clip(normed, -(t**clip_exponent), t**clip_exponent)
            m = betas[0] * m + (1 - betas[0]) * normed
            w = w * (1 - lr * weight_decay) - lr * m
            v = betas[1] * v + (1 - betas[1]) * g**2
        return w

    check_parity("adopt", derive)
    check_parity("adopt", derive, clip_exponent=None, betas=(0.9, 0.5))


def test_cautious_adamw():
    def derive(w, gradients, *, lr, weight_decay, betas, eps, cautious_clip):
        m = v = 0.0
        for t, g in enumerate(gradients, 1):
            m = betas[0] * m + (1 - betas[0]) * g
            v = betas[1] * v + (1 - betas[1]) * g**2
            mask = (m * g > 0).astype(float)
            u = (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
            w = w * (1 - lr * weight_decay) - lr * u * mask / max(mask.mean(), cautious_clip)
        return w

    check_parity("cautious_adamw", derive)
    check_parity("cautious_adamw", derive, cautious_clip=0.9)
