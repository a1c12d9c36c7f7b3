"""`cache_report` says what the caches really hold."""

import pytest
import torch
from transformers import DynamicCache

import frankenstein_hf as fhf
from frankenstein_hf.configuration.registries import MIXERS

from .tiny import CAUSAL, tiny_config, tiny_model, tokens


def floats_held(layer) -> int:
    tensors = [*getattr(layer, "streams", {}).values(), *getattr(layer, "states", {}).values()]
    tensors += [x for x in (getattr(layer, "keys", None), getattr(layer, "values", None)) if x is not None]
    held = sum(x.numel() for x in tensors if x.is_floating_point())
    return held + (floats_held(layer.tail) if hasattr(layer, "tail") else 0)


@pytest.mark.parametrize("name", sorted(CAUSAL))
def test_totals_are_what_the_cache_of_a_sequence_holds(name):
    model, length = tiny_model([name, "standard"]), 40
    report = fhf.cache_report(model, length, quiet=True)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(1, length), cache=cache)
    assert [layer.mixer for layer in report.layers] == [name, "standard"]
    held = [floats_held(layer) for layer in cache.layers]
    if name in ("nsa", "lsa"):  # a token's share of what a complete block brings; the last block is not complete
        assert 0 <= report.layers[0].total(length) - held[0] < 0.1 * held[0]
        held[0] = report.layers[0].total(length)
    assert [layer.total(length) for layer in report.layers] == held
    assert report.layers[1].per_token == report.layers[1].standard == 2 * 10


def test_the_table_shows_every_layer_beside_standard_attention_and_the_sum(capsys):
    config = tiny_config(["mla", "standard"], mixer_params={"mla": {"latent_rank": 6, "rope_head_dim": 4}})
    report = fhf.cache_report(config, 100)
    printed = capsys.readouterr().out
    assert printed == f"{report}\n"
    header, mla, standard, total = printed.splitlines()
    assert "/ standard" in header and "bytes a token" in header
    assert mla.split() == ["0", "mla", "0", "10", "40", "1,000", "4,000", "0.5"]
    assert standard.split() == ["1", "standard", "0", "20", "80", "2,000", "8,000", "1"]
    assert total.split() == ["all", "0", "30", "120", "3,000", "12,000", "0.75"]
    half = tiny_model("mla").to(torch.bfloat16)
    assert fhf.cache_report(half, 10, quiet=True).bytes_per_float == 2


def test_looped_layers_count_each_time_they_work():
    config = tiny_config(["gla", "standard"], num_loops=3)
    assert [layer.layer for layer in fhf.cache_report(config, 5, quiet=True).layers] == [0, 1] * 3


def test_what_has_no_cache_is_refused():
    with pytest.raises(ValueError, match="it is bidirectional"):
        fhf.cache_report(tiny_model("standard", is_causal=False), 10)
    (encoder,) = [spec.name for spec in MIXERS if not spec.causal][:1]
    with pytest.raises(ValueError, match=f"{encoder} cannot be causal"):
        fhf.cache_report(tiny_config(encoder), 10)
    with pytest.raises(ValueError, match="length=0 must be a number of tokens"):
        fhf.cache_report(tiny_config("standard"), 0)
    with pytest.raises(ValueError, match="takes a model of this family"):
        fhf.cache_report(torch.nn.Linear(2, 2), 10)
