"""The four mechanisms of the study as named configurations."""

import pytest
import torch

import frankenstein_hf as fhf

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}


def seen_by_the_middle(config):
    torch.manual_seed(0)
    model = fhf.FrankensteinForMaskedLM(config).eval()
    embeds = torch.randn(1, 21, 16, requires_grad=True)
    model(inputs_embeds=embeds).logits[0, 10].sum().backward()
    return embeds.grad[0].abs().amax(-1).nonzero().flatten().tolist()


def test_mechanisms_have_the_reach_of_the_study():
    reach = {name: seen_by_the_middle(fhf.mechanism_config(name, num_hidden_layers=2, **SIZES)) for name in
             ("SA", "SW", "SC", "MIX")}  # fmt: skip
    assert reach["SW"] == reach["SC"] == list(range(6, 15))  # two layers of two neighbours a side
    assert reach["SA"] == reach["MIX"] == list(range(21))


def test_mix_has_attention_first_and_consensus_after():
    config = fhf.mechanism_config("mix", num_hidden_layers=5, **SIZES)
    assert config.layer_pattern == ["standard", "standard", *["self_consensus"] * 3]
    params = config.params_for(4)
    assert (params.window_size, params.rank, params.edge_hidden_size) == (2, 4, 256)


def test_parameters_of_ones_own_win_over_the_studys():
    config = fhf.mechanism_config("SC", mixer_params={"self_consensus": {"rank": 1}}, num_hidden_layers=1, **SIZES)
    assert (config.params_for(0).rank, config.params_for(0).edge_hidden_size) == (1, 256)


def test_what_is_no_mechanism_is_refused():
    assert fhf.list_mechanisms() == ["SA", "SW", "SC", "MIX"]
    with pytest.raises(ValueError, match="Unknown mechanism 'SX'"):
        fhf.mechanism_config("SX")
    with pytest.raises(ValueError, match="leave yours out"):
        fhf.mechanism_config("SA", layer_pattern=["swa"])
    with pytest.raises(ValueError, match="at least 2 layers"):
        fhf.mechanism_config("MIX", num_hidden_layers=1)
