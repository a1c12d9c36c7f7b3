"""`engram` against a sequential derivation from the paper."""

import numpy as np
import pytest
import torch

from frankenstein_hf.modeling.mixers.memory.engram import primes_from

from ..tiny import assert_near, tiny_config, tiny_model, tokens
from .run import make_mixer, numpy_weights, run

D, T = 20, 11


def norm(x, gain):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * gain


def signed(x: int) -> int:
    """A whole number as 64 bits hold it."""
    return (x + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize(("N", "K"), [(3, 4), (2, 3), (4, 1)])
def test_every_ngram_is_looked_up_gated_and_convolved(N, K, gate, is_causal):
    params = dict(max_ngram_size=N, kernel_size=K, n_heads_per_ngram=2, embed_dim_per_head=3, gate=gate, table_size=30)
    mixer, ids = make_mixer("engram", params), tokens(1, T)
    x, w = torch.randn(1, T, D, dtype=torch.float64), numpy_weights(mixer)
    table, known = w["ngram_memory.weight"], ids[0].tolist()
    assert mixer.sizes == primes_from(30, 2 * (N - 1)) and len(table) == sum(mixer.sizes)

    def token(t):
        return known[t] + 1 if 0 <= t < T else 0

    def entry(t, n, h):
        """Of the n-gram that ends at t."""
        mixed = 0
        for back in range(n):
            mixed ^= signed(token(t - back) * mixer.factors[back])
        number = (n - 2) * 2 + h
        return table[sum(mixer.sizes[:number]) + mixed % mixer.sizes[number]]

    v, h = np.zeros((T, D)), x[0].numpy()
    for t in range(T):
        found = [entry(t, n, head) for n in range(2, N + 1) for head in range(2)]
        if not is_causal:  # and of the one that starts there
            starting = [entry(t + n - 1, n, head) for n in range(2, N + 1) for head in range(2)]
            found = [a + b for a, b in zip(found, starting)]
        found = np.concatenate(found)
        v[t] = w["v_proj.weight"] @ found
        if gate:
            fit = norm(h[t], w["q_norm.weight"]) @ norm(w["k_proj.weight"] @ found, w["k_norm.weight"]) / np.sqrt(D)
            v[t] /= 1 + np.exp(-fit)
    normed, expected = norm(v, w["conv_norm.weight"]), v.copy()
    for t in range(T):
        total = np.zeros(D)
        for tap in range(K):
            source = t + (tap - (K - 1 if is_causal else K // 2)) * N
            if 0 <= source < T:
                total += w["conv_weight"][:, tap] * normed[source]
        expected[t] += total / (1 + np.exp(-total))
    for backend in ("eager", "sdpa"):
        assert_near(run(mixer, x, is_causal, backend, input_ids=ids)[0], torch.from_numpy(expected), 1e-9, 1e-9)


def test_hashes_differ_between_tables_layers_and_seeds_and_are_spread_evenly():
    mixer = make_mixer("engram", dict(n_heads_per_ngram=2, embed_dim_per_head=1, table_size=97))
    assert len(set(mixer.sizes)) == 4
    mixer.ngram_memory.forward = lambda index: index[..., None]
    ids = torch.randint(1, 5000, (1, 50_000), generator=torch.Generator().manual_seed(0))
    index, start = mixer.entries(ids)[0], 0
    for number, size in enumerate(mixer.sizes):
        counts = torch.bincount(index[:, number] - start, minlength=size)
        assert len(counts) == size and counts.min() > 0.8 * 50_000 / size and counts.max() < 1.2 * 50_000 / size
        start += size
    assert mixer.factors != make_mixer("engram", {"seed": 7}).factors
    layers = tiny_model(["engram", "engram"]).model.layers
    assert layers[0].mixer.factors != layers[1].mixer.factors


def test_the_table_keeps_its_size_when_the_vocabulary_grows():
    model = tiny_model("engram", mixer_params={})
    size = model.config.params_for(0).table_size
    assert size == 4 * model.config.vocab_size
    model.resize_token_embeddings(100, mean_resizing=False)
    assert model.config.params_for(0).table_size == size
    assert tiny_config("engram").mixer_params == {"engram": {"n_heads_per_ngram": 2, "embed_dim_per_head": 3}}


def test_embeddings_alone_are_refused():
    model = tiny_model("engram")
    with pytest.raises(ValueError, match="looks n-grams of tokens up and needs input_ids"):
        model(inputs_embeds=torch.randn(1, 4, 20))
