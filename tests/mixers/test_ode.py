"""`ode` against solvers written here, other mixers, and the solution of a linear system."""

import math

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from frankenstein_hf.modeling.mixers.recurrent.ode import eager_ode
from frankenstein_hf.modeling.norms import RMSNorm

from ..tiny import assert_near, tiny_config, tiny_model, tokens
from .run import make_mixer, numpy_weights, run

H, W, T, D = 2, 10, 11, 20


def attention(x, w, is_causal):
    """Softmax attention with rotary positions; one key/value head for both query heads."""
    q = (x @ w["q_proj.weight"].T).reshape(T, H, W)
    k, v = x @ w["k_proj.weight"].T, x @ w["v_proj.weight"].T
    angles = np.arange(T)[:, None] * 10000.0 ** (-np.arange(0, W, 2) / W)

    def rotate(y):
        a, b = y[:, : W // 2], y[:, W // 2 :]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)

    heads = []
    for h in range(H):
        scores = rotate(q[:, h]) @ rotate(k).T / np.sqrt(W)
        if is_causal:
            scores[np.triu_indices(T, 1)] = -np.inf
        weights = np.exp(scores - scores.max(1, keepdims=True))
        heads.append(weights / weights.sum(1, keepdims=True) @ v)
    return np.concatenate(heads, axis=1) @ w["o_proj.weight"].T


def solve(h, f, solver, steps, gate):
    """h(1) − h(0) by the Butcher tableau."""
    nodes, weights = {"euler": ([], [1]), "rk4": ([0.5, 0.5, 1], [1 / 6, 1 / 3, 1 / 3, 1 / 6])}[solver]
    start = h
    for _ in range(steps):
        k = [f(h)]
        for node in nodes:
            k.append(f(h + node / steps * k[-1]))
        if gate is None:
            h = h + sum(b * k_i for b, k_i in zip(weights, k)) / steps
        else:
            g = 1 / (1 + np.exp(-(np.concatenate(k, axis=1) @ gate[0].T + gate[1])))
            h = h + (g * k[0] + (1 - g) * k[1]) / steps
    return h - start


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    "params",
    [{}, {"steps": 1}, {"solver": "euler", "steps": 3}, {"gate": True}],
)
def test_ode_follows_the_paper(is_causal, params):
    mixer, x = make_mixer("ode", params), torch.randn(1, T, D, dtype=torch.float64)
    w = numpy_weights(mixer)
    gate = (w["gate_proj.weight"], w["gate_proj.bias"]) if params.get("gate") else None
    expected = solve(
        x[0].numpy(), lambda h: attention(h, w, is_causal), params.get("solver", "rk4"), params.get("steps", 2), gate
    )
    for backend in ("eager", "sdpa"):
        # the rotary tables are fp32
        assert_near(run(mixer, x, is_causal, backend)[0], torch.from_numpy(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_causal", [True, False])
def test_one_euler_step_is_residual_attention(is_causal):
    model = tiny_model(["ode", "ode"], is_causal, mixer_params={"ode": {"solver": "euler", "steps": 1}})
    standard = tiny_model(["standard", "standard"], is_causal)
    standard.load_state_dict(model.state_dict())
    x = tokens(2, 9)
    assert torch.equal(model(x).logits, standard(x).logits)


def test_rk4_is_of_fourth_order_and_euler_of_first():
    A = torch.tensor([[0.1, 1.0], [-1.2, -0.3]], dtype=torch.float64)
    h = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    exact = h @ torch.matrix_exp(A)
    for solver, order in (("rk4", 4), ("euler", 1)):
        errors = [(h + eager_ode(h, lambda h: h @ A, steps, solver, None) - exact).norm() for steps in (4, 8)]
        assert abs(math.log2(errors[0] / errors[1]) - order) < 0.3


def test_the_norm_of_the_layer_is_applied_at_every_stage():
    mixer = make_mixer("ode", {"steps": 1, "solver": "euler"})
    layer, x = torch.nn.Module(), torch.randn(1, T, D, dtype=torch.float64)
    layer.input_layernorm = RMSNorm(D).double()
    mixer.join(layer)
    scaled = run(mixer, 3.0 * x)
    assert_near(scaled, run(mixer, x), rtol=1e-4, atol=1e-5)


def test_a_gate_needs_stages_to_blend():
    with pytest.raises(ValueError, match=r"gate=True blends the stages of solver='rk4'"):
        tiny_config("ode", mixer_params={"ode": {"gate": True, "solver": "euler"}})


def test_a_gated_model_decodes_as_it_reads_and_trains_its_gate():
    model, x = tiny_model(["ode", "ode"], mixer_params={"ode": {"gate": True, "steps": 1}}), tokens(2, 12)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        expected = model(x, use_cache=False).logits
        parts = [model(x[:, a:b], cache=cache).logits for a, b in ((0, 7), (7, 8), (8, 12))]
    assert_near(torch.cat(parts, dim=1), expected)
    model(x, labels=x).loss.backward()
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())
