"""GaLore and the APOLLO family against derivations from their papers, and where they become Adam or SGD."""

import numpy as np
import pytest
import torch

from frankenstein_hf.optim.apollo import projection
from frankenstein_hf.optim.exact_state import seeded_generator
from frankenstein_hf.optim.quantized import dequantize, quantize, quantized_bytes

from .test_first_order import adamw
from .toy import TWO_GROUPS, check_parity

SHAPES = ((4, 3), (3, 2, 6), (1, 7))
WIDE = {"left": lambda m, n: True, "right": lambda m, n: False,
        "std": lambda m, n: m < n, "reverse_std": lambda m, n: m >= n}  # fmt: skip


def each_matrix(one, shapes=SHAPES):
    """`one(w, gradients, (position, s, stack), **params)` applied to every matrix s of a stack."""

    def derive(w, gradients, **params):
        stack = w.reshape(-1, *w.shape[-2:])
        position = [own["lr"] for own in TWO_GROUPS].index(params["lr"]) * len(shapes) + shapes.index(w.shape)
        columns = [[g.reshape(stack.shape)[s] for g in gradients] for s in range(len(stack))]
        results = [one(x, gs, (position, s, len(stack)), **params) for s, (x, gs) in enumerate(zip(stack, columns))]
        return np.stack(results).reshape(w.shape)

    return derive


# ---------------------------------------------------------------------- GaLore


@each_matrix
def galore(w, gradients, _, *, lr, weight_decay, betas, eps, rank, update_proj_gap, scale, proj_type, **__):
    m = v = 0.0
    for t, g in enumerate(gradients, 1):
        if t % update_proj_gap == 1 or update_proj_gap == 1:
            u, _, vh = np.linalg.svd(g)
            a, b = (x * np.sign(x[np.abs(x).argmax(0), range(x.shape[1])]) for x in (u, vh.T))
            a, b = a[:, : min(rank, *g.shape)], b[:, : min(rank, *g.shape)]
            if proj_type != "full":
                a, b = (a, np.eye(g.shape[1])) if WIDE[proj_type](*g.shape) else (np.eye(g.shape[0]), b)
        r = a.T @ g @ b
        m = betas[0] * m + (1 - betas[0]) * r
        v = betas[1] * v + (1 - betas[1]) * r**2
        n = m / (1 - betas[0] ** t) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
        w = w * (1 - lr * weight_decay) - lr * scale * a @ n @ b.T
    return w


@pytest.mark.parametrize("proj_type", ["std", "reverse_std", "left", "right", "full"])
def test_galore(proj_type):
    check_parity("galore_adamw", galore, shapes=SHAPES, proj_type=proj_type)


def test_galore_of_full_rank_and_one_projection_is_adam_in_that_basis():
    @each_matrix
    def derive(w, gradients, _, **params):
        u, _, vh = np.linalg.svd(gradients[0])
        if len(w) >= w.shape[1]:  # the square factor is on the right
            return adamw(w @ vh.T, [g @ vh.T for g in gradients], **params) @ vh
        return u @ adamw(u.T @ w, [u.T @ g for g in gradients], **params)

    check_parity("galore_adamw", derive, shapes=SHAPES, rank=9, update_proj_gap=100, scale=1.0)


# ---------------------------------------------------------------------- APOLLO


