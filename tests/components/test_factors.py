"""Constant factors: on embeddings, on attention scores, on logits, and the bound on logits."""

import pytest
import torch

import frankenstein_hf as fhf
from frankenstein_hf.configuration.registries import MIXERS

from ..tiny import assert_near, tiny_config, tiny_model, tokens

TAKING = [spec.name for spec in MIXERS if spec.qk_norm and spec.causal]


@pytest.mark.parametrize("name", TAKING)
def test_a_scale_of_scores_is_a_scale_of_queries(name):
    model, scaled, x = tiny_model(name), tiny_model(name, attention_scale=0.9), tokens(2, 17)
    assert scaled.state_dict().keys() == model.state_dict().keys()
    with torch.no_grad():
        assert not torch.allclose(scaled(x).logits, model(x).logits, atol=1e-3)
        mixer = model.model.layers[0].mixer
        for parameter in mixer.q_proj.parameters():
            parameter.mul_(0.9 * model.config.head_dim**0.5)
        assert_near(scaled(x).logits, model(x).logits, rtol=1e-3, atol=1e-4)
        usual = tiny_model(name, attention_scale=model.config.head_dim**-0.5)
        assert_near(usual(x).logits, tiny_model(name)(x).logits)


@pytest.mark.parametrize("is_causal", [True, False])
def test_factors_on_embeddings_and_logits(is_causal):
    options = dict(embedding_scale=3.0, logits_scaling=5.0, logit_softcap=2.0, tie_word_embeddings=False)
    model, plain, x = tiny_model("standard", is_causal, **options), tiny_model("standard", is_causal), tokens(2, 9)
    plain = tiny_model("standard", is_causal, tie_word_embeddings=False)
    embedded = plain.model.embed_tokens(x)
    with torch.no_grad():
        expected = 2.0 * (plain(inputs_embeds=3.0 * embedded).logits / 5.0 / 2.0).tanh()
        assert_near(model(x).logits, expected)
        assert_near(model(inputs_embeds=embedded).logits, expected)


def test_a_scale_no_mixer_takes_is_refused():
    with pytest.raises(ValueError, match=r"attention_scale=0.5 can do nothing.*standard"):
        tiny_config("gla", attention_scale=0.5)
    with pytest.raises(ValueError, match="logits_scaling"):
        fhf.FrankensteinConfig(logits_scaling=0.0)
