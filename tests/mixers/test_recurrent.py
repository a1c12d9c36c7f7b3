"""`gla`, `gated_deltanet` and `mamba` against transformers' layers and loops written from the papers."""

import numpy as np
import pytest
import torch
from transformers import MambaConfig, Qwen3NextConfig
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from ..tiny import assert_near
from .run import make_mixer, numpy_weights, run

H, W, T, D = 2, 10, 13, 20


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def convolve(x, weight, bias=0.0):
    """Causal depthwise convolution of [T, E] with [E, W], last tap on the current token, then SiLU."""
    taps = weight.shape[1]
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
    return silu(sum(padded[n : n + len(x)] * weight[:, n] for n in range(taps)) + bias)


def gla_readout(q, k, v, log_decay, exclude_own):
    S, out = np.zeros((q.shape[1], v.shape[1])), []
    for t in range(len(q)):
        S = np.exp(log_decay[t])[:, None] * S
        before = S
        S = S + np.outer(k[t], v[t])
        out.append(q[t] @ (before if exclude_own else S) / np.sqrt(q.shape[1]))
    return np.stack(out)


def gla(x, w, is_causal, conv):
    qkv = x @ np.concatenate([w["q_proj.weight"], w["k_proj.weight"], w["v_proj.weight"]]).T
    decay = x @ w["decay_down_proj.weight"].T @ w["decay_up_proj.weight"].T + w["decay_up_proj.bias"]
    log_decay = np.log(sigmoid(decay)) / 16

    def readout(qkv, log_decay, exclude_own=False):
        qkv = convolve(qkv, w["conv.weight"]) if conv else qkv
        K = log_decay.shape[1]
        heads = (np.split(y, H, axis=1) for y in (*np.split(qkv, [K, 2 * K], axis=1), log_decay))
        return [gla_readout(*head, exclude_own) for head in zip(*heads)]

    out = np.stack(readout(qkv, log_decay))
    if not is_causal:
        out = out + np.stack(readout(qkv[::-1], log_decay[::-1], exclude_own=True))[:, ::-1]
    normed = (out - out.mean(-1, keepdims=True)) / np.sqrt(out.var(-1, keepdims=True) + 1e-6)
    normed = normed * w["norm.weight"][:, None] + w["norm.bias"][:, None]
    return np.concatenate(list(normed), axis=1) * silu(x @ w["g_proj.weight"].T) @ w["o_proj.weight"].T


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("conv", [False, True])
@pytest.mark.parametrize("widths", [{}, {"expand_k": 0.5, "expand_v": 2.0}])
def test_gla_follows_the_paper(is_causal, conv, widths):
    mixer, x = make_mixer("gla", {"use_short_conv": conv} | widths), torch.randn(1, T, D, dtype=torch.float64)
    expected = torch.from_numpy(gla(x[0].numpy(), numpy_weights(mixer), is_causal, conv))
    for backend in ("eager", "sdpa"):
        assert_near(run(mixer, x, is_causal, backend)[0], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["gla", "gated_deltanet"])
def test_without_convolution_a_mirrored_encoder_input_gives_the_mirrored_output(name):
    mixer, x = make_mixer(name, {"use_short_conv": False}), torch.randn(2, T, D, dtype=torch.float64)
    mirrored = run(mixer, x.flip(1), is_causal=False).flip(1)
    assert_near(run(mixer, x, is_causal=False), mirrored, rtol=1e-9, atol=1e-9)


def test_gated_deltanet_equals_transformers_layer():
    config = Qwen3NextConfig(
        hidden_size=D, linear_num_value_heads=H, linear_num_key_heads=H, linear_key_head_dim=W,
        linear_value_head_dim=W, linear_conv_kernel_dim=4, rms_norm_eps=1e-6, num_hidden_layers=1,
        layer_types=["linear_attention"], hidden_act="silu",
    )  # fmt: skip
    theirs = Qwen3NextGatedDeltaNet(config, 0).double().eval()
    mixer = make_mixer("gated_deltanet")
    with torch.no_grad():
        q, k, v, g = (getattr(mixer, f"{name}_proj").weight.view(H, W, D) for name in "qkvg")
        theirs.in_proj_qkvz.weight.copy_(torch.cat([q, k, v, g], dim=1).reshape(-1, D))
        b, a = mixer.b_proj.weight, mixer.a_proj.weight
        theirs.in_proj_ba.weight.copy_(torch.stack([b, a], dim=1).reshape(-1, D))
        theirs.conv1d.weight.copy_(mixer.conv.weight[:, None])
        pairs = {
            "A_log": "A_log",
            "dt_bias": "dt_bias",
            "norm.weight": "norm.weight",
            "o_proj.weight": "out_proj.weight",
        }
        for mine, other in pairs.items():
            theirs.get_parameter(other).copy_(mixer.get_parameter(mine))
        x = torch.randn(2, 70, D, dtype=torch.float64)
        expected = theirs(x)
        for backend in ("eager", "sdpa"):
            assert_near(run(mixer, x, True, backend), expected, rtol=1e-4, atol=1e-5)  # theirs computes in fp32


