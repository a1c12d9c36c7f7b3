"""`rglru` against a loop written from the paper, and against RecurrentGemma's block."""

import numpy as np
import pytest
import torch
from transformers import RecurrentGemmaConfig
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRecurrentBlock

from ..tiny import assert_near, relative_rms
from .run import make_mixer, numpy_weights, run

H, T, D, E = 2, 41, 20, 26


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def expected_output(mixer, x, is_causal):
    """The paper, section 2.4: every channel a number of its own."""
    w, p = numpy_weights(mixer), mixer.params

    def blocks(name, y):
        parts = np.split(y, H, axis=1)
        maps = zip(parts, w[f"{name}.weight"], w[f"{name}.bias"])
        return np.concatenate([part @ weight + bias for part, weight, bias in maps], axis=1)

    def states(u, exclude_own):
        taps = w["conv.weight"].shape[1]
        padded = np.concatenate([np.zeros((taps - 1, E)), u])
        u = sum(padded[n : n + T] * w["conv.weight"][:, n] for n in range(taps)) + w["conv.bias"]
        r, i = sigmoid(blocks("recurrence_gate", u)), sigmoid(blocks("input_gate", u))
        a = sigmoid(-w["decay"]) ** (p.decay_scale * r)  # log σ(−Λ) = −softplus(Λ)
        h, out = np.zeros(E), []
        for t in range(T):
            size = 1.0 if t == 0 and p.full_first_write else np.sqrt(1 - a[t] ** 2)
            before = a[t] * h
            h = before + size * i[t] * u[t]
            out.append(before if exclude_own else h)
        return np.stack(out)

    u = x @ w["in_proj.weight"].T
    readout = states(u, False) if is_causal else states(u, False) + states(u[::-1], True)[::-1]
    gate = torch.nn.functional.gelu(torch.from_numpy(x @ w["g_proj.weight"].T), approximate="tanh").numpy()
    return readout * gate @ w["out_proj.weight"].T


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("params", [{}, {"full_first_write": True}, {"lru_width": 26, "decay_scale": 2.0}])
def test_follows_the_paper(is_causal, params):
    mixer, x = make_mixer("rglru", params), torch.randn(1, T, D, dtype=torch.float64)
    assert mixer.params.lru_width == E  # 4/3 of 20, rounded to a multiple of the heads
    expected = torch.from_numpy(expected_output(mixer, x[0].numpy(), is_causal))
    for backend in ("eager", "sdpa"):
        assert_near(run(mixer, x, is_causal, backend)[0], expected, rtol=1e-9, atol=1e-9)


def test_equals_transformers_block():
    config = RecurrentGemmaConfig(
        hidden_size=D, lru_width=E, num_attention_heads=H, conv1d_width=4, hidden_activation="gelu_pytorch_tanh",
    )  # fmt: skip
    theirs = RecurrentGemmaRecurrentBlock(config, 0).eval()
    mixer = make_mixer("rglru", {"full_first_write": True}, attention_bias=True).float()
    pairs = {"linear_x": "in_proj", "linear_y": "g_proj", "linear_out": "out_proj"}
    with torch.no_grad():
        for other, mine in pairs.items():
            getattr(theirs, other).load_state_dict(getattr(mixer, mine).state_dict())
        theirs.conv_1d.weight.copy_(mixer.conv.weight[:, None])
        theirs.conv_1d.bias.copy_(mixer.conv.bias)
        theirs.rg_lru.recurrent_param.copy_(mixer.decay)
        for other, mine in (("input_gate", mixer.input_gate), ("recurrent_gate", mixer.recurrence_gate)):
            getattr(theirs.rg_lru, f"{other}_weight").copy_(mine.weight)
            getattr(theirs.rg_lru, f"{other}_bias").copy_(mine.bias)
        x = torch.randn(2, T, D)
        expected = theirs(x, torch.arange(T)[None].expand(2, -1), None, use_cache=False)[0]
        for backend in ("eager", "sdpa"):
            assert_near(run(mixer, x, True, backend), expected)


def test_it_starts_with_decays_between_0_9_and_0_999():
    mixer = make_mixer("rglru", {"lru_width": 400})
    kept = (-mixer.params.decay_scale * torch.nn.functional.softplus(mixer.decay)).exp()
    assert 0.9 <= kept.min() < 0.91 and 0.99 < kept.max() <= 0.999


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("level", [-1e3, 0.0, 1e3])
def test_saturated_gates_stay_finite_and_near_fp64(level, is_causal):
    """Decay gates of 0 (nothing is forgotten or written), mixed, and 1."""
    mixer, x = make_mixer("rglru"), torch.randn(1, 150, D)
    with torch.no_grad():
        mixer.decay.fill_(3.0)
        mixer.recurrence_gate.weight.mul_(100.0)
        mixer.recurrence_gate.bias.fill_(level)
        expected = run(mixer, x.double(), is_causal, "eager")
    leaf = x.clone().requires_grad_()
    y = run(mixer.float(), leaf, is_causal)
    y.square().sum().backward()
    assert relative_rms(y, expected) < 1e-4
    assert leaf.grad.isfinite().all() and all(p.grad.isfinite().all() for p in mixer.parameters())
