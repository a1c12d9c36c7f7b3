"""`hgrn2` against a loop written from the paper, and its bounds."""

import numpy as np
import pytest
import torch

import frankenstein_hf as fhf
from frankenstein_hf.modeling.mixers.gated.hgrn2 import HGRN2

from ..tiny import assert_near, relative_rms, tiny_config, tiny_model, tokens
from .run import make_mixer, numpy_weights, run

H, W, T, D, LAYERS = 2, 10, 40, 20, 4


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def expected_output(x, w, bound, is_causal):
    heads = lambda y: y.reshape(T, H, -1).transpose(1, 0, 2)  # noqa: E731
    project = lambda name: x @ w[f"{name}_proj.weight"].T  # noqa: E731
    g = bound + (1 - bound) * sigmoid(project("f"))
    k = heads(project("k") if "k_proj.weight" in w else 1 - g)
    q, v, g = heads(project("q") * sigmoid(project("q"))), heads(project("v")), heads(g)

    def read(flip):
        order = slice(None, None, -1 if flip else 1)
        out = []
        for q_h, k_h, v_h, g_h in zip(q[:, order], k[:, order], v[:, order], g[:, order]):
            S, rows = np.zeros((q_h.shape[1], v_h.shape[1])), []
            for q_t, k_t, v_t, g_t in zip(q_h, k_h, v_h, g_h):
                decayed = np.diag(g_t) @ S
                S = decayed + np.outer(k_t, v_t)
                rows.append((decayed if flip else S).T @ q_t)
            out.append(np.stack(rows))
        return np.stack(out)[:, order]

    out = read(flip=False) if is_causal else read(flip=False) + read(flip=True)
    out = out.transpose(1, 0, 2).reshape(T, -1)
    out = out / np.sqrt((out**2).mean(-1, keepdims=True) + 1e-6) * w["norm.weight"]
    return out @ w["o_proj.weight"].T


def layer(index, **params):
    torch.manual_seed(index)
    mixer = HGRN2(tiny_config(["hgrn2"] * LAYERS, mixer_params={"hgrn2": params}), index)
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return mixer.double()


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    ("index", "params", "bound"),
    [
        (0, {}, 0.0),
        (3, {}, 0.75),
        (1, {"lower_bound": 0.9}, 0.9),
        (2, {"tied_key": False}, 0.5),
        (1, {"expand_k": 0.5, "expand_v": 2.0}, 0.25),
    ],
)
def test_follows_the_paper(is_causal, index, params, bound):
    mixer, x = layer(index, **params), torch.randn(1, T, D, dtype=torch.float64)
    expected = torch.from_numpy(expected_output(x[0].numpy(), numpy_weights(mixer), bound, is_causal))
    for backend in ("eager", "sdpa"):
        assert_near(run(mixer, x, is_causal, backend)[0], expected, rtol=1e-9, atol=1e-9)


def log_decay(mixer, f):
    """The mixer's log forget gates where the gate's projection gives `f` [N], in fp32, and their gradient by `f`."""
    f = f.float().requires_grad_()
    mixer.float()
    mixer.f_proj.forward = lambda x: f.expand(H * W, -1).T[None]
    inputs = mixer.project(torch.randn(1, len(f), D), None)
    gates = inputs["log_decay"][0, :, 0]
    return gates, torch.autograd.grad(gates.sum(), f)[0], inputs["k"][0, :, 0]


def test_the_bound_of_a_layer_is_its_depth_and_gates_never_fall_below():
    for index in range(LAYERS):
        gates, _, key = log_decay(layer(index), torch.tensor([-1e4, 1e4]))
        assert_near(gates.exp(), torch.tensor([index / LAYERS, 1.0]))
        assert_near(key, torch.tensor([1 - index / LAYERS, 0.0]))


@pytest.mark.parametrize("bound", [0.0, 1e-12, 0.25, 0.999])
def test_log_gates_and_tied_keys_lose_no_digits_at_either_end(bound):
    x = np.concatenate([-np.logspace(2, -3, 50), np.logspace(-3, 1.9, 50)]).astype(np.float32)
    gates, gradient, key = log_decay(layer(1, lower_bound=bound), torch.from_numpy(x))
    exact = x.astype(np.longdouble)
    forgets = (1 - np.longdouble(bound)) / (1 + np.exp(exact))
    # 1 − forgets where little is forgotten, the sum itself where nearly everything is
    kept = bound + (1 - np.longdouble(bound)) / (1 + np.exp(-exact))
    expected = np.log(kept, where=exact <= 0, out=np.log1p(-forgets, where=exact > 0, out=kept.copy())).astype(
        np.float64
    )
    np.testing.assert_allclose(gates.detach().double().numpy(), expected, rtol=1e-5, atol=0)
    np.testing.assert_allclose(key.detach().double().numpy(), forgets.astype(np.float64), rtol=1e-5, atol=1e-37)
    slope = (forgets / (1 + np.exp(-exact)) / kept).astype(np.float64)
    np.testing.assert_allclose(gradient.double().numpy(), slope, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("index", range(LAYERS))
def test_learned_bounds_are_sums_of_a_softmax_over_the_layers(is_causal, index):
    """The paper's γ^ℓ = Σ_{i<ℓ} softmax(Γ)_i per channel: zero in the first layer, growing with depth."""
    mixer, x = layer(index, lower_bound="learned"), torch.randn(1, T, D, dtype=torch.float64)
    w = numpy_weights(mixer)
    shares = np.exp(w["lower_bounds.weight"])
    bound = (shares / shares.sum(0))[:index].sum(0)
    expected = torch.from_numpy(expected_output(x[0].numpy(), w, bound, is_causal))
    for backend in ("eager", "sdpa"):
        assert_near(run(mixer, x, is_causal, backend)[0], expected, rtol=1e-9, atol=1e-9)


def test_layers_share_their_learned_bounds_and_start_at_their_depth(tmp_path):
    model = tiny_model(["hgrn2"] * LAYERS, mixer_params={"hgrn2": {"lower_bound": "learned"}})
    tables = [block.mixer.lower_bounds.weight for block in model.model.layers]
    assert all(table is tables[0] for table in tables)
    assert_near(model.model.layers[3].mixer.lower_bounds(3), torch.full((H * W,), 0.75))
    x = tokens(2, 9)
    model(x, labels=x).loss.backward()
    assert tables[0].grad.isfinite().all() and tables[0].grad.abs().sum() > 0
    with torch.no_grad():
        tables[0].normal_()
    model.save_pretrained(tmp_path, save_code=False)
    assert torch.equal(type(model).from_pretrained(tmp_path).eval()(x).logits, model(x).logits)


@pytest.mark.parametrize("bound", [1.0, -0.1, float("nan"), "deep"])
def test_impossible_bounds_raise(bound):
    with pytest.raises(ValueError, match="lower_bound"):
        fhf.FrankensteinConfig(layer_pattern="hgrn2", mixer_params={"hgrn2": {"lower_bound": bound}})


@pytest.mark.parametrize("level", [-1.0, 0.0, 0.02])
def test_extreme_gates_stay_near_the_fp64_recurrence(level):
    """All gates near 0, mixed within a chunk, near 1."""
    mixer, x = make_mixer("hgrn2"), torch.randn(1, 150, D)
    x[..., 0] = level
    with torch.no_grad():
        mixer.f_proj.weight.mul_(30.0)
        mixer.f_proj.weight[:, 0] = 500.0
        expected = run(mixer, x.double(), True, "eager")
        assert relative_rms(run(mixer.float(), x, True, "sdpa"), expected) < 1e-4
