"""What a configuration says of itself is what the model has."""

import pytest
import torch

import frankenstein_hf as fhf
from frankenstein_hf.configuration.registries import MIXERS
from frankenstein_hf.modeling.census import ranges

from .tiny import tiny_config, tiny_model


def test_every_parameter_counts_once():
    model = tiny_model(["gla", "standard", "gla"], tie_word_embeddings=True, residual="mhc")
    census = fhf.parameter_census(model)
    assert census.parameters == census.active == sum(p.numel() for p in model.parameters())
    found = {part.name: part.parameters for part in census.parts}
    layers = model.model.layers
    gla = sum(p.numel() for layer in (layers[0], layers[2]) for p in layer.mixer.parameters())
    assert found["mixers: gla"] == gla
    assert found["mixers: standard"] == sum(p.numel() for p in layers[1].mixer.parameters())
    assert found["embeddings"] == model.model.embed_tokens.weight.numel()
    assert found["feed-forward"] == sum(p.numel() for layer in layers for p in layer.mlp.parameters())
    assert found["residual"] > 0 and found["norms"] > 0 and not {"head", "other"} & set(found)


def test_heads_count_apart_and_models_without_a_head_have_none():
    config = tiny_config("standard", tie_word_embeddings=False)
    model = fhf.FrankensteinForCausalLM(config)
    found = {part.name: part.parameters for part in fhf.parameter_census(model).parts}
    assert found["head"] == sum(p.numel() for p in model.lm_head.parameters())
    assert "head" not in [part.name for part in fhf.parameter_census(fhf.FrankensteinModel(config)).parts]


def test_what_a_token_does_not_use_is_not_active():
    model = tiny_model("standard")
    model.model.layers[0].mlp.idle_parameters = 7
    census = fhf.parameter_census(model)
    assert census.parameters - census.active == 7
    (part,) = [part for part in census.parts if part.name == "feed-forward"]
    assert part.parameters - part.active == 7


def test_the_table_adds_up():
    lines = str(fhf.parameter_census(tiny_model("mamba"))).splitlines()
    assert lines[0].split() == ["part", "parameters", "active", "per", "token", "share"]
    numbers = [int(line.replace("mixers: ", "").split()[1].replace(",", "")) for line in lines[1:]]
    assert sum(numbers[:-1]) == numbers[-1] and lines[-1].endswith("100.0%")


@pytest.mark.parametrize("name", sorted(MIXERS.names()))
def test_a_configuration_describes_itself(name):
    config = tiny_config(name, is_causal=MIXERS.get(name).causal)
    words = config.describe(100)
    assert f": {name}\n" in words and f"norm {config.norm}" in words
    with torch.device("meta"):
        model = (fhf.FrankensteinForCausalLM if config.is_causal else fhf.FrankensteinForMaskedLM)(config)
    assert f"parameters: {sum(p.numel() for p in model.parameters()):,} " in words
    if config.is_causal:
        report = fhf.cache_report(config, 100, quiet=True)
        assert f"{report.floats:,} floats, {report.floats * 4:,} bytes" in words


def test_layers_that_differ_are_told_apart():
    config = tiny_config(
        ["gla", "standard"], num_hidden_layers=4, num_loops=2, per_layer_config={3: {"hidden_act": "relu"}}
    )
    words = config.describe()
    assert "layers 0, 2: gla" in words and "layers 1, 3: standard" in words and "layers 0–3 work 2 times" in words
    assert "relu (layers 3)" in words


def test_ranges():
    assert [ranges([0]), ranges([0, 1, 2, 5]), ranges([1, 3, 4])] == ["0", "0–2, 5", "1, 3–4"]


def test_bad_input():
    with pytest.raises(ValueError, match="length=0 must be a number of tokens"):
        tiny_config("gla").describe(0)
    with pytest.raises(ValueError, match="takes a model of this family, got Linear"):
        fhf.parameter_census(torch.nn.Linear(2, 2))
