"""The Falcon family against loops written from its formulas, the mixers it contains, and inputs at the border."""

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from frankenstein_hf.configuration.mixers.fast_weight.falcon import SPECS, FalconParams
from frankenstein_hf.modeling.mixers.base import Run
from frankenstein_hf.modeling.mixers.fast_weight.falcon import eager_falcon1
from frankenstein_hf.modeling.ops.banded import dominant_combination

from ..tiny import assert_near, relative_rms, tiny_config, tiny_model, tokens
from .run import make_mixer, numpy_weights, run

H, W, T, D = 2, 10, 19, 20
NAMES = [spec.name for spec in SPECS]
every = pytest.mark.parametrize("name", NAMES)
each_mode = pytest.mark.parametrize("is_causal", [True, False])
PLAIN = {
    "lambda_mode": "static",
    "lambda": 0.0,
    "eps": 0.0,
    "shifted": False,
    "use_short_conv": False,
    "activation": "identity",
}


def silu(x):
    return x / (1 + np.exp(-x))


def convolve(x, weight):
    taps = weight.shape[1]
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
    return silu(sum(padded[n : n + len(x)] * weight[:, n] for n in range(taps)))


def one_head(name, q, k, v, step, ridge, p, exclude_own):
    """S is K×V; pairs [(x, v)] in order of arrival; every quantity of a step as the paper defines it."""
    S, pairs, out = np.zeros((W, W)), [], []
    window = p.window_size if name.startswith("falcon3") else 1
    for t in range(len(q)):
        if not p.shifted:
            pairs.append((k[t], v[t]))
        elif t > 0:
            pairs.append((k[t - 1], v[t]))
        own = np.zeros_like(S)
        if pairs:
            X, Y = (np.stack(column) for column in zip(*pairs[-window:]))
            B = len(X)
            if name == "falcon3":
                statistic = np.linalg.eigvalsh(X.T @ X)[-1] / B
            else:
                statistic = (X**2).sum() / B
            λ = ridge[t] * statistic if p.lambda_mode == "ctx" else p.lambda_
            L = statistic + λ + p.eps
            if p.beta_mode == "ctx_eta":
                η = step[t] / (1 + step[t] * L / 2)
                assert ((η * L) < 2).all()
            else:
                η = (step[t] if p.beta_mode == "ctx_beta" else p.beta) / L
            γ = 1 - np.minimum(η * λ, 1 - p.eps_gamma)
            error = Y if name.endswith("a") else Y - X @ S
            S = S * γ + sum(np.outer(x, η * e) for x, e in zip(X, error)) / B
            own = np.outer(X[-1], η * Y[-1]) / B
        out.append(q[t] @ (S - own if exclude_own and not p.shifted else S))
    return np.stack(out)


