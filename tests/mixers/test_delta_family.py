"""`deltanet`, `kda` and `gated_deltanet2` against loops written from the papers, transformers' layer and each other."""

import numpy as np
import pytest
import torch
from transformers import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

from frankenstein_hf.modeling.mixers.base import Run

from ..tiny import assert_near, relative_rms
from .run import make_mixer, numpy_weights, run

H, W, T, D = 2, 10, 40, 20
BACKENDS = ("eager", "sdpa")


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def convolve(x, weight):
    """Causal depthwise convolution of [T, E] with [E, taps], last tap on the current token, then SiLU."""
    taps = weight.shape[1]
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
    return silu(sum(padded[n : n + len(x)] * weight[:, n] for n in range(taps)))


def readout(q, k, v, alpha, b, w, exclude_own):
    """One head, matrices written out: S_t = (I − k_t (b_t ⊙ k_t)ᵀ) Diag(α_t) S_{t−1} + k_t (w_t ⊙ v_t)ᵀ."""
    K = q.shape[1]
    S, out = np.zeros((K, v.shape[1])), []
    for t in range(len(q)):
        erased = (np.eye(K) - np.outer(k[t], b[t] * k[t])) @ np.diag(alpha[t]) @ S
        S = erased + np.outer(k[t], w[t] * v[t])
        out.append((erased if exclude_own else S).T @ q[t] / np.sqrt(K))
    return np.stack(out)


def expected_output(name, params, weights, x, is_causal):
    w = weights
    heads = lambda y: y.reshape(len(y), H, -1).transpose(1, 0, 2)  # noqa: E731
    K, V = round(W * params.get("expand_k", 1)), round(W * params.get("expand_v", 1))
    qkv = x @ np.concatenate([w["q_proj.weight"], w["k_proj.weight"], w["v_proj.weight"]]).T
    alpha = np.ones((H, T, K))
    if name != "deltanet":
        a = heads(x @ w["decay_down_proj.weight"].T @ w["decay_up_proj.weight"].T) + w["dt_bias"][:, None]
        alpha = np.exp(-np.exp(w["A_log"])[:, None, None] * np.logaddexp(0, a))
    if name == "gated_deltanet2":
        erase, write = (heads(sigmoid(x @ w[f"{gate}_proj.weight"].T)) for gate in "bw")
        if params.get("allow_negative_eigenvalues"):
            erase = 2 * erase
    else:
        beta = sigmoid(x @ w["b_proj.weight"].T).T[:, :, None]
        beta = 2 * beta if params.get("allow_negative_eigenvalues") else beta
        erase, write = beta.repeat(K, axis=2), beta.repeat(V, axis=2)

    def read(flip):
        order = slice(None, None, -1 if flip else 1)
        inputs = qkv[order]
        if params.get("use_short_conv", True):
            inputs = convolve(inputs, w["conv.weight"])
        elif params.get("activation", "silu") == "silu":
            inputs = silu(inputs)
        q, k, v = (heads(y) for y in np.split(inputs, [H * K, 2 * H * K], axis=1))
        q, k = (y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
        gates = (y[:, order] for y in (alpha, erase, write))
        return np.stack([readout(*head, exclude_own=flip) for head in zip(q, k, v, *gates)])[:, order]

    out = read(flip=False) if is_causal else read(flip=False) + read(flip=True)
    out = out / np.sqrt((out**2).mean(-1, keepdims=True) + 1e-6) * w["norm.weight"]
    out = out.transpose(1, 0, 2).reshape(T, H * V)
    if name != "deltanet" and params.get("gate", True):
        activation = silu if params.get("gate_activation") == "silu" else sigmoid
        out = out * activation(x @ w["g_down_proj.weight"].T @ w["g_up_proj.weight"].T)
    return out @ w["o_proj.weight"].T


COMMON = [
    {},
    {"use_short_conv": False, "allow_negative_eigenvalues": True},
    {"use_short_conv": False, "activation": "identity"},
    {"expand_k": 0.5, "expand_v": 2.0},
]
GATED = [{"gate": False, "gate_low_rank": 3}, {"gate_activation": "silu", "conv_kernel": 1}]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    ("name", "params"),
    [("deltanet", p) for p in COMMON] + [(name, p) for name in ("kda", "gated_deltanet2") for p in COMMON + GATED],
)
def test_follows_the_paper(name, params, is_causal):
    mixer, x = make_mixer(name, params), torch.randn(1, T, D, dtype=torch.float64)
    expected = torch.from_numpy(expected_output(name, params, numpy_weights(mixer), x[0].numpy(), is_causal))
    for backend in BACKENDS:
        assert_near(run(mixer, x, is_causal, backend)[0], expected, rtol=1e-7, atol=1e-7)


def test_kda_equals_transformers_layer():
    config = KimiLinearConfig(
        hidden_size=D, linear_num_heads=H, linear_head_dim=W, linear_conv_kernel_dim=4, rms_norm_eps=1e-6,
        num_hidden_layers=1, num_attention_heads=H, layer_types=["linear_attention"], mlp_layer_types=["dense"],
    )  # fmt: skip
    theirs, mixer = KimiLinearDeltaAttention(config, 0).eval(), make_mixer("kda").float()
    pairs = {f"{name}_proj.weight": f"{name}_proj.weight" for name in "qkvbo"} | {
        "decay_down_proj.weight": "forget_gate.f_a_proj.weight",
        "decay_up_proj.weight": "forget_gate.f_b_proj.weight",
        "A_log": "forget_gate.A_log",
        "dt_bias": "forget_gate.dt_bias",
        "g_down_proj.weight": "g_a_proj.weight",
        "g_up_proj.weight": "g_b_proj.weight",
        "conv.weight": "conv1d.weight",
        "norm.weight": "o_norm.weight",
    }
    with torch.no_grad():
        mixer.A_log.sub_(3.0)  # their chunked form loses digits under strong decay
        for mine, other in pairs.items():
            parameter = theirs.get_parameter(other)
            parameter.copy_(mixer.get_parameter(mine).view_as(parameter))
        assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in mixer.parameters())
        x = torch.randn(2, 70, D)
        for backend in BACKENDS:
            assert_near(run(mixer, x, True, backend), theirs(x), rtol=1e-4, atol=1e-5)


