"""What a window costs follows from the tokens seen, not from the window asked for."""

import pytest
import torch
from transformers import DynamicCache

from frankenstein_hf.configuration.registries import MIXERS
from frankenstein_hf.modeling.cache import cache_num_bytes

from ..tiny import assert_near, tiny_model, tokens

# every mixer with a parameter that says how far it sees or how much it keeps
WINDOWED = {
    spec.name: key
    for spec in MIXERS
    for key in ("window_size", "window", "attention_window", "block_size", "chunk_size")
    if key in spec.params.types()
}


def huge(name: str, size: int = 10**6):
    """A model whose window is `size`, or the largest there is."""
    key = WINDOWED[name]
    field = MIXERS.get(name).params.__dataclass_fields__[key]
    size = min(size, field.metadata.get("maximum", size))
    params = {**MIXERS.get(name).small_params, key: size}
    params = {k: v for k, v in params.items() if k == key or k not in ("num_sinks",)}
    return tiny_model(name, MIXERS.get(name).causal, mixer_params={name: params})


@pytest.mark.parametrize("name", sorted(name for name in WINDOWED if MIXERS.get(name).causal))
def test_a_huge_window_costs_what_the_tokens_need(name):
    model, x = huge(name), tokens(1, 9)
    with torch.no_grad():
        expected = model(x, use_cache=False).logits
        cache = DynamicCache(config=model.config)
        assert_near(model(x[:, :6], cache=cache).logits, expected[:, :6])
        assert_near(model(x[:, 6:], cache=cache).logits, expected[:, 6:])
    assert cache_num_bytes(cache) < 100_000


@pytest.mark.parametrize("num_sinks", [0, 3, 900_000])
def test_a_huge_window_is_full_attention_in_a_static_cache_too(num_sinks):
    params = {"swa": {"window_size": 10**6, "num_sinks": num_sinks}}
    model, x = tiny_model(["swa", "swa"], mixer_params=params), tokens(2, 7)
    how = dict(max_new_tokens=5, do_sample=False, pad_token_id=0)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    expected = model.generate(x, attention_mask=mask, use_cache=False, **how)
    for cache in ({}, {"cache_implementation": "static"}):
        assert torch.equal(model.generate(x, attention_mask=mask, **cache, **how), expected)
