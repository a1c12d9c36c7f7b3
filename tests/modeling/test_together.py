"""One model that holds every registered mixer at once, and everything `generate()` can be asked for."""

import pytest
import torch
from transformers import DynamicCache

from frankenstein_hf.configuration.registries import MIXERS

from ..contract.test_contract import PADDINGS, other_token, packing_arguments
from ..tiny import CAUSAL, assert_near, tiny_model, tokens

PATTERN = sorted(CAUSAL)
LENGTHS = (5, 1, 20, 2)


@pytest.fixture(scope="module")
def model():
    return tiny_model(PATTERN, initializer_range=0.15)


def test_it_holds_every_causal_mixer(model):
    assert {layer.mixer.params.__class__ for layer in model.model.layers} == {
        MIXERS.get(name).params for name in CAUSAL
    }


def test_causality_padding_and_packing_hold_through_all_layers(model):
    x = tokens(1, 28)
    with torch.no_grad():
        expected = model(x).logits
        assert torch.equal(model(other_token(x, 17)).logits[:, :17], expected[:, :17])
        for padding in PADDINGS.values():
            mask = torch.tensor([padding])
            padded = tokens(1, 12, seed=3)
            padded[mask.bool()] = x[0, :9]
            assert_near(model(padded, attention_mask=mask).logits[mask.bool()], expected[0, :9], rtol=1e-3, atol=1e-4)
        documents = x.split(LENGTHS, dim=1)
        separate = torch.cat([model(document).logits for document in documents], dim=1)
        for convention in ("position_ids", "seq_idx", "cu_seq_lens_q"):
            packed = model(x, **packing_arguments(convention)).logits
            assert_near(packed, separate, rtol=1e-3, atol=1e-4)


LEFT = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])


@pytest.mark.parametrize(
    "how",
    [
        dict(do_sample=False),
        dict(do_sample=True, top_k=20),
        dict(do_sample=True, num_return_sequences=3),
        dict(num_beams=3, do_sample=False),
        dict(num_beams=2, num_return_sequences=2, do_sample=True),
    ],
    ids=str,
)
def test_generate_with_cache_equals_without(model, how):
    outputs = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        arguments = dict(attention_mask=LEFT, max_new_tokens=9, min_new_tokens=9, pad_token_id=0)
        outputs.append(model.generate(tokens(2, 7), use_cache=use_cache, **arguments, **how))
    assert torch.equal(*outputs)


def test_every_way_to_decode_greedily_gives_the_same_tokens(model):
    x = tokens(1, 4).repeat(1, 3)
    common = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False)
    expected = model.generate(x, use_cache=False, **common)
    ways = {
        "prompt lookup": dict(prompt_lookup_num_tokens=3),
        "self-assisted": dict(assistant_model=model),
        "assisted": dict(assistant_model=tiny_model(["gla", "swa"], seed=4)),
        "chunked prefill": dict(prefill_chunk_size=5),
        "static cache": dict(cache_implementation="static"),
    }
    for way, arguments in ways.items():
        assert torch.equal(model.generate(x, **common, **arguments), expected), way


def test_generation_continues_from_a_cache(model):
    x = tokens(2, 8)
    common = dict(do_sample=False, pad_token_id=0)
    whole = model.generate(x, max_new_tokens=10, min_new_tokens=10, **common)
    first = model.generate(x, max_new_tokens=4, min_new_tokens=4, return_dict_in_generate=True, **common)
    again = model.generate(first.sequences, cache=first.cache, max_new_tokens=6, min_new_tokens=6, **common)
    assert torch.equal(again, whole)


def test_rows_that_finish_early_do_not_disturb_the_others(model):
    x = tokens(3, 6)
    free = model.generate(x, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0)
    eos = free[0, 8].item()
    stopped = model.generate(x, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=eos)
    for row, full in zip(stopped, free):
        end = next((i for i in range(6, 14) if full[i] == eos), 13)
        assert torch.equal(row[: end + 1], full[: end + 1])


def test_generate_from_a_model_in_training_mode_uses_the_cache_too(model):
    x = tokens(1, 6)
    expected = model.generate(x, max_new_tokens=4, do_sample=False)
    try:
        assert torch.equal(model.train().generate(x, max_new_tokens=4, do_sample=False), expected)
    finally:
        model.eval()


def test_each_layer_reports_its_own_length_and_bytes(model):
    cache = DynamicCache(config=model.config)
    model(tokens(2, 7), attention_mask=LEFT, cache=cache)
    assert {layer.get_seq_length() for layer in cache.layers} == {7}
    assert all(layer.num_real.tolist() == [5, 7] for layer in cache.layers)
    assert all(layer.num_bytes() > 0 for layer in cache.layers)
    cache.reset()
    assert {layer.get_seq_length() for layer in cache.layers} == {0}
    assert_near(model(tokens(2, 7), cache=cache).logits, model(tokens(2, 7)).logits)
