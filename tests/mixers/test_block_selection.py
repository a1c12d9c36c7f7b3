"""`msa` and `sparda` against a token-by-token derivation in numpy: the selected sets first, then the numbers."""

import numpy as np
import pytest
import torch

from frankenstein_hf.configuration.registries import MIXERS

from ..tiny import assert_near, tiny_config, tiny_model, tokens
from .run import make_mixer, numpy_weights, run
from .test_dense import H, T, W, rotate

C, K = 3, 3  # keys of a block, blocks of a query


def softmax(x):
    p = np.exp(x - x.max())
    return p / p.sum()


def select(index_query, index_key, t, is_causal):
    """Blocks of query t and their scores, from the definition."""
    own, last = t // C, t if is_causal else T - 1
    score = {}
    for b in range(own + 1 if is_causal else -(-T // C)):
        members = [j for j in range(b * C, b * C + C) if j <= last]
        score[b] = index_query @ index_key[members].mean(0)
    others = sorted((b for b in score if b != own), key=lambda b: (-score[b], b))
    return sorted([own, *others[: K - 1]]), score


def expected(x, w, query_name, is_causal, heads=H, groups=1, index_x=None):
    """Output [T, D], the chosen blocks of each token and group, and the mean KL of the index from the attention."""
    index_x = x if index_x is None else index_x
    out, chosen, total = np.zeros((T, heads * W)), [[None] * groups for _ in range(T)], 0.0
    k = [rotate((x @ w["k_proj.weight"].T)[:, g * W : (g + 1) * W]) for g in range(groups)]
    q = [rotate((x @ w["q_proj.weight"].T)[:, h * W : (h + 1) * W]) for h in range(heads)]
    v = x @ w["v_proj.weight"].T
    index_key = x @ w["index_k_proj.weight"].T
    I = index_key.shape[1]
    for t in range(T):
        for g in range(groups):
            index_query = (index_x @ w[query_name].T)[t, g * I : (g + 1) * I]
            blocks, score = select(index_query, index_key, t, is_causal)
            chosen[t][g] = blocks
            members = [j for b in blocks for j in range(b * C, min(b * C + C, T)) if not is_causal or j <= t]
            masses = np.zeros(len(blocks))
            for h in range(g * heads // groups, (g + 1) * heads // groups):
                p = softmax(k[g][members] @ q[h][t] / np.sqrt(W))
                out[t, h * W : (h + 1) * W] = p @ v[members, g * W : (g + 1) * W]
                masses += [p[[j // C == b for j in members]].sum() * groups / heads for b in blocks]
            index = softmax(np.array([score[b] for b in blocks]))
            total += (index * (np.log(index) - np.log(masses))).sum() / groups
    return out @ w["o_proj.weight"].T, chosen, total / T


def named(chosen):
    return [[row.nonzero().flatten().tolist() for row in token] for token in chosen[0].transpose(0, 1)]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("name", ["msa", "sparda"])
def test_selection_output_and_loss(name, is_causal, backend, groups):
    width = {"msa": "index_dim", "sparda": "forecast_dim"}[name]
    params = {"block_size": C, "topk_blocks": K, width: 4, "kl_loss_weight": 0.5}
    mixer = make_mixer(name, params, num_key_value_heads=groups).train()
    seen, select_blocks = [], mixer.select
    mixer.select = lambda *args: seen.append(select_blocks(*args)) or seen[-1]
    losses, forward = [], mixer.forward
    mixer.forward = lambda *args: losses.append(forward(*args)) or losses[-1]
    x = torch.randn(1, T, 20, dtype=torch.float64)
    query_name = "index_q_proj.weight" if name == "msa" else "forecast_proj.weight"
    out, chosen, kl = expected(x[0].numpy(), numpy_weights(mixer), query_name, is_causal, groups=groups)
    actual = run(mixer, x, is_causal, backend)
    assert named(seen[0][0]) == chosen
    assert_near(actual[0], torch.from_numpy(out), rtol=1e-5, atol=1e-6)
    (loss,) = losses[0][1].aux_losses.values()
    assert loss.item() == pytest.approx(0.5 * kl, rel=1e-4)


@pytest.mark.parametrize("name", ["msa", "sparda"])
def test_the_loss_trains_the_index_and_nothing_below_it(name):
    model, x = tiny_model([name, name], tie_word_embeddings=False).train(), tokens(2, 17)
    output = model.model(x)
    assert set(output.aux_losses) == {f"{name}_kl"} and output.aux_loss > 0
    output.aux_loss.backward()
    trained = {key for key, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert trained and all("index" in key or "forecast" in key for key in trained)
    model.eval()
    assert model.model(x).aux_losses is None  # a loss of training only


@pytest.mark.parametrize("name", ["msa", "sparda"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_enough_blocks_are_standard_attention(name, is_causal):
    standard, mixer = make_mixer("standard"), make_mixer(name, {"block_size": 4, "topk_blocks": 4})
    mixer.load_state_dict(standard.state_dict(), strict=False)
    x = torch.randn(2, T, 20, dtype=torch.float64)
    assert_near(run(mixer, x, is_causal), run(standard, x, is_causal), rtol=1e-9, atol=1e-9)


def test_a_forecast_selects_for_the_next_sparda_layer():
    params = {"sparda": {"block_size": C, "topk_blocks": 2, "forecast_dim": 4}}
    model, x = tiny_model(["sparda", "swa", "sparda"], mixer_params=params), tokens(1, T)
    first, last = model.model.layers[0].mixer, model.model.layers[2].mixer
    assert first.forecast_proj is not None and last.forecast_proj is None  # nobody would use it
    seen = {}
    for name, mixer in (("first", first), ("last", last)):

        def recorded(streams, call, name=name, select=mixer.select):
            seen[name] = streams["index_query"]
            return select(streams, call)

        mixer.select = recorded
    with torch.no_grad():
        model(x, use_cache=False)
        normed = model.model.layers[0].input_layernorm(model.get_input_embeddings()(x))
    assert_near(seen["first"].flatten(), first.forecast_proj(normed).flatten())
    assert torch.equal(seen["first"], seen["last"])
    alone = tiny_model(["sparda", "sparda"], mixer_params={"sparda": {**params["sparda"], "lookahead": 0}})
    assert all(layer.mixer.forecast_proj is not None for layer in alone.model.layers)


def test_a_loss_is_a_mean_over_real_tokens_however_they_are_packed_or_padded():
    model = tiny_model("msa").train()
    documents = [tokens(1, n, seed=n) for n in (13, 5, 2)]
    separate = [model.model(x).aux_loss * x.shape[1] for x in documents]
    expected = torch.stack(separate).sum() / 20
    packed = model.model(torch.cat(documents, 1), position_ids=torch.tensor([[*range(13), *range(5), *range(2)]]))
    assert_near(packed.aux_loss, expected)
    padded = torch.full((3, 13), 3)
    mask = torch.zeros(3, 13, dtype=torch.long)
    for row, x in enumerate(documents):
        padded[row, 13 - x.shape[1] :], mask[row, 13 - x.shape[1] :] = x[0], 1
    assert_near(model.model(padded, attention_mask=mask).aux_loss, expected)


def test_no_weight_means_no_loss_and_defaults_fit_any_length():
    model = tiny_model("msa", mixer_params={"msa": {"kl_loss_weight": 0.0}}).train()
    assert model.model(tokens(1, 3)).aux_losses is None  # T below one block
    assert tiny_config("msa", mixer_params={}).params_for(0).topk_blocks == 16
    assert MIXERS.get("sparda").token_size(model.config.params_for(0), model.config) == 2 * 10 + 64
