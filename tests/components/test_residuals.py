"""Residual schemes: their formulas from the papers, the identities that tie them together, decoding and training."""

import math

import numpy as np
import pytest
import torch
from transformers import DynamicCache
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead

from frankenstein_hf import FrankensteinConfig
from frankenstein_hf.configuration.registries import RESIDUALS
from frankenstein_hf.modeling.hyper_connections import GatedCollapse, HyperConnection, sinkhorn

from ..tiny import assert_near, tiny_model, tokens

PATTERN = ["standard", "gated_deltanet", "swa"]
LOOPS = dict(num_loops=2, loop_begin_layers=1)
# every scheme, and every form it has
FORMS = [
    ("none", {}, {}),
    ("standard", {"multiplier": 0.3}, {}),
    ("parallel", {}, {}),
    ("parallel", {"multiplier": -2.0}, LOOPS),
    ("full_attn", {}, {}),
    ("full_attn", {"granularity": "layer", "init_query_zero": False}, {}),
    ("full_attn", {"use_rmsnorm_keys": False}, LOOPS),
    ("block_attn", {"num_blocks": 2}, {}),
    ("block_attn", {"granularity": "layer", "num_blocks": 2}, LOOPS),
    ("mhc", {}, {}),
    ("mhc", {"expansion_rate": 2, "expand": "linear", "collapse": "linear"}, LOOPS),
    ("mhc", {"expansion_rate": 3, "collapse": "gated"}, {}),
    ("hyperloop", {}, LOOPS),
    ("hyperloop", {"res_parameterization": "sinkhorn"}, LOOPS),
    ("hyperloop", {"res_parameterization": "identity", "expansion_rate": 2}, LOOPS),
]


def model_with(residual: str, params: dict, changes: dict, is_causal: bool = True, random: bool = True):
    model = tiny_model(PATTERN, is_causal, residual=residual, residual_params=params, **changes)
    if random:
        for name, p in model.named_parameters():
            if "connection" in name or ".residual." in name:
                torch.nn.init.normal_(p, std=0.5)
    return model


def test_every_scheme_is_tested_here():
    assert {name for name, _, _ in FORMS} == {*RESIDUALS.names()}


