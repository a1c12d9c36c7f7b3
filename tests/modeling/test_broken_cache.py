"""A call takes effect in all layers of a cache, or the cache says that it is broken."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

from ..tiny import CAUSAL, tiny_model, tokens

X = tokens(2, 9)


class Interrupted(Exception):
    pass


def interrupt(*args, **kwargs):
    raise Interrupted


def prefilled(model, kind):
    cache = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=16)
    model(X[:, :6], cache=cache)
    return cache


def interrupted_call(model, module, cache):
    """One token, during which `module` raises."""
    hook = module.register_forward_pre_hook(interrupt)
    with pytest.raises(Interrupted):
        model(X[:, 6:7], cache=cache)
    hook.remove()


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", sorted(CAUSAL))
@torch.no_grad()
def test_a_call_that_raised_after_a_layer_has_counted_breaks_the_cache(name, kind):
    model = tiny_model(name)
    expected = model(X).logits[:, -1]
    # in a model of one layer all lengths agree, and only the mark tells
    for module in (model.model.layers[0].mlp, model.lm_head):
        cache = prefilled(model, kind)
        interrupted_call(model, module, cache)
        for broken in (cache, copy.deepcopy(cache)):
            with pytest.raises(ValueError, match=r"no longer that of any sequence.*cache\.reset\(\)"):
                model(X[:, 7:8], cache=broken)
        cache.reset()
        model(X[:, :8], cache=cache)
        torch.testing.assert_close(model(X[:, 8:], cache=cache).logits[:, -1], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.no_grad()
def test_a_call_that_raised_earlier_leaves_the_cache_as_it_was(kind):
    model = tiny_model(["gated_deltanet", "swa", "standard"])
    expected = model(X).logits[:, 6]
    cache = prefilled(model, kind)
    interrupted_call(model, model.model.embed_tokens, cache)
    interrupted_call(model, model.model.layers[0].mixer, cache)
    for wrong in (torch.ones(2, 3), torch.ones(2, 7).index_fill(1, torch.tensor([0]), 0)):
        with pytest.raises(ValueError, match="attention_mask"):
            model(X[:, 6:7], cache=cache, attention_mask=wrong)
    torch.testing.assert_close(model(X[:, 6:7], cache=cache).logits[:, 0], expected, rtol=1e-4, atol=1e-5)
    interrupted_call(model, model.model.layers[1].mixer, cache)
    with pytest.raises(ValueError, match="no longer that of any sequence"):
        model(X[:, 6:7], cache=cache)
