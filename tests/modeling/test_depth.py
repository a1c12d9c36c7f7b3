"""Looped depth: the middle layers run through several times are the same function as an unrolled stack."""

import weakref

import pytest
import torch
from transformers import DynamicCache

from frankenstein_hf import FrankensteinConfig

from ..tiny import tiny_model, tokens

PATTERN = ["standard", "gla", "swa", "gated_deltanet"]
LOOPS = dict(num_loops=3, loop_begin_layers=1, loop_end_layers=1)
UNROLLED = [0, 1, 2, 1, 2, 1, 2, 3]


def looped_and_unrolled(is_causal: bool = True):
    looped = tiny_model(PATTERN, is_causal, **LOOPS)
    unrolled = tiny_model([PATTERN[i] for i in UNROLLED], is_causal)
    weights = looped.state_dict()
    for key in unrolled.state_dict():
        if ".layers." in key:
            head, _, rest = key.partition(".layers.")
            number, _, name = rest.partition(".")
            weights[key] = looped.state_dict()[f"{head}.layers.{UNROLLED[int(number)]}.{name}"]
    unrolled.load_state_dict(weights, strict=False)
    return looped, unrolled


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_loop_is_its_unrolled_twin_and_gradients_add_up(is_causal):
    (looped, unrolled), x = looped_and_unrolled(is_causal), tokens(2, 9)
    assert torch.equal(looped(x).logits, unrolled(x).logits)
    for model in (looped, unrolled):
        model(x, labels=x).loss.backward()
    for name, parameter in looped.model.layers.named_parameters():
        number, _, rest = name.partition(".")
        twins = [f"{i}.{rest}" for i, layer in enumerate(UNROLLED) if layer == int(number)]
        total = sum(unrolled.model.layers.get_parameter(twin).grad for twin in twins)
        torch.testing.assert_close(parameter.grad, total, rtol=1e-4, atol=1e-6)


def test_every_layer_at_work_has_a_cache_layer_of_its_own():
    (looped, unrolled), x = looped_and_unrolled(), tokens(2, 12)
    cache = DynamicCache(config=looped.config)
    assert [layer._layer_type for layer in cache.layers] == unrolled.config.layer_types
    with torch.no_grad():
        parts = [looped(x[:, a:b], cache=cache).logits for a, b in ((0, 7), (7, 8), (8, 12))]
        torch.testing.assert_close(torch.cat(parts, 1), looped(x, use_cache=False).logits, rtol=1e-4, atol=1e-5)


def test_hidden_states_and_an_early_exit_count_layers_at_work():
    (looped, unrolled), x = looped_and_unrolled(), tokens(1, 6)
    ours, theirs = (model(x, output_hidden_states=True).hidden_states for model in (looped, unrolled))
    assert len(ours) == len(UNROLLED) + 1 and all(torch.equal(a, b) for a, b in zip(ours, theirs))
    common = dict(max_new_tokens=8, do_sample=False)
    expected = looped.generate(x, **common)
    assert torch.equal(looped.generate(x, assistant_early_exit=2, **common), expected)


def test_one_round_is_no_loop():
    plain, looped = tiny_model(PATTERN), tiny_model(PATTERN, num_loops=1, loop_begin_layers=1)
    assert torch.equal(plain(tokens(1, 7)).logits, looped(tokens(1, 7)).logits)


def test_hidden_states_are_kept_only_when_asked_for():
    model, outputs, alive = tiny_model(PATTERN), [], []

    def watch(module, inputs, output):
        alive.append(sum(reference() is not None for reference in outputs))
        outputs.append(weakref.ref(output[0]))

    for layer in model.model.layers:
        layer.register_forward_hook(watch)
    with torch.no_grad():
        model(tokens(1, 5))
    assert alive == [0, 1, 1, 1]  # its own input, which the hook still holds
    assert len(model(tokens(1, 5), output_hidden_states=True).hidden_states) == len(PATTERN) + 1


@pytest.mark.parametrize("wrong", [dict(num_loops=0), dict(num_loops=2, loop_begin_layers=2, loop_end_layers=2)])
def test_impossible_loops_are_refused(wrong):
    with pytest.raises(ValueError, match="num_loops"):
        FrankensteinConfig(num_hidden_layers=4, **wrong)
