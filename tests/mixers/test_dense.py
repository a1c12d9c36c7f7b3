"""`standard`, `gqa`, `xsa`, `sigmoid`, `swa` and `memory` against numpy derivations from the papers."""

import numpy as np
import pytest
import torch

from frankenstein_hf.configuration.registries import MIXERS

from ..tiny import assert_near, tokens
from .run import make_mixer, numpy_weights, run

H, W, T = 2, 10, 13


def rotate(x: np.ndarray) -> np.ndarray:
    """Rotary positions on [T, W]: channel pairs (i, i + W/2) turn by t · 10000^(−2i/W)."""
    t, half = np.arange(x.shape[0])[:, None], x.shape[1] // 2
    angle = t * 10000.0 ** (-np.arange(half) * 2 / x.shape[1])
    a, b = x[:, :half], x[:, half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=1)


def attention(x, w, visible, value=None, kv_heads=1):
    out = []
    for h in range(H):
        g = h * kv_heads // H
        q = rotate((x @ w["q_proj.weight"].T)[:, h * W : (h + 1) * W])
        k = (x @ w["k_proj.weight"].T)[:, g * W : (g + 1) * W]
        v = (x @ w["v_proj.weight"].T)[:, g * W : (g + 1) * W] if value is None else value(k, g)
        scores = np.where(visible, q @ rotate(k).T / np.sqrt(W), -np.inf)
        p = np.exp(scores - scores.max(1, keepdims=True))
        out.append(p / p.sum(1, keepdims=True) @ v)
    return np.concatenate(out, axis=1) @ w["o_proj.weight"].T


i, j = np.arange(T)[:, None], np.arange(T)[None, :]