def derive_apollo(rank=None, scale_type="tensor", store=lambda m, v, *_: (m, v), shapes=SHAPES):
    """APOLLO in numpy; `store` is what becomes of the moments between steps."""

    def derive(w, gradients, place, *, lr, weight_decay, betas, eps, update_proj_gap, scale, proj_type, seed,
               scale_front, disable_nl, **own):  # fmt: skip
        (position, s, stack), left, before = place, WIDE[proj_type](*w.shape), None
        wanted, kind = own.get("rank", rank), own.get("scale_type", scale_type)
        m = v = 0.0
        for t, g in enumerate(gradients, 1):
            draws = torch.zeros(stack, *w.shape, dtype=torch.float64)
            p = projection(draws, wanted, left, seed, (t - 1) // update_proj_gap, position)[s].numpy()
            assert len(p) == min(wanted, p.shape[1])
            r = p @ g if left else g @ p.T
            m = betas[0] * m + (1 - betas[0]) * r
            v = betas[1] * v + (1 - betas[1]) * r**2
            normed = m / (np.sqrt(v) + eps)
            axis = None if kind == "tensor" else 0 if left else 1
            factor = np.sqrt((normed**2).sum(axis, keepdims=True)) / (np.sqrt((r**2).sum(axis, keepdims=True)) + 1e-8)
            u = g * factor * (scale**0.5 if scale_front else 1)
            if before is not None and not disable_nl:
                u = u / (max(np.linalg.norm(u) / (before + 1e-8), 1.01) / 1.01)
            before = np.linalg.norm(u)
            w = w * (1 - lr * weight_decay)
            w = w - lr * np.sqrt(1 - betas[1] ** t) / (1 - betas[0] ** t) * u * (1 if scale_front else scale**0.5)
            m, v = store(m, v, position, t)
        return w

    return each_matrix(derive, shapes)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"scale_type": "tensor", "scale": 4.0, "proj_type": "reverse_std"},
        {"scale_front": True, "scale": 4.0, "proj_type": "left", "seed": 3},
        {"disable_nl": True, "proj_type": "right", "rank": 100},
    ],
)
def test_apollo(params):
    check_parity("apollo", derive_apollo(), shapes=SHAPES, **params)


def test_apollo_mini():
    check_parity("apollo_mini", derive_apollo(rank=1), shapes=SHAPES)
    check_parity("apollo", derive_apollo(rank=1), shapes=SHAPES, rank=1, scale_type="tensor", scale=128.0)


def test_projections_have_the_right_variance_and_depend_on_seed_epoch_and_position():
    g = torch.zeros(1, 400, 500)
    p = projection(g, 100, True, 0, 0, 0)
    assert p.shape == (1, 100, 400) and abs(float(p.square().mean()) * 100 - 1) < 0.03
    assert torch.equal(p, projection(g, 100, True, 0, 0, 0))
    for other in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        assert not torch.equal(p, projection(g, 100, True, *other))


# ---------------------------------------------------------------------- Q-APOLLO


def round_trip(x, noise, bits, size):
    """Quantised and back, in numpy: one number after the other."""
    flat, noise = x.flatten(), noise.flatten()
    result = np.empty_like(flat)
    for start in range(0, len(flat), size):
        part = flat[start : start + size]
        low, scale = part.min(), (part.max() - part.min()) / (2**bits - 1)
        for i, value in enumerate(part, start):
            code = min(np.floor((value - low) / scale + noise[i]), 2**bits - 1) if scale else 0
            result[i] = low + scale * code
    return result.reshape(x.shape)


@pytest.mark.parametrize("bits", [2, 5, 8])
def test_q_apollo(bits):
    def store(m, v, position, t):
        generator = seeded_generator(0, t, position, 1)
        noise = [torch.rand(-(-m.size // 8), 8, generator=generator, dtype=torch.float64).numpy() for _ in "mv"]
        return round_trip(m, noise[0], bits, 8), round_trip(np.sqrt(v), noise[1], bits, 8) ** 2

    shapes = ((4, 3), (5, 6), (1, 7))  # no stacks: their matrices would share groups of numbers
    check_parity("q_apollo", derive_apollo(store=store, shapes=shapes), shapes=shapes, quant_bits=bits)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("size", [0, 8, 20, 128])
def test_quantised_tensors(bits, size):
    x = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(0))
    parts = quantize(x, bits, size, seeded_generator(0))
    assert sum(part.nbytes for part in parts.values()) == quantized_bytes(x.numel(), bits, size)
    back = dequantize(parts, x.shape, bits)
    assert (back - x).abs().max() <= parts["scale"].max() * 1.001
    assert torch.allclose(back.aminmax().min, x.min()) and torch.allclose(back.aminmax().max, x.max(), atol=1e-5)
    many = torch.stack([dequantize(quantize(x, bits, size, seeded_generator(i)), x.shape, bits) for i in range(400)])
    assert (many.mean(0) - x).abs().max() < 0.2 * parts["scale"].max(), "rounding is unbiased"
    for constant in (torch.zeros(5), torch.full((5,), -2.5)):
        assert torch.equal(dequantize(quantize(constant, bits, size, seeded_generator(0)), (5,), bits), constant)