def copy_shared(source, target):
    shapes = {key: value.shape for key, value in target.state_dict().items()}
    shared = {key: value for key, value in source.state_dict().items() if shapes.get(key) == value.shape}
    target.load_state_dict(shared, strict=False)


def assert_same_function(one, other):
    x = torch.randn(2, T, D, dtype=torch.float64)
    for is_causal in (True, False):
        for backend in BACKENDS:
            assert_near(run(one, x, is_causal, backend), run(other, x, is_causal, backend), rtol=1e-9, atol=1e-9)


def test_gated_deltanet_without_decay_is_deltanet():
    plain, gated = make_mixer("deltanet"), make_mixer("gated_deltanet", {"gate": False})
    copy_shared(plain, gated)
    gated.A_log.data.fill_(-1000.0)
    assert_same_function(plain, gated)


def test_kda_with_one_decay_for_all_channels_is_gated_deltanet():
    scalar, vector = (
        make_mixer("gated_deltanet", {"gate": False}),
        make_mixer("kda", {"gate": False, "gate_low_rank": H}),
    )
    copy_shared(scalar, vector)
    with torch.no_grad():
        vector.decay_down_proj.weight.copy_(scalar.a_proj.weight)
        vector.decay_up_proj.weight.copy_(torch.eye(H, dtype=torch.float64).repeat_interleave(W, dim=0))
        vector.dt_bias.copy_(scalar.dt_bias[:, None].expand(-1, W))
    assert_same_function(scalar, vector)


def test_gated_deltanet2_with_one_gate_for_erasing_and_writing_is_kda():
    tied, split = make_mixer("kda"), make_mixer("gated_deltanet2")
    copy_shared(tied, split)
    for gate in (split.b_proj, split.w_proj):
        gate.weight.data.copy_(tied.b_proj.weight.repeat_interleave(W, dim=0))
    assert_same_function(tied, split)


@pytest.mark.parametrize("sequential", [True, False])
def test_with_full_writes_and_unit_keys_deltanet_reads_back_the_last_write(sequential):
    mixer, n = make_mixer("deltanet", {"use_short_conv": False, "activation": "identity"}), 200
    basis = torch.linalg.qr(torch.randn(H, W, W, dtype=torch.float64)).Q
    written, asked = torch.randint(W, (2, n))
    value = torch.randn(H, n, W, dtype=torch.float64)
    keys, queries = (1e5 * basis[:, index] for index in (written, asked))  # long, so that eps of the norm does not show
    qkv = torch.cat([x.transpose(0, 1).flatten(1) for x in (queries, keys, value)], dim=-1)[None]
    out, _ = mixer.scan({"qkv": qkv, "beta": torch.ones(1, n, H).double()}, {}, Run(sequential=sequential))
    for t in range(n):
        when = (written[: t + 1] == asked[t]).nonzero()
        expected = value[:, when[-1, 0]] if len(when) else torch.zeros(H, W, dtype=torch.float64)
        assert_near(out[0, t] * W**0.5, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", ["deltanet", "gated_deltanet", "kda", "gated_deltanet2"])
@pytest.mark.parametrize("gates", ["-50", "0", "mixture", "bursts"])
def test_extreme_gates_and_repeated_keys_with_full_writes_stay_near_the_fp64_recurrence(name, gates):
    n, mixer = 150, make_mixer(name, {"use_short_conv": False})
    key = torch.randn(1, 1, H * W).expand(1, n, -1)
    inputs = {"qkv": torch.cat([torch.randn(1, n, H * W), key, torch.randn(1, n, H * W)], dim=-1)}
    shapes = {key: x.shape[2:] for key, x in mixer.project(torch.randn(1, 1, D).double(), None).items() if key != "qkv"}
    for gate, shape in shapes.items():
        if gate != "log_decay":
            inputs[gate] = torch.ones(1, n, *shape)
            continue
        decay, which = torch.full((1, n, *shape), float(gates) if gates[-1] == "0" else -0.1), torch.rand(1, n, *shape)
        if gates == "mixture":
            decay = torch.where(which < 0.3, -50.0, torch.where(which < 0.6, 0.0, -3 * which))
        if gates == "bursts":
            decay[:, 20:29] = -50.0
        inputs[gate] = decay
    results = []
    for dtype, sequential in ((torch.float32, False), (torch.float64, True)):
        leaves = {key: x.detach().to(dtype, copy=True).requires_grad_() for key, x in inputs.items()}
        out, states = mixer.scan(leaves, {}, Run(sequential=sequential))
        mirrored = {key: x.flip(1) for key, x in leaves.items()}
        out = out + mixer.scan(mirrored, {}, Run(exclude_own=True, sequential=sequential))[0].flip(1)
        (out.square().sum() + states["state"].square().sum()).backward()
        results.append([out, states["state"], *(x.grad for x in leaves.values())])
    for label, fast, exact in zip(("readout", "state", *inputs), *results):
        assert fast.isfinite().all(), label
        error = (fast.double() - exact).square().mean().sqrt()
        # the same key erases all that was written, so many gradients cancel to nothing
        assert error <= 1e-5 * exact.square().mean().sqrt() + 3e-6, (label, relative_rms(fast, exact))
