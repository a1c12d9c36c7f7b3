"""`longformer`, `bigbird` and `sparse_transformer` against numpy derivations from the papers."""

import numpy as np
import pytest
import torch

import frankenstein_hf as fhf

from ..tiny import assert_near, tiny_config
from .run import make_mixer, run
from .test_dense import H, T, W, attention, check, i, j


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    ("w", "d", "tokens"), [(4, 0, [0]), (5, 0, []), (4, 1, [0, 6]), (2, 2, [5, 2]), (1, 0, [12]), (256, 0, [0])]
)
def test_longformer_sees_the_window_and_the_global_tokens(w, d, tokens, is_causal):
    visible = (abs(i - j) <= w // 2 * (d + 1)) & ((i - j) % (d + 1) == 0)
    visible = visible | np.isin(j, tokens) | np.isin(i, tokens)
    visible = visible & (j <= i) if is_causal else visible
    mixer = make_mixer("longformer", {"window_size": w, "dilation": d, "global_tokens": tokens})
    check(mixer, lambda x, weights: attention(x, weights, visible), is_causal)


@pytest.mark.parametrize("is_causal", [True, False])
def test_longformer_global_tokens_see_through_projections_of_their_own(is_causal):
    tokens = [1, 7]
    visible = (abs(i - j) <= 2) | np.isin(j, tokens)
    everything = np.ones((T, T), bool)
    if is_causal:
        visible, everything = visible & (j <= i), everything & (j <= i)

    def expected(x, w):
        local = attention(x, {**w, "o_proj.weight": np.eye(H * W)}, visible)
        own = {f"{p}_proj.weight": w[f"{p}_global_proj.weight"] for p in "qkv"}
        local[tokens] = attention(x, {**own, "o_proj.weight": np.eye(H * W)}, everything)[tokens]
        return local @ w["o_proj.weight"].T

    params = {"window_size": 4, "global_tokens": tokens, "separate_global": True}
    check(make_mixer("longformer", params), expected, is_causal)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("mode", ["strided", "fixed", "mixed"])
def test_sparse_transformer_sees_its_factorised_patterns(mode, is_causal):
    stride, c = 4, 2
    strided = ((i - j) % stride == 0) | (abs(i - j) < stride)
    fixed = (i // stride == j // stride) | (j % stride >= stride - c)
    if is_causal:
        strided, fixed = strided & (j <= i), fixed & (j <= i)
    both = {"strided": [strided] * 2, "fixed": [fixed] * 2, "mixed": [strided, fixed]}[mode]
    mixer = make_mixer("sparse_transformer", {"stride": stride, "summary_columns": c, "mode": mode})

    def expected(x, w):
        identity = {**w, "o_proj.weight": np.eye(H * W)}
        parts = [attention(x, identity, visible)[:, h * W : (h + 1) * W] for h, visible in enumerate(both)]
        return np.concatenate(parts, axis=1) @ w["o_proj.weight"].T

    check(mixer, expected, is_causal)


def test_sparse_transformer_stride_is_the_root_of_the_longest_sequence():
    assert tiny_config("sparse_transformer", mixer_params={}).params_for(0).stride == 22  # ⌊√512⌋
    with pytest.raises(ValueError, match="summary_columns=5 must be at most stride=4"):
        tiny_config("sparse_transformer", mixer_params={"sparse_transformer": {"stride": 4, "summary_columns": 5}})


@pytest.mark.parametrize("is_causal", [True, False])
def test_bigbird_sees_window_globals_and_one_random_block(is_causal):
    mixer = make_mixer("bigbird", {"block_size": 2, "num_random": 1, "num_global": 1, "window_size": 2})
    ((_, pattern),) = mixer.patterns(mixer.params, 0, H)
    random = pattern.random_blocks(torch.arange(7), 7, is_causal)[:, 0].numpy()
    assert (random >= 0).any()
    visible = (abs(i - j) <= 1) | (i < 2) | (j < 2) | (j // 2 == random[i // 2])
    visible = visible & (j <= i) if is_causal else visible
    check(mixer, lambda x, weights: attention(x, weights, visible), is_causal)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("longformer", {"window_size": 2 * T}),
        ("bigbird", {"window_size": 2 * T}),
        ("bigbird", {"window_size": 1, "num_global": 1, "block_size": T}),
        ("sparse_transformer", {"stride": T, "mode": "strided"}),
        ("sparse_transformer", {"stride": T, "mode": "fixed"}),
    ],
)
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_pattern_that_covers_everything_is_standard(name, params, is_causal):
    standard, mixer = make_mixer("standard"), make_mixer(name, params)
    mixer.load_state_dict(standard.state_dict())
    x = torch.randn(2, T, 20, dtype=torch.float64)
    assert_near(run(mixer, x, is_causal), run(standard, x, is_causal), rtol=1e-9, atol=1e-9)


def test_heads_without_a_share_of_the_key_heads_still_get_theirs():
    """Six heads in halves of three on two key heads: a half is no whole number of groups on four."""
    changes = dict(num_attention_heads=6, num_key_value_heads=2, head_dim=4)
    mixer = make_mixer("sparse_transformer", {"stride": 3}, **changes)
    x = torch.randn(1, T, 20, dtype=torch.float64)
    assert_near(run(mixer, x), run(mixer, x, backend="eager"), rtol=1e-9, atol=1e-10)
    odd = make_mixer(
        "sparse_transformer", {"stride": 3}, **changes | {"num_attention_heads": 5, "num_key_value_heads": 5}
    )
    assert_near(run(odd, x), run(odd, x, backend="eager"), rtol=1e-9, atol=1e-10)


def test_impossible_patterns_are_refused():
    for params, message in (({"global_tokens": [-1]}, "≥ 0"), ({"window_size": 0}, "≥ 1")):
        with pytest.raises(ValueError, match=message):
            fhf.FrankensteinConfig(layer_pattern="longformer", mixer_params={"longformer": params})
