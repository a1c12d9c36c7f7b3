"""`retnet` against its parallel form, written with complex rotations: Y = (Q Kᵀ ⊙ D) V."""

import numpy as np
import pytest
import torch

from ..tiny import assert_near
from .run import make_mixer, numpy_weights, run

H, W, D = 4, 10, 20


def rotate(x, theta):
    """Channel pairs (n, n + W/2) as complex numbers, turned by position / theta^(2n/W)."""
    z = x[..., : x.shape[-1] // 2] + 1j * x[..., x.shape[-1] // 2 :]
    W = x.shape[-1]
    z = z * np.exp(1j * np.arange(x.shape[-2])[:, None] * theta ** (-2.0 * np.arange(W // 2) / W))
    return np.concatenate([z.real, z.imag], axis=-1)


def parallel(x, w, theta, is_causal, rotary, gate, expand_k=1.0, expand_v=1.0):
    T = len(x)
    q, k, v = ((x @ w[f"{name}_proj.weight"].T).reshape(T, H, -1).transpose(1, 0, 2) for name in "qkv")
    if rotary:
        q, k = rotate(q, theta), rotate(k, theta)
    distance = np.arange(T)[:, None] - np.arange(T)
    gamma = 1 - 2.0 ** (-5 - np.arange(H))
    decay = gamma[:, None, None] ** np.abs(distance)
    if is_causal:
        decay = decay * (distance >= 0)
    out = (q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1]) * decay) @ v
    out = (out - out.mean(-1, keepdims=True)) / np.sqrt(out.var(-1, keepdims=True) + 1e-6)
    out = out * w["norm.weight"][:, None] + w["norm.bias"][:, None]
    out = out.transpose(1, 0, 2).reshape(T, -1)
    if gate:
        g = x @ w["g_proj.weight"].T
        out = out * g / (1 + np.exp(-g))
    return out @ w["o_proj.weight"].T


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("params", [{}, {"rotary": False}, {"gate": False}, {"expand_k": 0.6, "expand_v": 2.0}])
def test_parallel_chunked_and_recurrent_forms_agree(is_causal, params):
    mixer = make_mixer("retnet", params, num_attention_heads=H)
    x = torch.randn(1, 150, D, dtype=torch.float64)
    arguments = dict(rotary=True, gate=True, is_causal=is_causal) | params
    theta = mixer.config.rope_parameters["rope_theta"]
    expected = torch.from_numpy(parallel(x[0].numpy(), numpy_weights(mixer), theta, **arguments))
    for backend in ("eager", "sdpa"):  # recurrent, chunked
        tolerance = 1e-5 if arguments["rotary"] else 1e-9  # cos and sin are fp32
        assert_near(run(mixer, x, is_causal, backend)[0], expected, rtol=tolerance, atol=tolerance)


def test_decays_are_exact_for_any_number_of_heads():
    mixer = make_mixer("retnet", num_attention_heads=40)
    x = torch.randn(1, 3, 400)
    log_decay = mixer.log_decay({"q": x}, None)
    assert log_decay.dtype == torch.float32
    assert_near(
        log_decay.double(), torch.log1p(-(2.0 ** (-5 - torch.arange(40, dtype=torch.float64)))), rtol=1e-6, atol=0
    )
    assert (log_decay < 0).all()
