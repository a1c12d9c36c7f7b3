"""Every activation of the registry against formulas in numpy, at its edges, and inside a model."""

import math

import numpy as np
import pytest
import torch
from transformers.activations import ACT2FN

from frankenstein_hf import FrankensteinConfig
from frankenstein_hf.configuration.activations import LEARNED, RAF_TARGETS
from frankenstein_hf.configuration.registries import ACTIVATIONS
from frankenstein_hf.modeling.activations import make_activation
from frankenstein_hf.modeling.rational import TARGETS, fitted, rational

from ..tiny import assert_near, tiny_config, tiny_model, tokens

ALL = ACTIVATIONS.names()
F = 6


def activation(name: str, **params):
    config = FrankensteinConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, layer_pattern="swa",
                                hidden_act=name, activation_params=params, intermediate_size=F)  # fmt: skip
    module = make_activation(config, 0, F)
    if hasattr(module, "init_parameters"):
        module.init_parameters()
    return module.double().eval()


def sigma(x):
    return 1 / (1 + np.exp(-x))


def elu(x, a=1.0, b=1.0):
    return np.where(x >= 0, x, a * (np.exp(b * np.minimum(x, 0)) - 1))


erf = np.vectorize(math.erf)
ALPHA, SCALE = 1.6732632423543772, 1.0507009873554805

