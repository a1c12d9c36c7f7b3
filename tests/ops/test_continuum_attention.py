"""Continuum attention beside numeric quadrature, and its two forms beside each other."""

import numpy as np
import pytest
import torch

from frankenstein_hf.modeling.ops.continuum_attention import continuum_attention, eager_continuum_attention

from ..tiny import relative_rms

FORMS = [lambda *x: eager_continuum_attention(*x)[0], lambda *x: continuum_attention(*x, tile=(4, 5))]


def quadrature(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """∫ exp(q k(t) / √K) v(t) dt / ∫ exp(q k(t) / √K) dt over the line through all keys, by Gauss and Legendre."""
    nodes, weights = np.polynomial.legendre.leggauss(40)
    s, pieces = k @ q / np.sqrt(len(q)), []
    for j in range(1, len(k)):
        u = (nodes + 1) / 2
        density = weights / 2 * np.exp((1 - u) * s[j - 1] + u * s[j])
        pieces.append((density.sum(), density @ ((1 - u)[:, None] * v[j - 1] + u[:, None] * v[j])))
    for end in (0, -1):  # half a token of constant key and value
        pieces.append((np.exp(s[end]) / 2, np.exp(s[end]) / 2 * v[end]))
    return sum(p[1] for p in pieces) / sum(p[0] for p in pieces)


@pytest.mark.parametrize("sharpness", [1e-6, 0.02, 1.0, 6.0])
@pytest.mark.parametrize("form", FORMS)
def test_closed_forms_equal_numeric_quadrature(form, sharpness):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 11, 4).double()
    q = q * sharpness
    last = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 10]])
    expected = [quadrature(q[0, 0, i].numpy(), k[0, 0, : n + 1].numpy(), v[0, 0, : n + 1].numpy()) for i, n in
                enumerate(last[0])]  # fmt: skip
    assert relative_rms(form(q, k, v, last)[0, 0], torch.tensor(np.array(expected))) < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_equal_scores_give_the_mean_of_the_values_and_one_key_its_value(form):
    q, v = torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 4)
    k = torch.randn(1, 2, 1, 4).expand(-1, -1, 9, -1)
    means = v.cumsum(2) / torch.arange(1, 10)[:, None]
    torch.testing.assert_close(form(q, k, v, torch.arange(9)[None]), means, rtol=1e-5, atol=1e-6)
    assert torch.equal(form(q, torch.randn_like(v), v, torch.zeros(1, 9, dtype=torch.long))[:, :, 3], v[:, :, 0])


@pytest.mark.parametrize("tile", [(4, 6), (1, 1), (100, 7), (5, 100)])
def test_tiles_agree_with_the_readable_form_gradients_too(tile):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 19, 5).double().requires_grad_() for heads in (4, 2, 2))
    last = torch.randint(-1, 19, (2, 19))
    outputs = eager_continuum_attention(q, k, v, last)[0], continuum_attention(q, k, v, last, tile=tile)
    weights = torch.randn_like(outputs[0])
    gradients = [torch.autograd.grad((x * weights).sum(), (q, k, v)) for x in outputs]
    assert relative_rms(*outputs) < 1e-13 and all(relative_rms(a, b) < 1e-12 for a, b in zip(*gradients))


@pytest.mark.parametrize("step", [0.0, 1e-4, 1.0, 3.99, 4.01, 30.0, 300.0])
def test_scores_that_jump_stay_exact_in_fp32(step):
    k = torch.tensor([0.0, 1.0, 0.0, -1.0, 1.0, 1.0]).view(1, 1, 6, 1)
    q, v = torch.full((1, 1, 6, 1), step), torch.randn(1, 1, 6, 3)
    last = torch.arange(6)[None]
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    fp32, fp64 = continuum_attention(*inputs, last), continuum_attention(*exact, last)
    assert relative_rms(fp32, fp64) < 1e-6
    fp32.square().sum().backward()
    fp64.square().sum().backward()
    tolerance = 1e-5 + 3e-7 * step  # the scores themselves are rounded
    for x, y in zip(inputs, exact):
        assert (x.grad - y.grad).abs().max() < tolerance * max(1.0, float(y.grad.abs().max()))
