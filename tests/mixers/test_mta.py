"""`mta` against a numpy derivation from the paper, and its blocks and cache with kernels that are not the identity."""

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from frankenstein_hf.modeling.mixers.dense import mta as module

from ..tiny import assert_near, tiny_model, tokens
from .run import make_mixer, numpy_weights, run
from .test_dense import rotate

H, W, D, T = 2, 10, 20, 13
PARAMS = [
    {}, {"query_kernel": 3, "key_kernel": 4}, {"query_kernel": 1, "key_kernel": 2, "head_kernel": 1},
    {"pre_softmax": False}, {"post_softmax": False, "group_norm": False},
]  # fmt: skip


def randomize(mixer):
    for parameter in (mixer.pre_weight, mixer.post_weight, mixer.head_weight):
        if parameter is not None:
            parameter.data += 0.3 * torch.randn_like(parameter)
    if mixer.params.group_norm:
        torch.nn.init.normal_(mixer.head_gate)
    return mixer


def convolution(scores, kernel, seen):
    """Σ over i' and j' of θ_{i',j'} scores_{i−i', j−j'}, the kernel stored with the own query last."""
    c_q, c_k = kernel.shape
    out = np.zeros_like(scores)
    for a in range(T):
        for b in range(T):
            for back in range(c_q):
                for shift in range(-(c_k // 2), (c_k + 1) // 2):
                    if a - back >= 0 and 0 <= b - shift < T and seen[a - back, b - shift]:
                        out[a, b] += kernel[c_q - 1 - back, (c_k + 1) // 2 - 1 - shift] * scores[a - back, b - shift]
    return out


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("params", PARAMS)
def test_scores_are_convolved_over_queries_keys_and_heads(params, is_causal):
    mixer = randomize(make_mixer("mta", params))
    x, w, p = torch.randn(1, T, D, dtype=torch.float64), numpy_weights(mixer), mixer.params
    rows, seen = x[0].numpy(), np.tril(np.ones((T, T), bool)) if is_causal else np.ones((T, T), bool)
    k, v, maps = rotate(rows @ w["k_proj.weight"].T), rows @ w["v_proj.weight"].T, []
    for h in range(H):
        scores = rotate((rows @ w["q_proj.weight"].T)[:, h * W : (h + 1) * W]) @ k.T / np.sqrt(W)
        if p.pre_softmax:
            scores = convolution(scores, w["pre_weight"][h], seen)
        scores = np.where(seen, scores, -np.inf)
        scores = np.exp(scores - scores.max(1, keepdims=True))
        maps.append(scores / scores.sum(1, keepdims=True))
    if p.head_kernel > 1:
        maps = [sum(w["head_weight"][0, a, b] * maps[b] for b in range(H)) for a in range(H)]
    if p.post_softmax:
        maps = [np.where(seen, convolution(A, w["post_weight"][h], seen), 0.0) for h, A in enumerate(maps)]
    out = np.stack([A @ v for A in maps], axis=1)  # [T, H, W]
    if p.group_norm:
        groups = out.reshape(T, H // p.head_kernel, -1)
        groups = (groups - groups.mean(2, keepdims=True)) / np.sqrt(groups.var(2, keepdims=True) + 1e-6)
        out = groups.reshape(T, H, W) * w["norm_weight"] + w["norm_bias"]
        out = out / (1 + np.exp(-w["head_gate"]))[:, None]
    expected = torch.from_numpy(out.reshape(T, -1) @ w["o_proj.weight"].T)
    for backend in ("eager", "sdpa"):
        assert_near(run(mixer, x, is_causal, backend)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_causal", [True, False])
def test_mta_as_it_begins_and_without_norm_is_standard(is_causal):
    mta, standard = make_mixer("mta", {"group_norm": False}), make_mixer("standard")
    mta.init_parameters()
    standard.load_state_dict({key: x for key, x in mta.state_dict().items() if "proj" in key})
    x = torch.randn(1, T, D, dtype=torch.float64)
    assert_near(run(mta, x, is_causal), run(standard, x, is_causal), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("is_causal", [True, False])
def test_blocks_of_queries_change_neither_output_nor_gradient(is_causal, monkeypatch):
    mixer = randomize(make_mixer("mta", {"query_kernel": 2, "key_kernel": 3})).train()
    x, results = torch.randn(2, 40, D, dtype=torch.float64), []
    for scores in (1, 1 << 21):
        monkeypatch.setattr(module, "SCORES", scores)
        mixer.zero_grad()
        out = run(mixer, x, is_causal)
        out.square().sum().backward()
        results.append([out, *(p.grad for p in mixer.parameters())])
    for a, b in zip(*results):
        assert_near(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("params", PARAMS)
def test_decoding_is_exact_and_causal_with_any_kernels(params):
    model, x = tiny_model(["mta", "mta"], mixer_params={"mta": params}).double(), tokens(2, 17)
    for layer in model.model.layers:
        randomize(layer.mixer)
    with torch.no_grad():
        expected = model(x, use_cache=False).logits
        changed = x.clone()
        changed[:, 9] = (changed[:, 9] - 2) % 50 + 3
        assert torch.equal(model(changed, use_cache=False).logits[:, :9], expected[:, :9])
        for splits in ((1,) * 17, (9, 1, 5, 2)):
            cache, start = DynamicCache(config=model.config), 0
            for size in splits:
                part = model(x[:, start : start + size], cache=cache).logits
                assert_near(part, expected[:, start : start + size], rtol=1e-8, atol=1e-10)
                start += size
        tail = cache.layers[0].tail.states
        assert sum(s.shape[1] for s in tail.values()) == model.config.params_for(0).tail


def test_more_heads_in_a_group_than_divide_the_heads_shrink_by_default_and_are_refused_otherwise():
    assert make_mixer("mta", num_attention_heads=3).params.head_kernel == 1
    with pytest.raises(ValueError, match="head_kernel=2 must divide num_attention_heads=3"):
        make_mixer("mta", {"head_kernel": 2}, num_attention_heads=3)