# the formula at the default parameters and first weights
FORMULAS = {
    "silu": lambda x: x * sigma(x),
    "swish": lambda x: x * sigma(x),
    "gelu": lambda x: x * (1 + erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": sigma,
    "tanh": np.tanh,
    "identity": lambda x: x,
    "mish": lambda x: x * np.tanh(np.log1p(np.exp(x))),
    "leaky_relu": lambda x: np.where(x >= 0, x, 0.01 * x),
    "relu6": lambda x: np.clip(x, 0, 6),
    "hardswish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "arctan": np.arctan,
    "softsign": lambda x: x / (1 + abs(x)),
    "elliott": lambda x: x / (1 + abs(x)),
    "softplus": lambda x: np.log1p(np.exp(x)),
    "elu": elu,
    "selu": lambda x: SCALE * elu(x, ALPHA),
    "celu": elu,
    "vrelu": abs,
    "brelu": lambda x: np.clip(x, 0, 1),
    "lisht": lambda x: x * np.tanh(x),
    "abs_relu": abs,
    "nl_relu": lambda x: np.log1p(np.maximum(x, 0)),
    "hexpo": lambda x: np.where(x >= 0, 1 - np.exp(-np.maximum(x, 0)), np.exp(np.minimum(x, 0)) - 1),
    "ptanh": lambda x: np.where(x >= 0, 1, 0.25) * np.tanh(x),
    "dis_relu": lambda x: np.maximum(x, -0.05),
    "elish": lambda x: elu(x) * sigma(x),
    "hardelish": lambda x: elu(x) * np.clip((x + 1) / 2, 0, 1),
    "prelu": lambda x: np.where(x >= 0, x, 0.25 * x),
    "pelu": elu,
    "mpelu": elu,
    "felu": elu,
    "eelu": elu,
    "pdelu": lambda x: np.where(x >= 0, x, np.maximum(1 + 0.1 * np.minimum(x, 0), 0) ** 10 - 1),
    "preu": lambda x: np.where(x >= 0, x, x * np.exp(np.minimum(x, 0))),
    "softexp": lambda x: x,
    "swish_trainable": lambda x: x * sigma(x),
}


def test_there_is_a_formula_for_every_name():
    assert {*FORMULAS, "raf"} == {*ALL}
    assert len(ALL) + len(("maxout", "swiglu", "geglu", "reglu")) == 43


@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_an_activation_is_its_formula(name):
    x = torch.linspace(-8, 8, 60 * F, dtype=torch.float64).view(-1, F)
    assert_near(activation(name)(x), torch.from_numpy(FORMULAS[name](x.numpy()) * 1.0), rtol=1e-9, atol=1e-9)


# (name, parameters, weights, formula)
VARIANTS = [
    ("swish", {"beta": 2.0}, {}, lambda x: x * sigma(2 * x)),
    ("leaky_relu", {"slope": 0.2}, {}, lambda x: np.where(x >= 0, x, 0.2 * x)),
    ("elu", {"alpha": 2.0}, {}, lambda x: elu(x, 2)),
    ("celu", {"alpha": 2.0}, {}, lambda x: elu(x, 2, 0.5)),
    ("brelu", {"threshold": 3.0}, {}, lambda x: np.clip(x, 0, 3)),
    ("abs_relu", {"a": -1.0}, {}, lambda x: x),
    ("nl_relu", {"beta": 2.0}, {}, lambda x: np.log1p(2 * np.maximum(x, 0))),
    ("hexpo", {"form": "linear"}, {}, lambda x: x),
    ("dis_relu", {"form": "shifted"}, {}, lambda x: np.maximum(x, 0)),
    ("hardelish", {"hard_sigmoid": "relu6"}, {}, lambda x: elu(x) * np.clip(x + 3, 0, 6) / 6),
    ("pelu", {}, {"alpha": 2.0, "beta": 0.5}, lambda x: np.where(x >= 0, 4 * x, elu(x, 2, 2))),
    ("pelu", {}, {"alpha": -5.0}, lambda x: np.where(x >= 0, 0.1 * x, elu(x, 0.1))),
    ("mpelu", {}, {"alpha": 2.0, "beta": 0.5}, lambda x: elu(x, 2, 0.5)),
    ("mpelu", {"form": "seed"}, {"alpha": 2.0, "beta": 0.5}, elu),
    ("felu", {}, {"alpha": 3.0}, elu),
    ("eelu", {"form": "seed"}, {"alpha": 2.0, "beta": 3.0}, lambda x: np.where(x >= 0, 3 * x, elu(x, 2))),
    ("pdelu", {"t": 1.0}, {"alpha": 2.0}, lambda x: elu(x, 2)),
    ("pdelu", {"form": "seed"}, {}, elu),
    ("preu", {}, {"alpha": 2.0, "beta": 0.5}, lambda x: np.where(x >= 0, 2 * x, 2 * x * np.exp(np.minimum(x, 0) / 2))),
    ("preu", {"form": "seed"}, {"beta": 3.0}, lambda x: np.where(x >= 0, 3 * x, elu(x))),
    ("softexp", {}, {"alpha": 0.5}, lambda x: (np.exp(x / 2) - 1) / 0.5 + 0.5),
    ("softexp", {}, {"alpha": -0.5}, lambda x: np.log(np.maximum(1 + 0.5 * (x - 0.5), 1e-6)) / 0.5),
    ("swish_trainable", {}, {"beta": 2.0}, lambda x: x * sigma(2 * x)),
]  # fmt: skip


@pytest.mark.parametrize("name, params, weights, formula", VARIANTS)
def test_parameters_and_weights_mean_what_the_table_says(name, params, weights, formula):
    module, x = activation(name, **params), torch.linspace(-6, 6, 60 * F, dtype=torch.float64).view(-1, F)
    for key, value in weights.items():
        torch.nn.init.constant_(getattr(module, key), value)
    assert_near(module(x), torch.from_numpy(formula(x.numpy()) * 1.0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ALL)
def test_values_and_gradients_are_finite_far_out(name, dtype):
    module = activation(name).to(dtype)
    x = torch.tensor([[-1e4, -100.0, -1.0, 1.0, 100.0, 1e4]], dtype=dtype, requires_grad=True)
    y = module(x)
    y.float().sum().backward()
    assert y.dtype == dtype and y.isfinite().all() and x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("name", sorted(LEARNED))
def test_every_weight_learns_and_gradients_are_right(name):
    module = activation(name)
    x = (torch.randn(4, F, dtype=torch.float64) * 2).requires_grad_()
    assert torch.autograd.gradcheck(module, (x,)) if name != "felu" else True  # its weight sits at a border
    module(x).square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in module.parameters())


def test_softexp_leaves_zero_with_the_derivative_of_its_limit():
    module = activation("softexp")
    x = torch.linspace(-2, 2, F, dtype=torch.float64)[None]
    module(x).sum().backward()
    assert_near(module.alpha.grad, 1 + x[0].square() / 2)


def test_felu_comes_back_from_beyond_its_border():
    module = activation("felu")
    torch.nn.init.constant_(module.alpha, 2.0)
    module(torch.full((1, F), -1.0, dtype=torch.float64)).sum().backward()
    assert (module.alpha.grad != 0).all()


def test_eelu_draws_its_slope_in_training_only():
    module, x = activation("eelu", noise=0.5), torch.ones(1000, F, dtype=torch.float64)
    assert torch.equal(module(x), x)
    slopes = module.train()(x)
    assert slopes.min() >= 0 and slopes.max() <= 2 and 0.3 < slopes.std() < 0.6


@pytest.mark.parametrize("version", "ABCDN")
@pytest.mark.parametrize("target", RAF_TARGETS)
def test_raf_starts_close_to_its_target(version, target):
    x = torch.linspace(-3, 3, 500, dtype=torch.float64)
    numerator, denominator = fitted(version, (5, 4), target)
    error = (rational(x, numerator, denominator, version) - TARGETS[target](x)).abs().max()
    assert error <= (0.07 if "relu" in target else 0.01)


def test_raf_scales_the_channels_of_a_token_and_maps_a_constant_one_to_zero():
    scaled, plain = activation("raf", input_scaling=True), activation("raf")
    x = torch.randn(3, F, dtype=torch.float64) * 50
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    assert_near(scaled(x), plain(6 * (x - low) / (high - low) - 3))
    assert_near(scaled(torch.full((1, F), 7.0).double()), plain(torch.zeros(1, F).double()))


def test_selu_keeps_mean_and_variance_through_eight_plain_blocks():
    for dropout in (0.0, 0.1):
        config = FrankensteinConfig(hidden_size=256, num_attention_heads=2, num_hidden_layers=1, layer_pattern="swa",
                                    hidden_act="selu", feed_forward="plain", intermediate_size=256,
                                    activation_dropout=dropout)  # fmt: skip
        from frankenstein_hf.modeling.feed_forward import PlainFeedForward

        x = torch.randn(4000, 256)
        for _ in range(8):
            block = PlainFeedForward(config, 0)
            block.init_parameters()
            torch.nn.init.zeros_(block.up_proj.bias) if block.up_proj.bias is not None else None
            with torch.no_grad():
                x = block.dropout(block.inner(x))
        assert abs(x.mean()) < 0.1 and abs(x.var() - 1) < 0.1


@pytest.mark.parametrize("name", ["swiglu", "geglu", "reglu"])
def test_gated_forms_are_the_gated_block_with_their_activation(name):
    other = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}[name]
    x = tokens(1, 6)
    assert torch.equal(tiny_model("swa", hidden_act=name)(x).logits, tiny_model("swa", hidden_act=other)(x).logits)
    with pytest.raises(ValueError, match="gated feed-forward"):
        FrankensteinConfig(hidden_act=name, feed_forward="plain")