def falcon(name, x, mixer, is_causal):
    w, p = numpy_weights(mixer), mixer.params
    qkv = x @ np.concatenate([w["q_proj.weight"], w["k_proj.weight"], w["v_proj.weight"]]).T
    per_head = W if name.startswith("falcon2") else 1
    step = ridge = np.zeros((T, H * per_head))
    if p.beta_mode != "static":
        step = x @ w["b_proj.weight"].T + w["beta_bias"]
        step = np.logaddexp(0, step) if p.beta_mode == "ctx_eta" else 2 / (1 + np.exp(-step))
    if p.lambda_mode == "ctx":
        ridge = np.logaddexp(0, x @ w["lambda_proj.weight"].T + w["lambda_bias"])

    def readout(qkv, step, ridge, exclude_own=False):
        qkv = convolve(qkv, w["conv.weight"]) if p.use_short_conv else qkv
        q, k, v = np.stack(np.split(qkv, 3 * H, axis=1)).reshape(3, H, T, W)
        if p.qk_norm == "rms_norm":
            q, k = (y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) for y in (q, k))
            q, k = q * w["q_norm.weight"], k * w["k_norm.weight"]
        else:
            q, k = (y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
        step = step.reshape(T, H, per_head)
        return np.stack([one_head(name, q[n], k[n], v[n], step[:, n], ridge[:, n], p, exclude_own) for n in range(H)])

    out = readout(qkv, step, ridge)
    if not is_causal:
        out = out + readout(qkv[::-1], step[::-1], ridge[::-1], exclude_own=True)[:, ::-1]
    out = out / np.sqrt((out**2).mean(-1, keepdims=True) + 1e-6) * w["norm.weight"]
    return np.concatenate(list(out), axis=1) @ w["o_proj.weight"].T


@every
@each_mode
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"beta_mode": "ctx_beta", "qk_norm": "l2_norm", "shifted": False},
        {
            "beta_mode": "static",
            "beta": 1.5,
            "lambda_mode": "static",
            "lambda": 0.4,
            "use_short_conv": False,
            "activation": "identity",
        },
        {"lambda_mode": "static", "lambda": 50.0, "eps_gamma": 0.3, "chunk_size": 5},
    ],
)
def test_follows_the_paper(name, is_causal, params):
    mixer, x = make_mixer(name, params), torch.randn(1, T, D, dtype=torch.float64)
    expected = torch.from_numpy(falcon(name, x[0].numpy(), mixer, is_causal))
    for backend in ("eager", "sdpa"):
        assert_near(run(mixer, x, is_causal, backend)[0], expected, rtol=1e-8, atol=1e-8)


def test_falcon1_on_unit_keys_is_the_delta_rule():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 30, 5, dtype=torch.float64) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    β = 2 * torch.rand(1, 2, 30, 1, dtype=torch.float64)
    S = torch.zeros(1, 2, 5, 5, dtype=torch.float64)
    expected = []
    for t in range(30):
        k_t = k[:, :, t, :, None]
        S = (torch.eye(5) - β[:, :, t, None] * k_t @ k_t.mT) @ S + β[:, :, t, None] * k_t @ v[:, :, t, None, :]
        expected.append((S.mT @ q[:, :, t, :, None])[..., 0])
    o, last = eager_falcon1(q, k, v, β / k.square().sum(-1, keepdim=True), torch.ones_like(β), torch.zeros_like(S))
    assert_near(o, torch.stack(expected, dim=2), rtol=1e-10, atol=1e-10)
    assert_near(last, S, rtol=1e-10, atol=1e-10)


def twin(source, name, params):
    """A mixer with the weights of `source` wherever it has them, zeros elsewhere."""
    mixer = make_mixer(name, params)
    weights = dict(source.named_parameters())
    with torch.no_grad():
        for key, parameter in mixer.named_parameters():
            parameter.copy_(weights[key]) if key in weights else parameter.zero_()
    return mixer


@each_mode
def test_falcon1_equals_deltanet(is_causal):
    deltanet = make_mixer(
        "deltanet", {"use_short_conv": False, "activation": "identity", "allow_negative_eigenvalues": True}
    )
    falcon1 = twin(deltanet, "falcon1", PLAIN | {"qk_norm": "l2_norm", "beta_mode": "ctx_beta"})
    falcon1.norm.eps *= W  # deltanet's readout is smaller by K^½
    x = torch.randn(2, 70, D, dtype=torch.float64)  # whose keys have unit length up to ε
    assert_near(run(falcon1, x, is_causal), run(deltanet, x, is_causal), rtol=1e-4, atol=1e-4)