def check(mixer, expected, is_causal, **arguments):
    x = torch.randn(1, T, 20, dtype=torch.float64)
    want = torch.from_numpy(expected(x[0].numpy(), numpy_weights(mixer)))
    for backend in ("eager", "sdpa"):
        # fp32 rotary angles are the only rounding
        assert_near(run(mixer, x, is_causal, backend, **arguments)[0], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_standard_is_softmax_attention(is_causal, kv_heads):
    visible = j <= i if is_causal else j < T
    mixer = make_mixer("standard", num_key_value_heads=kv_heads)
    check(mixer, lambda x, w: attention(x, w, visible, kv_heads=kv_heads), is_causal)


def test_gqa_with_all_heads_is_standard_and_with_one_is_multi_query():
    standard = make_mixer("standard", num_key_value_heads=2)
    gqa = make_mixer("gqa", {"num_key_value_heads": 2})
    gqa.load_state_dict(standard.state_dict())
    x = torch.randn(2, T, 20, dtype=torch.float64)
    assert torch.equal(run(gqa, x), run(standard, x))
    check(make_mixer("gqa", {"num_key_value_heads": 1}), lambda x, w: attention(x, w, j <= i), True)


def test_gqa_groups_default_to_the_config_or_a_quarter_of_the_heads():
    for heads, config_groups, expected in ((8, 2, 2), (8, 8, 2), (6, 6, 1), (12, 12, 3), (2, 2, 1)):
        mixer = make_mixer("gqa", num_attention_heads=heads, num_key_value_heads=config_groups, head_dim=4)
        assert mixer.num_key_value_heads == expected


@pytest.mark.parametrize(("w", "s"), [(6, 2), (1, 0), (5, 4), (256, 4), (2, 1)])
@pytest.mark.parametrize("is_causal", [True, False])
def test_swa_sees_the_sinks_and_the_window(w, s, is_causal):
    if is_causal:
        visible = ((j < s) & (j <= i)) | ((i - (w - s) + 1 <= j) & (j <= i))
    else:
        visible = (j < s) | (abs(i - j) <= (w - s) // 2)
    mixer = make_mixer("swa", {"window_size": w, "num_sinks": s})
    check(mixer, lambda x, weights: attention(x, weights, visible), is_causal)


def test_swa_equals_standard_while_everything_is_in_the_window():
    standard, swa = make_mixer("standard"), make_mixer("swa", {"window_size": T, "num_sinks": 3})
    swa.load_state_dict(standard.state_dict())
    x = torch.randn(1, T, 20, dtype=torch.float64)
    assert_near(run(swa, x), run(standard, x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("is_causal", [True, False])
def test_memory_values_are_unrotated_keys_plus_normed_table_rows(is_causal):
    mixer, ids = make_mixer("memory", num_key_value_heads=2), tokens(1, T)

    def expected(x, w):
        rows = w["token_memory.weight"][ids[0].numpy()]
        rows = rows / np.sqrt((rows**2).mean(1, keepdims=True) + 1e-6) * w["memory_norm.weight"]
        visible = j <= i if is_causal else j < T
        return attention(x, w, visible, lambda k, g: k + rows[:, g * W : (g + 1) * W], kv_heads=2)

    check(mixer, expected, is_causal, input_ids=ids)


@pytest.mark.parametrize("is_causal", [True, False])
def test_xsa_reads_nothing_along_the_tokens_own_value(is_causal):
    mixer, x = make_mixer("xsa", num_key_value_heads=2), torch.randn(1, T, 20, dtype=torch.float64)
    standard = make_mixer("standard", num_key_value_heads=2)
    standard.load_state_dict(mixer.state_dict())
    for mixer_ in (mixer, standard):  # what the heads read
        mixer_.o_proj = torch.nn.Identity()
    z, y = (run(m, x, is_causal).view(T, H, W).detach() for m in (mixer, standard))
    v = mixer.v_proj(x).view(T, H, W).detach()
    assert_near((z * v).sum(-1), torch.zeros(T, H, dtype=torch.float64), atol=1e-12)
    # and nothing else is taken away
    along = (y * v).sum(-1, keepdim=True) / (v * v).sum(-1, keepdim=True)
    assert_near(z + along * v, y, rtol=1e-9, atol=1e-9)
    assert (y - z).norm() > 0.1
    assert z[0].norm() < 1e-12 or not is_causal  # the first token sees only itself


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("params", [{"bias": -0.7}, {}, {"normalize": "l1"}, {"normalize": "hybrid"}])
def test_sigmoid_weighs_every_key_on_its_own(is_causal, params):
    mixer = make_mixer("sigmoid", params)
    if mixer.bias is not None:
        torch.nn.init.normal_(mixer.bias)
    bias = [params["bias"]] * H if "bias" in params else mixer.bias.tolist()

    def expected(x, w):
        k, v, heads = rotate(x @ w["k_proj.weight"].T), x @ w["v_proj.weight"].T, []
        visible = j <= i if is_causal else j < T
        for h in range(H):
            logits = rotate((x @ w["q_proj.weight"].T)[:, h * W : (h + 1) * W]) @ k.T / np.sqrt(W) + bias[h]
            if params.get("normalize") != "l1":
                logits = logits - np.log(visible.sum(1) * np.ones(T))[:, None]
            p = np.where(visible, 1 / (1 + np.exp(-logits)), 0.0)
            heads.append((p / p.sum(1, keepdims=True) if params.get("normalize") == "l1" else p) @ v)
        out = np.concatenate(heads, axis=1) @ w["o_proj.weight"].T
        if params.get("normalize") == "hybrid":
            out = out / np.sqrt((out**2).mean(1, keepdims=True) + 1e-6) * w["output_norm.weight"]
        return out

    check(mixer, expected, is_causal)


def test_sigmoid_with_l1_gives_a_constant_value_back_because_its_weights_sum_to_one():
    mixer = make_mixer("sigmoid", {"normalize": "l1", "bias": 0.3}).float()
    value = torch.randn(W)
    mixer.v_proj.forward = lambda x: value.expand(*x.shape[:2], W)
    mixer.o_proj = torch.nn.Identity()
    for backend in ("eager", "sdpa"):
        out = run(mixer, 5 * torch.randn(2, T, 20), backend=backend)
        assert_near(out, value.repeat(H).expand_as(out), rtol=1e-5, atol=1e-6)


def test_a_fixed_bias_makes_sigmoid_parameter_free_and_other_words_are_refused():
    spec = MIXERS.get("sigmoid")
    for params, expected in (({}, False), ({"bias": 0.0}, True), ({"bias": 0.0, "normalize": "hybrid"}, False)):
        assert spec.parameter_free(spec.params(**params)) is expected
    assert set(make_mixer("sigmoid", {"bias": 0}).state_dict()) == set(make_mixer("standard").state_dict())
    with pytest.raises(ValueError, match="'bias' must be a number or 'learned', got 'none'"):
        make_mixer("sigmoid", {"bias": "none"})


def test_ca_learns_its_gain_or_is_given_one():
    learned, fixed = make_mixer("ca"), make_mixer("ca", {"gain": 1 / 0.3})
    torch.nn.init.constant_(learned.log_gain, -np.log(0.3))
    weights = learned.state_dict()
    del weights["log_gain"]
    fixed.load_state_dict(weights)
    x = torch.randn(2, T, 20, dtype=torch.float64)
    assert_near(run(learned, x), run(fixed, x), rtol=1e-9, atol=1e-9)
    spec = MIXERS.get("ca")
    assert not spec.parameter_free(spec.params()) and spec.parameter_free(fixed.params)
    with pytest.raises(ValueError, match="'gain' must be a number or 'learned'"):
        make_mixer("ca", {"gain": "fixed"})


@pytest.mark.parametrize("is_causal", [True, False])
def test_ca_with_no_gain_averages_and_reads_a_constant_line_as_it_is(is_causal):
    mixer, x = make_mixer("ca", {"gain": 0}), torch.randn(1, T, 20, dtype=torch.float64)
    v = mixer.v_proj(x).repeat(1, 1, H)
    mean = v.cumsum(1) / torch.arange(1, T + 1)[:, None] if is_causal else v.mean(1, keepdim=True).expand_as(v)
    assert_near(run(mixer, x, is_causal), mixer.o_proj(mean), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["sigmoid", "ca", "fox", "standard"])
def test_dropout_of_attention_weights_acts_in_training_only(name):
    mixer, x = make_mixer(name, attention_dropout=0.5), torch.randn(1, T, 20, dtype=torch.float64)
    assert torch.equal(run(mixer, x), run(mixer, x))
    mixer.train()
    assert not torch.equal(run(mixer, x), run(mixer, x))