def test_maxout_with_one_piece_is_linear_and_takes_the_largest_of_more():
    plain = tiny_model("swa", feed_forward="plain", hidden_act="identity")
    one = tiny_model("swa", hidden_act="maxout", feed_forward_params={"pieces": 1})
    assert torch.equal(plain(tokens(1, 6)).logits, one(tokens(1, 6)).logits)
    block = tiny_model("swa", hidden_act="maxout").model.layers[0].mlp
    x = torch.randn(3, 20)
    pieces = (x @ block.up_proj.weight.T).view(3, 2, 24)
    assert_near(block(x)[0], pieces.amax(1) @ block.down_proj.weight.T)


def test_names_of_transformers_fall_through_and_take_no_parameters():
    config = FrankensteinConfig(num_hidden_layers=1, layer_pattern="swa", hidden_act="gelu_new")
    assert type(make_activation(config, 0, 4)) is type(ACT2FN["gelu_new"])
    with pytest.raises(ValueError, match="'gelu_new' has no parameters"):
        FrankensteinConfig(hidden_act="gelu_new", activation_params={"beta": 1.0})


@pytest.mark.parametrize("name", sorted(LEARNED))
def test_learned_activations_train_and_travel(name, tmp_path):
    model = tiny_model("swa", hidden_act=name).train()
    model(tokens(2, 6), labels=tokens(2, 6)).loss.backward()
    assert all(p.grad is not None for p in model.model.layers[0].mlp.act_fn.parameters())
    model.eval().save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(model(tokens(1, 5)).logits, again(tokens(1, 5)).logits)


@pytest.mark.parametrize("name, act, form", [("swiglu", "silu", "gated"), ("maxout", "identity", "maxout")])
def test_the_name_of_a_form_chooses_activation_and_block_and_contradicts_another_block(name, act, form):
    config = tiny_config("swa", hidden_act=name)
    assert (config.hidden_act, config.feed_forward) == (act, form)
    config = tiny_config("swa", feed_forward="plain")
    config.hidden_act = name
    assert (config.hidden_act, config.feed_forward) == (act, form)
    with pytest.raises(ValueError, match=f"hidden_act='{name}' is a {form} .*feed_forward='plain'"):
        tiny_config("swa", hidden_act=name, feed_forward="plain")
