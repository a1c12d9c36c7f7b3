"""The thin entries do what the papers say, in fp32 also for 16-bit parameters."""

import math

import numpy as np
import torch
from torch import nn

import frankenstein_hf as fhf

from .toy import check_parity


def test_sgd():
    def derive(w, gradients, *, lr, weight_decay):
        for g in gradients:
            w = w - lr * (g + weight_decay * w)
        return w

    check_parity("sgd", derive)


def test_sgd_momentum():
    def derive(w, gradients, *, lr, weight_decay, momentum, dampening, nesterov):
        m = 0.0
        for g in gradients:
            g = g + weight_decay * w
            m = momentum * m + g
            w = w - lr * (g + momentum * m if nesterov else m)
        return w

    check_parity("sgd_momentum", derive)
    check_parity("sgd_momentum", derive, nesterov=True, momentum=0.7)


def test_rmsprop():
    def derive(w, gradients, *, lr, weight_decay, alpha, eps, **_):
        v = 0.0
        for g in gradients:
            g = g + weight_decay * w
            v = alpha * v + (1 - alpha) * g**2
            w = w - lr * g / (np.sqrt(v) + eps)
        return w

    check_parity("rmsprop", derive)


def adamw(w, gradients, *, lr, weight_decay, betas, eps, **_):
    m = v = 0.0
    for t, g in enumerate(gradients, 1):
        w = w * (1 - lr * weight_decay)
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        w = w - lr * (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
    return w


def test_adamw():
    check_parity("adamw", adamw, betas=(0.8, 0.9), eps=1e-3)


def test_radam():
    def derive(w, gradients, *, lr, weight_decay, betas, eps):
        m = v = 0.0
        rho_inf = 2 / (1 - betas[1]) - 1
        for t, g in enumerate(gradients, 1):
            w = w * (1 - lr * weight_decay)
            m = betas[0] * m + (1 - betas[0]) * g
            v = betas[1] * v + (1 - betas[1]) * g**2
            rho = rho_inf - 2 * t * betas[1] ** t / (1 - betas[1] ** t)
            step = m / (1 - betas[0] ** t)
            if rho > 5:  # the paper has 4, where torch and the authors' code have 5
                r = math.sqrt((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho))
                step = step * r * math.sqrt(1 - betas[1] ** t) / (np.sqrt(v) + eps)
            w = w - lr * step
        return w

    check_parity("radam", derive)


def test_adafactor():
    def derive(w, gradients, *, lr, weight_decay, beta2_decay, eps, d):
        R = C = V = 0.0
        for t, g in enumerate(gradients, 1):
            beta2 = 1 - t**beta2_decay
            rho = min(lr, t**-0.5)
            alpha = max(eps[1], np.sqrt((w**2).mean())) * rho
            w = w * (1 - lr * weight_decay)
            eps1 = np.finfo(np.float64).eps
            if w.ndim > 1:
                R = beta2 * R + (1 - beta2) * (g**2).mean(-1, keepdims=True)
                C = beta2 * C + (1 - beta2) * (g**2).mean(-2, keepdims=True)
                estimate = R * C / np.maximum(R.mean(-2, keepdims=True), eps1)
            else:
                V = beta2 * V + (1 - beta2) * g**2
                estimate = V
            u = g / np.sqrt(np.maximum(estimate, eps1**2))
            w = w - alpha * u / max(1.0, np.sqrt((u**2).mean()) / d)
        return w

    check_parity("adafactor", derive)


def test_bf16_parameters_are_updated_in_fp32():
    """One step from the same values: the update itself is that of an fp32 parameter, rounded once."""
    torch.manual_seed(0)
    w16 = nn.Parameter(torch.randn(50, dtype=torch.bfloat16))
    w32 = nn.Parameter(w16.detach().float())
    g = torch.randn(50, dtype=torch.bfloat16)
    for w in (w16, w32):
        w.grad = g.to(w.dtype)
        module = nn.Module()
        module.w = w
        fhf.create_optimizer(module, "adamw", lr=0.1, bf16_update="round").step()
    assert torch.equal(w16, w32.to(torch.bfloat16))
    assert w16.grad is not None and w16.grad.dtype == torch.bfloat16