@pytest.mark.parametrize("residual, params, changes", FORMS)
def test_decoding_causality_and_packing_hold_under_every_scheme(residual, params, changes):
    model, x = model_with(residual, params, changes), tokens(2, 11)
    with torch.no_grad():
        expected = model(x, use_cache=False).logits
        cache = DynamicCache(config=model.config)
        parts = [model(x[:, a:b], cache=cache).logits for a, b in ((0, 6), (6, 7), (7, 11))]
        assert_near(torch.cat(parts, 1), expected, rtol=1e-3, atol=1e-4)
        changed = x.clone()
        changed[:, 7] = 3 + (x[:, 7] - 2) % 50
        assert torch.equal(model(changed).logits[:, :7], expected[:, :7])
        packed = model(torch.cat([x[:1], x[1:]], 1), position_ids=torch.arange(11).repeat(2)[None]).logits
        assert_near(packed, torch.cat([expected[:1], expected[1:]], 1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("residual, params, changes", FORMS)
def test_every_weight_learns_also_under_checkpointing(residual, params, changes):
    model, x = model_with(residual, params, changes).train(), tokens(2, 8)
    model(x, labels=x).loss.backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    first = "model.layers.0.mixer_connection.query"  # it chooses from one source
    assert all(gradient.abs().sum() > 0 for name, gradient in plain.items() if name != first)
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(x, labels=x).loss.backward()
    for name, p in model.named_parameters():
        assert_near(p.grad, plain[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("residual, params, changes", FORMS)
def test_saving_and_loading(residual, params, changes, tmp_path):
    model, x = model_with(residual, params, changes, is_causal=False), tokens(2, 7)
    model.save_pretrained(tmp_path)
    assert torch.equal(type(model).from_pretrained(tmp_path)(x).logits, model(x).logits)


def test_reentrant_checkpointing_of_several_tensors_is_refused():
    model = model_with("full_attn", {}, {}).train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="use_reentrant"):
        model(tokens(1, 5))


def small(residual: str, params: dict | None = None, **changes):
    """In fp64, with norms whose epsilon does not show."""
    return tiny_model(PATTERN, residual=residual, residual_params=params, rms_norm_eps=1e-12, **changes).double()


@pytest.mark.parametrize("residual, params", [("full_attn", {}), ("block_attn", {"num_blocks": 2}), ("block_attn", {})])
@pytest.mark.parametrize("granularity", ["sublayer", "layer"])
def test_attention_with_equal_weights_is_the_standard_residual(residual, params, granularity):
    """The mean of all changes differs from their sum by a factor that every norm removes."""
    if granularity == "layer":
        pytest.skip("within a layer the mixture and the change are added: no common factor")
    model = small(residual, {**params, "granularity": granularity})
    standard = small("standard")
    standard.load_state_dict(model.state_dict(), strict=False)
    x = tokens(2, 9)
    assert_near(model(x).logits, standard(x).logits, rtol=1e-8, atol=1e-9)


def test_as_many_blocks_as_changes_are_full_attention_bit_for_bit():
    full = model_with("full_attn", {}, {})
    block = model_with("block_attn", {"num_blocks": 6}, {})
    block.load_state_dict(full.state_dict())
    assert torch.equal(full(tokens(2, 9)).logits, block(tokens(2, 9)).logits)


def test_full_attention_is_its_formula():
    model = model_with("full_attn", {}, {}).double()
    seen = []
    for layer in model.model.layers:
        layer.mixer.register_forward_hook(lambda m, i, o: seen.append(o[0].detach().numpy()))
        layer.mlp.register_forward_hook(lambda m, i, o: seen.append(o[0].detach().numpy()))
    inputs = []
    for layer in model.model.layers:
        layer.input_layernorm.register_forward_pre_hook(lambda m, i: inputs.append(i[0].detach().numpy()))
        layer.post_mixer_layernorm.register_forward_pre_hook(lambda m, i: inputs.append(i[0].detach().numpy()))
    x = tokens(1, 6)
    model.model(x)
    sources = [model.model.embed_tokens(x).detach().numpy(), *seen]
    sites = [(layer, site) for layer in model.model.layers for site in ("mixer_connection", "mlp_connection")]
    for number, (layer, site) in enumerate(sites):
        w = getattr(layer, site).query[0].detach().numpy()
        v = np.stack(sources[: number + 1])
        scores = (v / np.sqrt((v**2).mean(-1, keepdims=True) + 1e-6)) @ w
        weights = np.exp(scores - scores.max(0))
        weights /= weights.sum(0)
        assert_near(torch.from_numpy(inputs[number]), torch.from_numpy((weights[..., None] * v).sum(0)), 1e-8, 1e-9)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_hyper_connections_at_their_neutral_point_are_the_standard_residual(n):
    model = small("mhc", {"expansion_rate": n})
    for name, p in model.named_parameters():
        if name.endswith("connection.alpha"):
            torch.nn.init.zeros_(p)
    standard = small("standard")
    standard.load_state_dict(model.state_dict(), strict=False)
    x = tokens(2, 9)
    assert_near(model(x).logits, standard(x).logits, rtol=1e-10, atol=1e-10)


def test_the_start_is_near_the_neutral_point_and_streams_part():
    model, x = tiny_model(PATTERN, residual="mhc").train(), tokens(2, 9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x, labels=x).loss.backward()
        optimizer.step()
    streams = []
    model.model.residual.leave, leave = (
        lambda stream: (streams.append(stream), leave(stream))[1],
        model.model.residual.leave,
    )
    model(x)
    assert (streams[0][..., 0, :] - streams[0][..., 1, :]).abs().max() > 1e-6


def deepseek(n: int, D: int):
    return DeepseekV4Config(hidden_size=D, hc_mult=n, hc_eps=0.0, hc_sinkhorn_iters=6, rms_norm_eps=1e-6)


def test_a_site_equals_transformers_deepseek_v4():
    n, D = 4, 20
    config = FrankensteinConfig(hidden_size=D, num_attention_heads=2, num_hidden_layers=1, layer_pattern="swa",
                                residual="mhc", residual_params={"sinkhorn_iters": 60})  # fmt: skip
    ours, theirs = HyperConnection(config, 0, "mixer"), DeepseekV4HyperConnection(deepseek(n, D))
    theirs.hc_sinkhorn_iters = 60
    for p in ours.parameters():
        torch.nn.init.normal_(p, std=0.5)
    with torch.no_grad():
        theirs.fn.copy_(ours.proj.weight)
        theirs.base.copy_(ours.bias)
        theirs.scale.copy_(ours.alpha)
    x, change = torch.randn(2, 3, n, D), torch.randn(2, 3, D)
    post, comb, collapsed = theirs(x)
    h, carry = ours.read(x, 0)
    assert_near(h, collapsed)
    # at convergence it does not matter whether rows or columns came last, nor that theirs is applied transposed
    expected = post[..., None] * change[..., None, :] + comb @ x
    assert_near(ours.write(x, carry, change, 0), expected, rtol=1e-3, atol=1e-3)


def test_the_gated_collapse_equals_transformers_deepseek_v4():
    n, D = 3, 20
    config = FrankensteinConfig(hidden_size=D, num_attention_heads=2, num_hidden_layers=1, layer_pattern="swa")
    ours, theirs = GatedCollapse(config, n), DeepseekV4HyperHead(deepseek(n, D))
    for p in ours.parameters():
        torch.nn.init.normal_(p, std=0.5)
    with torch.no_grad():
        theirs.hc_fn.copy_(ours.proj.weight)
        theirs.hc_base.copy_(ours.bias)
        theirs.hc_scale.copy_(ours.alpha)
    x = torch.randn(2, 5, n, D)
    assert_near(ours(x), theirs(x))


def test_sinkhorn_rows_are_convex_and_columns_nearly_and_large_logits_stay_finite():
    matrix = sinkhorn(torch.randn(50, 4, 4), 20)
    assert_near(matrix.sum(-1), torch.ones(50, 4), 1e-6, 1e-6)
    assert (matrix.sum(-2) - 1).abs().max() < 1e-3 and (matrix >= 0).all()
    assert sinkhorn(torch.tensor([[[200.0, -200.0], [100.0, 0.0]]]), 20).isfinite().all()


def test_a_hyperloop_that_carries_and_gates_nothing_is_the_plain_loop():
    loops = dict(num_loops=3, loop_begin_layers=1)
    model = small("hyperloop", **loops)
    for name, p in model.named_parameters():
        if ".residual.loops." in name:
            if name.endswith("alpha"):
                torch.nn.init.zeros_(p)
            if name.endswith("bias"):
                with torch.no_grad():  # exactly, where the first values are those of fp32
                    p[:4] = -math.log(torch.tensor(3.0, dtype=torch.float64))
                    p[8:] = -60.0
    plain = small("standard", **loops)
    plain.load_state_dict(model.state_dict(), strict=False)
    x = tokens(2, 9)
    assert_near(model(x).logits, plain(x).logits, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "values, message",
    [
        (dict(residual="hyperloop"), "num_loops=1 must be at least 2"),
        (dict(residual="block_attn", residual_params={"num_blocks": 99}), "num_blocks=99 must be at most"),
        (dict(residual="mch"), "did you mean 'mhc'"),
        (dict(residual_params={"num_blocks": 2}), "'standard' has no parameter 'num_blocks'"),
    ],
)
def test_bad_input(values, message):
    with pytest.raises(ValueError, match=message):
        FrankensteinConfig(num_hidden_layers=4, **values)
