"""`fastconformer` against a numpy derivation from the paper."""

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from ..tiny import assert_near, tiny_model, tokens
from .run import make_mixer, numpy_weights, run
from .test_dense import rotate

H, W, D, T = 2, 10, 20, 23
i, j = np.arange(T)[:, None], np.arange(T)[None, :]


def softmax_over(visible: np.ndarray, logits: np.ndarray) -> np.ndarray:
    logits = np.where(visible, logits, -np.inf)
    p = np.exp(logits - logits.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


PARAMS = [(6, 1, 1), (6, 2, 3), (7, 3, 4), (2, 0, 1), (256, 1, 1), (4, 9, 2)]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize(("w", "g", "s"), PARAMS)
def test_fastconformer_sees_a_window_and_the_global_tokens_which_see_everything(w, g, s, separate, is_causal):
    params = dict(window_size=w, global_tokens=g, global_tokens_spacing=s, global_attn_separate=separate)
    mixer, x = make_mixer("fastconformer", params), torch.randn(1, T, D, dtype=torch.float64)
    weights, rows = numpy_weights(mixer), x[0].numpy()
    glob = np.array([t < g * s and t % s == 0 for t in range(T)])
    assert ("k_global_proj.weight" in weights) == (separate and g > 0)

    def project(name, kind=""):
        return rows @ weights[f"{name}{kind}_proj.weight"].T

    k, v = rotate(project("k")), project("v")
    if separate and g:
        k_global, v_global = rotate(project("k", "_global")), project("v", "_global")
        k, v = np.where(glob[:, None], k_global, k), np.where(glob[:, None], v_global, v)
    seen = (abs(i - j) <= w // 2) | glob[None, :] | glob[:, None]
    past = j <= i if is_causal else j < T
    heads = []
    for h in range(H):
        columns = slice(h * W, (h + 1) * W)
        out = softmax_over(seen & past, rotate(project("q")[:, columns]) @ k.T / np.sqrt(W)) @ v
        if separate and g:
            q_global = rotate(project("q", "_global")[:, columns])
            everything = softmax_over(past * np.ones((T, 1), bool), q_global @ k_global.T / np.sqrt(W)) @ v_global
            out = np.where(glob[:, None], everything, out)
        heads.append(out)
    expected = torch.from_numpy(np.concatenate(heads, axis=1) @ weights["o_proj.weight"].T)
    for backend in ("eager", "sdpa"):
        assert_near(run(mixer, x, is_causal, backend)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("params", [dict(global_tokens=2, global_tokens_spacing=5), dict(global_tokens=0), {}])
def test_fastconformer_decodes_with_separate_projections_and_any_head(params):
    params = {"window_size": 4, "global_attn_separate": True, **params}
    model, x = tiny_model("fastconformer", mixer_params={"fastconformer": params}), tokens(2, 19)
    with torch.no_grad():
        expected = model(x, use_cache=False).logits
        for splits in ((1,) * 19, (3, 1, 10, 5)):
            cache, start = DynamicCache(config=model.config), 0
            for size in splits:
                part = model(x[:, start : start + size], cache=cache).logits
                assert_near(part, expected[:, start : start + size], rtol=1e-3, atol=1e-4)
                start += size
