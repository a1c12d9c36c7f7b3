"""`fastconformer` and `conformer` against numpy derivations from the papers."""

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


def norm(x, eps=1e-6):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def conformer(x, w, params, is_causal, conv_norm):
    """x̃ = x + ½ FFN(x), x' = x̃ + MHSA(LN(x̃)), x'' = x' + Conv(LN(x')); returns x'' − x. No layer, so no norm of its."""

    def linear(name, y):
        return y @ w[f"{name}_proj.weight"].T + w.get(f"{name}_proj.bias", 0.0)

    def layer_norm(name, y):
        return norm(y) * w[f"{name}.weight"] + w[f"{name}.bias"]

    stream, n, K = x.copy(), len(x), params.kernel_size
    read = x
    if params.macaron:
        inner = linear("ffn_up", x)
        stream += linear("ffn_down", inner * sigmoid(inner)) * (0.5 if params.half_step else 1.0)
        read = layer_norm("attention_norm", stream)
    q, k, v = (linear(name, read) for name in "qkv")
    heads = []
    for h in range(H):
        query = q[:, h * W : (h + 1) * W]
        logits = np.zeros((n, n))
        for a in range(n):
            for b in range(n):
                angle = (a - b) * 10000.0 ** (-2 * np.arange(W // 2) / W)
                relative = np.stack([np.sin(angle), np.cos(angle)], axis=1).flatten()
                logits[a, b] = (query[a] @ k[b] + (query[a] + w["position_bias"][h]) @ relative) / np.sqrt(W)
        seen = np.tril(np.ones((n, n), bool)) if is_causal else np.ones((n, n), bool)
        heads.append(softmax_over(seen, logits) @ v)
    stream += linear("o", np.concatenate(heads, axis=1))
    u, g = np.split(linear("conv_in", layer_norm("convolution_norm", stream)), 2, axis=1)
    h = u * sigmoid(g)
    z = np.tile(w["conv_bias"], (n, 1))
    for t in range(n):
        for tap in range(K):
            source = t + tap - (K - 1 if is_causal else K // 2)
            if 0 <= source < n:
                z[t] += w["conv_weight"][:, tap] * h[source]
    z = conv_norm(z) * w["channel_norm.weight"] + w["channel_norm.bias"]
    return stream + linear("conv_out", z * sigmoid(z)) - x


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    "params", [{"kernel_size": 4}, {"kernel_size": 7, "half_step": False}, {"macaron": False}, {"conv_norm": "group"}]
)
def test_conformer_is_half_a_feed_forward_attention_and_a_convolution(params, is_causal):
    mixer = make_mixer("conformer", {"ffn_size": 9, **params})
    for bias in (mixer.position_bias, mixer.conv_weight):
        torch.nn.init.normal_(bias, std=0.4)
    x = torch.randn(1, T, D, dtype=torch.float64)

    def conv_norm(z):
        groups = z.reshape(len(z), H, -1) if params.get("conv_norm") == "group" else z
        return norm(groups).reshape(z.shape)

    expected = torch.from_numpy(conformer(x[0].numpy(), numpy_weights(mixer), mixer.params, is_causal, conv_norm))
    for backend in ("eager", "sdpa"):
        assert_near(run(mixer, x, is_causal, backend)[0], expected, rtol=1e-9, atol=1e-9)


def test_conformer_with_rope_turns_queries_and_keys_and_with_none_is_blind_to_order():
    x = torch.randn(1, T, D, dtype=torch.float64)
    order = torch.randperm(T - 1)
    shuffled = torch.cat([x[:, :-1][:, order], x[:, -1:]], dim=1)
    for position, blind in (("none", True), ("rope", False), ("relative", False)):
        mixer = make_mixer("conformer", {"position": position, "kernel_size": 1})
        assert (mixer.position_bias is not None) == (position == "relative")
        change = (run(mixer, shuffled)[:, -1] - run(mixer, x)[:, -1]).abs().max()
        assert bool(change < 1e-9) is blind


def test_a_batch_norm_counts_real_tokens_only_and_refuses_decoders():
    model = tiny_model("conformer", False, mixer_params={"conformer": {"conv_norm": "batch", "kernel_size": 3}}).train()
    x, norm_ = tokens(2, 9), model.model.layers[0].mixer.channel_norm
    mask = torch.ones_like(x)
    mask[0, 6:] = 0
    seen = []
    norm_.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].detach()))
    model(x, attention_mask=mask)
    real = seen[0][mask.bool()].double()  # pads stand behind the real tokens already
    torch.testing.assert_close(norm_.running_mean.double(), 0.1 * real.mean(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(norm_.running_var.double(), 0.9 + 0.1 * real.var(0), rtol=1e-4, atol=1e-6)
    model.eval()
    alone = model(x[:1, :6]).logits
    assert_near(model(x, attention_mask=mask).logits[:1, :6], alone)
    with pytest.raises(ValueError, match="'batch' takes statistics over later tokens and cannot be causal"):
        tiny_model("conformer", mixer_params={"conformer": {"conv_norm": "batch"}})(x)
