"""Every norm of the registry against numpy, and what a norm of a model has to put up with."""

import math

import numpy as np
import pytest
import torch

from frankenstein_hf import FrankensteinConfig
from frankenstein_hf.configuration.registries import NORMS
from frankenstein_hf.modeling.norms import make_norm

from ..tiny import assert_near, tiny_model, tokens

D, EPS = 12, 1e-6
ALL = NORMS.names()


def norm(name: str, **params):
    config = FrankensteinConfig(hidden_size=D, num_attention_heads=2, norm=name, norm_params=params)
    module = make_norm(config)
    if hasattr(module, "init_parameters"):
        module.init_parameters()
    for key, parameter in module.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "bias" not in key else 0.0, std=0.3)
    return module


def reference(name: str, w: dict, x: np.ndarray, channels: int) -> np.ndarray:
    gain, bias = w.get("weight", 1.0), w.get("bias", 0.0)
    if name == "layer_norm":
        mean = x.mean(-1, keepdims=True)
        return (x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + EPS) * gain + bias
    if name == "dynamic_tanh":
        return np.tanh(w["alpha"] * x) * gain + bias
    if name == "derf":
        return np.vectorize(math.erf)(w["alpha"] * x + w["shift"]) * gain + bias
    return x / np.sqrt((x[..., :channels] ** 2).mean(-1, keepdims=True) + EPS) * gain


@pytest.mark.parametrize(
    "name, params, channels",
    [
        *((name, {}, D) for name in ALL if name != "prms_norm"),
        ("prms_norm", {"partial_ratio": 0.3}, 4),
        ("flash_norm", {"partial_ratio": 0.5}, 6),
    ],
)
def test_a_norm_is_its_formula(name, params, channels):
    module, x = norm(name, **params).double(), torch.randn(3, 5, D, dtype=torch.float64)
    w = {key: value.detach().numpy() for key, value in module.named_parameters()}
    assert_near(module(x), torch.from_numpy(reference(name, w, x.numpy(), channels)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_statistics_are_exact_and_rows_of_any_size_stay_finite_in_bf16(name):
    module = norm(name)
    x = torch.randn(4, D) * 3
    low = module.to(torch.bfloat16)(x.bfloat16())
    assert low.dtype == torch.bfloat16
    expected = module.float()(x.bfloat16().float())
    assert (low.float() - expected).abs().max() <= 2**-7 * expected.abs().max()
    rows = torch.stack([torch.zeros(D), torch.full((D,), 1e4)]).bfloat16().requires_grad_()
    module = module.to(torch.bfloat16)
    module(rows).float().square().sum().backward()
    assert all(value.isfinite().all() for value in (module(rows), rows.grad, *(p.grad for p in module.parameters())))


@pytest.mark.parametrize("name", ALL)
def test_gradients(name):
    module = norm(name).double()
    assert torch.autograd.gradcheck(module, torch.randn(2, D, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("name", ALL)
def test_a_model_differs_in_the_keys_of_its_norms_only_and_trains_them(name):
    plain, model = tiny_model("standard"), tiny_model("standard", norm=name)
    own = {*plain.state_dict()} ^ {*model.state_dict()}
    assert all("norm" in key for key in own)
    model.train()(tokens(2, 7), labels=tokens(2, 7)).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_prms_norm_sees_its_first_channels_and_with_all_of_them_is_rms_norm():
    module, x = norm("prms_norm", partial_ratio=0.5), torch.randn(2, D)
    changed = x.clone()
    changed[:, 6:] *= 9
    assert torch.equal(module(x)[:, :6], module(changed)[:, :6])
    whole, rms = norm("prms_norm", partial_ratio=1.0), norm("rms_norm")
    rms.load_state_dict(whole.state_dict())
    assert torch.equal(whole(x), rms(x))


def test_flash_norm_learns_exactly_as_rms_norm_with_its_gain_held_at_one():
    x, losses = tokens(4, 9), []
    for name in ("rms_norm", "flash_norm"):
        model = tiny_model(["standard", "swa"], norm=name).train()
        with torch.no_grad():
            for key, p in model.named_parameters():
                if "norm" in key:
                    p.fill_(1.0).requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        trace = []
        for _ in range(5):
            loss = model(x, labels=x).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace.append(loss.item())
        losses.append(trace)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich"])
def test_placements_are_their_formulas(placement):
    model, x = tiny_model("standard", norm_placement=placement), torch.randn(1, 5, 20)
    layer = model.model.layers[0]
    for key, p in layer.named_parameters():
        if "norm" in key:
            torch.nn.init.normal_(p, mean=1.0, std=0.3)
    seen = {}
    layer.mixer.register_forward_pre_hook(lambda m, args: seen.update(input=args[0]))
    layer.mixer.register_forward_hook(lambda m, args, output: seen.update(output=output[0]))
    norms = dict(layer.named_modules())
    identity = torch.nn.Identity()
    assert {key for key in layer.state_dict() if "norm" in key} == {
        "pre": {"input_layernorm.weight", "post_mixer_layernorm.weight"},
        "post": {"mixer_output_layernorm.weight", "mlp_output_layernorm.weight"},
        "sandwich": {
            "input_layernorm.weight", "post_mixer_layernorm.weight",
            "mixer_output_layernorm.weight", "mlp_output_layernorm.weight",
        },
    }[placement]  # fmt: skip
    output = model.model(inputs_embeds=x, output_hidden_states=True)
    first, norm_in = x, norms["input_layernorm"] if placement != "post" else identity
    assert_near(seen["input"], norm_in(first))
    out = norms["mixer_output_layernorm"] if placement != "pre" else identity
    middle = first + out(seen["output"])
    inner = norms["post_mixer_layernorm"] if placement != "post" else identity
    behind = norms["mlp_output_layernorm"] if placement != "pre" else identity
    expected = middle + behind(layer.mlp(inner(middle))[0])
    assert_near(output.last_hidden_state, model.model.norm(expected))
