"""`LayerExtras.max_logits` of every mixer that claims them, against logits recomputed pair by pair."""

import numpy as np
import pytest
import torch

from frankenstein_hf.configuration.registries import MIXERS
from frankenstein_hf.modeling.attention_backends import dense_max_logits

from ..tiny import ALL_MIXERS, tiny_model, tokens

NAMES = [spec.name for spec in MIXERS if spec.logits]
T = 14
PADS = [(0, [0, 1, 2]), (1, [4, 5, 13])]  # row, pads: left ones; interior and right ones


def batch(kind):
    """Arguments of a call, and the documents in it as (row, tokens)."""
    x = tokens(2, T)
    if kind == "packed":
        starts = [[0, 5, 9], [0, 12]]
        positions = torch.stack([torch.cat([torch.arange(b - a) for a, b in zip(s, [*s[1:], T])]) for s in starts])
        documents = [(row, list(range(a, b))) for row, s in enumerate(starts) for a, b in zip(s, [*s[1:], T])]
        return {"input_ids": x, "position_ids": positions}, documents
    mask = torch.ones(2, T, dtype=torch.long)
    for row, pads in PADS if kind == "pads" else []:
        mask[row, pads] = 0
    documents = [(row, [t for t in range(T) if mask[row, t]]) for row in range(2)]
    return {"input_ids": x, "attention_mask": mask}, documents


def rotated(x):
    """Rotary positions 0, 1, … of [L, W], base 10000, halves paired."""
    half = x.shape[1] // 2
    angle = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(half) / half)
    a, b = x[:, :half], x[:, half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=1)


def sees(mixer, i, j, is_causal, length, head):
    params = mixer.params
    if is_causal and j > i:
        return False
    if hasattr(mixer, "patterns"):  # what these see is tested in test_sparse_patterns.py
        i, j = torch.tensor(i), torch.tensor(j)
        for heads, pattern in mixer.patterns(params, 0, mixer.num_heads):
            if head in range(mixer.num_heads)[heads]:
                return bool(pattern.visible(i, j, length, is_causal))
    if not hasattr(params, "window_size"):
        return True
    reach = params.window_size - params.num_sinks
    left, right = (reach - 1, 0) if is_causal else (reach // 2, reach // 2)
    return j < params.num_sinks or i - left <= j <= i + right


@pytest.mark.parametrize("kind", ["plain", "pads", "packed"])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_largest_logits_are_those_of_the_visible_real_pairs(name, is_causal, kind):
    model = tiny_model(name, is_causal, num_attention_heads=4, num_key_value_heads=2, head_dim=6, attention_bias=True)
    kwargs, documents = batch(kind)
    layer, inputs = model.model.layers[0], []
    with torch.no_grad():
        for projection in (layer.mixer.q_proj, layer.mixer.k_proj):
            projection.bias.normal_()
    layer.input_layernorm.register_forward_hook(lambda m, i, output: inputs.append(output.double().numpy()))
    with torch.no_grad():
        result = model.model(**kwargs, output_max_logits=True).max_logits
    mixer, expected = layer.mixer, np.full(4, -np.inf)
    assert len(inputs) == getattr(mixer.params, "num_stages", 1)
    (W_q, b_q), (W_k, b_k) = (
        (p.weight.detach().double().numpy(), p.bias.detach().double().numpy()) for p in (mixer.q_proj, mixer.k_proj)
    )
    for x in inputs:
        for row, places in documents:
            q = (x[row, places] @ W_q.T + b_q).reshape(len(places), 4, 6)
            k = (x[row, places] @ W_k.T + b_k).reshape(len(places), mixer.num_key_value_heads, 6)
            for h in range(4):
                query, key = q[:, h], k[:, h * mixer.num_key_value_heads // 4]
                if getattr(mixer, "rotates", True):
                    query, key = rotated(query), rotated(key)
                logits = query @ key.T / np.sqrt(6)
                for i in range(len(places)):
                    for j in range(len(places)):
                        if sees(mixer, i, j, is_causal, len(places), h):
                            expected[h] = max(expected[h], logits[i, j])
    np.testing.assert_allclose(result[0].numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("is_causal", [True, False])
def test_queries_and_keys_at_pads_do_not_count_however_large(is_causal):
    model, contexts = tiny_model("swa", is_causal), []
    swa = model.model.layers[0].mixer
    swa.register_forward_pre_hook(lambda m, args: contexts.append(args[1]))
    model.model(**batch("pads")[0], output_max_logits=True)
    context, rows = contexts[0], contexts[0].rows[0]
    q, k = torch.randn(2, 2, T, 10), torch.randn(2, 1, T, 10)
    for function, real in (
        (lambda q, k: dense_max_logits(q, k, context, 1.0), context.keep),
        (lambda q, k: swa.max_logits(q, k, rows), rows.keep),
    ):
        pads = ~real[:, None, :, None]
        expected = function(q.masked_fill(pads, 0), k.masked_fill(pads, 0))
        assert (expected > 0).all()
        assert torch.equal(function(q.masked_fill(pads, 1e3), k.masked_fill(pads, 1e3)), expected)


@pytest.mark.parametrize("name", [spec.name for spec in MIXERS if spec.native_mask and spec.logits])
@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.float32).min, None])
def test_pairs_hidden_by_the_callers_mask_do_not_count(name, hidden):
    model, x = tiny_model(name), tokens(1, 6)
    with torch.no_grad():
        expected = model.model(x[:, :3], output_max_logits=True).max_logits[0]
    visible = torch.ones(6, 6, dtype=torch.bool).tril()
    visible[3:] = torch.eye(6, dtype=torch.bool)[0]  # the last three look at the first token only
    x[:, 3:] = x[:, :1]
    mask = visible if hidden is None else torch.zeros(6, 6).masked_fill(~visible, hidden)
    kwargs = {"attention_mask": mask[None, None], "position_ids": torch.tensor([[0, 1, 2, 0, 0, 0]])}
    with torch.no_grad():
        result = model.model(x, **kwargs, output_max_logits=True).max_logits[0]
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ALL_MIXERS)
def test_they_are_returned_only_when_asked_for_and_by_those_that_claim_them(name):
    for is_causal in (True, False):
        if not getattr(MIXERS.get(name), "causal" if is_causal else "bidirectional"):
            continue
        model, x = tiny_model([name, name], is_causal), tokens(2, 9)
        with torch.no_grad():
            silent, asked = model.model(x), model.model(x, output_max_logits=True)
        assert silent.max_logits is None
        assert [m is not None for m in asked.max_logits] == [bool(MIXERS.get(name).logits)] * 2
        assert torch.equal(silent.last_hidden_state, asked.last_hidden_state)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_gradient_checkpointing_and_the_backend_change_nothing(name, backend):
    model, x = tiny_model(name, attn_implementation=backend), tokens(2, 9)
    expected = tiny_model(name).model(x, output_max_logits=True).max_logits[0]
    for reentrant in (False, True):
        model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
        output = model.model(x, output_max_logits=True)
        output.last_hidden_state.sum().backward()
        torch.testing.assert_close(output.max_logits[0], expected, rtol=1e-6, atol=0)


def test_a_cache_is_refused():
    model, x = tiny_model("standard"), tokens(1, 4)
    cache = model(x, use_cache=True).cache
    with pytest.raises(ValueError, match="leave out the cache"):
        model.model(x, cache=cache, output_max_logits=True)