def gated_deltanet_readout(q, k, v, alpha, beta, exclude_own):
    S, out = np.zeros((W, W)), []
    for t in range(len(q)):
        S = (np.eye(W) - beta[t] * np.outer(k[t], k[t])) @ (alpha[t] * S)
        before = S
        S = S + beta[t] * np.outer(k[t], v[t])
        out.append(q[t] @ (before if exclude_own else S) / np.sqrt(W))
    return np.stack(out)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    "params",
    [{}, {"use_short_conv": False, "gate": False, "allow_negative_eigenvalues": True}, {"conv_kernel": 1}],
)
def test_gated_deltanet_follows_the_paper(is_causal, params):
    mixer, x = make_mixer("gated_deltanet", params), torch.randn(1, T, D, dtype=torch.float64)
    w, h = numpy_weights(mixer), x[0].numpy()
    qkv = h @ np.concatenate([w["q_proj.weight"], w["k_proj.weight"], w["v_proj.weight"]]).T
    alpha = np.exp(-np.exp(w["A_log"]) * np.logaddexp(0, h @ w["a_proj.weight"].T + w["dt_bias"]))
    beta = sigmoid(h @ w["b_proj.weight"].T) * (2 if params.get("allow_negative_eigenvalues") else 1)

    def readout(qkv, alpha, beta, exclude_own=False):
        qkv = convolve(qkv, w["conv.weight"]) if params.get("use_short_conv", True) else silu(qkv)
        heads = np.stack(np.split(qkv, 3 * H, axis=1)).reshape(3, H, T, W)
        q, k = (y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6) for y in heads[:2])
        return np.stack(
            [gated_deltanet_readout(q[n], k[n], heads[2, n], alpha[:, n], beta[:, n], exclude_own) for n in range(H)]
        )

    out = readout(qkv, alpha, beta)
    if not is_causal:
        out = out + readout(qkv[::-1], alpha[::-1], beta[::-1], exclude_own=True)[:, ::-1]
    out = out / np.sqrt((out**2).mean(-1, keepdims=True) + 1e-6) * w["norm.weight"]
    out = np.concatenate(list(out), axis=1)
    if params.get("gate", True):
        out = out * silu(h @ w["g_proj.weight"].T)
    expected = torch.from_numpy(out @ w["o_proj.weight"].T)
    for backend in ("eager", "sdpa"):
        assert_near(run(mixer, x, is_causal, backend)[0], expected, rtol=1e-8, atol=1e-8)


def test_mamba_equals_transformers_slow_path():
    config = MambaConfig(hidden_size=D, state_size=5, conv_kernel=4, expand=2, time_step_rank=2, num_hidden_layers=1)
    theirs = MambaMixer(config, 0).eval()
    mixer = make_mixer("mamba", {"state_size": 5}).float()
    with torch.no_grad():
        theirs.in_proj.weight.copy_(torch.cat([mixer.in_proj.weight, mixer.g_proj.weight]))
        theirs.conv1d.weight.copy_(mixer.conv.weight[:, None])
        theirs.conv1d.bias.copy_(mixer.conv.bias)
        for name in ("x_proj.weight", "dt_proj.weight", "dt_proj.bias", "A_log", "D", "out_proj.weight"):
            theirs.get_parameter(name).copy_(mixer.get_parameter(name))
        x = torch.randn(2, 40, D)
        for backend in ("eager", "sdpa"):
            assert_near(run(mixer, x, True, backend), theirs(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("discretization", ["euler", "zoh"])
def test_mamba_follows_the_paper(is_causal, discretization):
    mixer = make_mixer("mamba", {"state_size": 3, "discretization": discretization, "expand": 1, "time_step_rank": 4})
    x = torch.randn(1, T, D, dtype=torch.float64)
    w, hidden = numpy_weights(mixer), x[0].numpy()
    A = -np.exp(w["A_log"])

    def readout(u, exclude_own=False):
        u = convolve(u, w["conv.weight"], w["conv.bias"])
        rank, B, C = np.split(u @ w["x_proj.weight"].T, [4, 7], axis=1)
        dt = np.logaddexp(0, rank @ w["dt_proj.weight"].T + w["dt_proj.bias"])
        h, out = np.zeros_like(A), []
        for t in range(T):
            a = np.exp(dt[t][:, None] * A)
            b = (a - 1) / A * B[t] if discretization == "zoh" else dt[t][:, None] * B[t]
            write = b * u[t][:, None]
            h = a * h
            out.append((h if exclude_own else h + write) @ C[t] + (0 if exclude_own else w["D"] * u[t]))
            h = h + write
        return np.stack(out)

    inner = hidden @ w["in_proj.weight"].T
    out = readout(inner)
    if not is_causal:
        out = out + readout(inner[::-1], exclude_own=True)[::-1]
    expected = torch.from_numpy(out * silu(hidden @ w["g_proj.weight"].T) @ w["out_proj.weight"].T)
    for backend in ("eager", "sdpa"):
        assert_near(run(mixer, x, is_causal, backend)[0], expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("level", ["forget everything", "forget nothing", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_gates_stay_finite(is_causal, level, dtype):
    """Log-decays of −50 a step, 0, and both in one row; repeated keys with β = 1."""
    size = {"forget everything": -1, "forget nothing": 1, "mixed": 0}[level]
    x = torch.randn(1, 1, D).repeat(1, 150, 1)  # every key the same
    x[:, ::7] *= -1
    for name, gate in (("gla", "decay_up_proj.bias"), ("gated_deltanet", "dt_bias"), ("mamba", "dt_proj.bias")):
        mixer = make_mixer(name).float()
        with torch.no_grad():
            strength = {"gla": 800.0, "gated_deltanet": -50.0, "mamba": -50.0}[name] * size
            mixer.get_parameter(gate).fill_(strength)
            if name == "gated_deltanet":
                mixer.A_log.fill_(0.0)
                mixer.b_proj.weight.mul_(100.0)  # β = 0 or 1
                mixer.a_proj.weight.mul_(100.0 if size == 0 else 0.0)
            if name == "gla":
                mixer.decay_up_proj.weight.mul_(1000.0 if size == 0 else 0.0)
        mixer.to(dtype)
        y = run(mixer, x.to(dtype).requires_grad_(), is_causal)
        y.float().square().sum().backward()
        assert y.isfinite().all(), name
        assert all(p.grad.isfinite().all() for p in mixer.parameters() if p.grad is not None), name