def test_falcon1a_is_linear_attention():
    mixer = make_mixer("falcon1a", PLAIN | {"qk_norm": "l2_norm", "beta_mode": "static", "beta": 1.0})
    x = torch.randn(1, 70, D, dtype=torch.float64)
    q, k, v = (p(x).view(70, H, W).transpose(0, 1) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    q, k = (torch.nn.functional.normalize(y, dim=-1) for y in (q, k))
    readout = (q @ k.mT).tril() @ v
    expected = mixer.finish(readout.transpose(0, 1)[None], x)
    assert_near(run(mixer, x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("windowed", "plain"), [("falcon3", "falcon1"), ("falcon3a", "falcon1a")])
@pytest.mark.parametrize("shifted", [True, False])
@each_mode
def test_a_window_of_one_pair_changes_nothing(windowed, plain, shifted, is_causal):
    source = make_mixer(plain, {"shifted": shifted})
    mixer = twin(source, windowed, {"shifted": shifted, "window_size": 1})
    x = torch.randn(2, 70, D, dtype=torch.float64)
    for backend in ("eager", "sdpa"):
        assert_near(run(mixer, x, is_causal, backend), run(source, x, is_causal, backend), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("vector", "scalar"), [("falcon2", "falcon1"), ("falcon2a", "falcon1a")])
def test_equal_steps_in_all_value_channels_are_one_step(vector, scalar):
    source = make_mixer(scalar)
    mixer = make_mixer(vector)
    weights = dict(source.named_parameters())
    with torch.no_grad():
        for key, parameter in mixer.named_parameters():
            repeats = W if key in ("b_proj.weight", "beta_bias") else 1
            parameter.copy_(weights[key].repeat_interleave(repeats, dim=0))
    x = torch.randn(2, 70, D, dtype=torch.float64)
    assert_near(run(mixer, x), run(source, x), rtol=1e-9, atol=1e-9)


@every
@each_mode
@pytest.mark.parametrize("level", ["forget everything", "forget nothing", "mixed"])
@pytest.mark.parametrize("shifted", [True, False])
def test_extreme_gates_stay_near_the_fp64_recurrence(name, is_causal, level, shifted):
    """Repeated keys with β = 1, forgetting of all but ε_γ a step, of nothing, and both in one row."""
    β = 1.0 if level == "forget nothing" else 1.1  # then ηλ exceeds 1
    params = {"beta_mode": "static", "beta": β, "shifted": shifted, "eps_gamma": 1e-6, "qk_norm": "l2_norm"}
    mixer = make_mixer(name, params)
    x = torch.randn(1, 1, D, dtype=torch.float64).repeat(1, 150, 1)
    x[:, ::7] *= -1
    with torch.no_grad():
        mixer.lambda_bias.fill_({"forget everything": 1e4, "forget nothing": -1e3, "mixed": 0.0}[level])
        mixer.lambda_proj.weight.mul_(1e4 if level == "mixed" else 0.0)
        expected = run(mixer, x, is_causal, "eager")
    mixer.float()
    y = run(mixer, x.float().requires_grad_(), is_causal)
    assert relative_rms(y.detach(), expected) < 1e-4
    y.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in mixer.parameters() if p.grad is not None)


@every
def test_a_key_without_energy_and_no_epsilon_writes_nothing(name):
    mixer = make_mixer(name, PLAIN | {"beta_mode": "static"})
    x = torch.randn(1, 12, D, dtype=torch.float64)
    with torch.no_grad():
        x[:, :5] = 0.0
    x.requires_grad_()
    for backend in ("eager", "sdpa"):
        y = run(mixer, x, True, backend)
        assert torch.equal(y[:, :5], torch.zeros_like(y[:, :5]))
        y.sum().backward()
        assert all(p.grad.isfinite().all() for p in mixer.parameters()) and x.grad.isfinite().all()


@every
@pytest.mark.parametrize(
    "params", [{}, {"shifted": False, "use_short_conv": False, "activation": "identity"}, {"chunk_size": None}]
)
def test_decoding_in_pieces_equals_the_full_forward_with_forgetting_from_the_token(name, params):
    if name.startswith("falcon3"):
        params = {**params, "window_size": 5}
    model, x = tiny_model(name, mixer_params={name: params}), tokens(2, 24)
    with torch.no_grad():
        expected = model(x, use_cache=False).logits
        cache, start = DynamicCache(config=model.config), 0
        for size in (2, 9, 1, 1, 7, 1, 3):
            assert_near(model(x[:, start : start + size], cache=cache).logits, expected[:, start : start + size])
            start += size


@every
def test_the_statistic_of_lambda_is_detached(name):
    """∂λ/∂k = 0: with λ from the token, keys receive the gradient they would with λ held at its values."""
    mixer = make_mixer(name, {"use_short_conv": False, "activation": "identity", "beta_mode": "static"})
    qkv, forget = torch.randn(1, 9, 3 * H * W, dtype=torch.float64), torch.rand(1, 9, H, dtype=torch.float64)
    steps, seen = mixer._steps, []

    def fixed(inputs, statistic):
        statistic = statistic.transpose(1, 2).unsqueeze(-1)
        λ = (forget.unsqueeze(-1) * statistic).detach()
        η = 1.0 / (statistic + λ + mixer.params.eps)
        γ = 1 - (η * λ).clamp_max(1 - mixer.params.eps_gamma)
        width = W if name.startswith("falcon2") else 1
        return η.expand(1, 9, H, width), γ.log().expand(1, 9, H, width)

    for function in (steps, fixed):
        mixer._steps = function
        x = qkv.clone().requires_grad_()
        readout, _ = mixer.scan({"qkv": x, "forget": forget}, {}, Run())
        seen.append(torch.autograd.grad(readout.square().sum(), x)[0])
    assert_near(seen[0], seen[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", [1, 2, 4, 7])
def test_falcon3_measures_the_largest_eigenvalue_and_its_gradient(window):
    torch.manual_seed(window)
    x = torch.randn(1, 2, window - 1 + 12, 5, dtype=torch.float64)
    x[0, 0, :window] = 0.0  # an empty window
    x[0, 1, 4:9] = x[0, 1, 4]  # the same key again and again
    x.requires_grad_()
    mixer = make_mixer("falcon3", {"window_size": window})
    actual = mixer.statistic(x, torch.ones(1, 1, 1, 1, dtype=torch.float64))
    X = x.unfold(2, window, 1)
    expected = torch.linalg.eigvalsh(X @ X.mT)[..., -1]
    assert_near(actual, expected, rtol=1e-9, atol=1e-12)
    weights = torch.rand(expected.shape, dtype=torch.float64)
    gradients = [torch.autograd.grad((y * weights).sum(), x)[0] for y in (actual, expected)]
    assert_near(*gradients, rtol=1e-7, atol=1e-9)
    assert torch.equal(dominant_combination(x.detach() * 0, window), torch.zeros(1, 2, 12, window))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("window", [2, 3, 4, 8, 13])
def test_the_largest_eigenvalue_converges_however_near_the_next_one_is(window, dtype):
    for gap in (0.0, 1e-12, 1e-8, 1e-6, 1e-4, 1e-2, 0.5):
        scales = torch.cat([torch.tensor([1.0, 1.0 - gap]), torch.rand(window - 2)]).double().sqrt()
        turned = torch.linalg.qr(torch.randn(6, window, window, dtype=torch.float64)).Q
        x = (turned * scales) @ torch.linalg.qr(torch.randn(6, window, window, dtype=torch.float64)).Q
        x = x.to(dtype)[None]  # [1, 6, window, K]: one complete window a head
        u = dominant_combination(x, window)[0, :, 0]
        length = (u[:, :, None] * x[0].flip(1)).double().sum(1).square().sum(-1)
        assert_near(length, torch.ones(6).double(), rtol=1e-13 if dtype == torch.float64 else 4e-6, atol=0)


def test_lambda_is_written_as_in_the_paper():
    config = tiny_config("falcon1", mixer_params={"falcon1": {"lambda": 0.25}})
    assert config.params_for(0).lambda_ == 0.25
    assert type(config).from_dict(config.to_dict()).params_for(0) == config.params_for(0)
    with pytest.raises(ValueError, match="one parameter"):
        FalconParams.from_dict({"lambda": 0.1, "lambda_": 0.1}, "falcon1")
    with pytest.raises(ValueError, match="must be a number ≥ 0"):
        FalconParams.from_dict({"lambda": -0.1}, "falcon1")
