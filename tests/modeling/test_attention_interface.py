"""Parameter-free mixers inside other people's models, and mixers named as `attn_implementation` of ours."""

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import frankenstein_hf as fhf
from frankenstein_hf.configuration.registries import MIXERS

from ..tiny import assert_near, tiny_config, tiny_model, tokens

PARAMETER_FREE = sorted(
    spec.name
    for spec in MIXERS
    if f"frankenstein_{spec.name}" in AttentionInterface._global_mapping and spec.name != "lsa"  # refuses rotated keys
)


def llama(attn_implementation: str, mixer_params: dict) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=61, hidden_size=20, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=10, rms_norm_eps=1e-6, tie_word_embeddings=True, eos_token_id=None,
        attn_implementation=attn_implementation,
    )  # fmt: skip
    config.mixer_params = mixer_params
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("name", PARAMETER_FREE)
def test_a_llama_with_our_attention_equals_our_model_with_its_weights(name):
    params = dict(MIXERS.get(name).small_params)
    if name == "gqa":
        params = {"num_key_value_heads": 1}
    ours = tiny_model([name, name], mixer_params={name: params})
    theirs = llama(f"frankenstein_{name}", {name: params})
    weights = {
        key.replace(".mixer.", ".self_attn.").replace("post_mixer_layernorm", "post_attention_layernorm"): value
        for key, value in ours.state_dict().items()
    }
    theirs.load_state_dict(weights)
    x = tokens(2, 17)
    mask = torch.ones(2, 17, dtype=torch.long)
    mask[0, :4] = 0
    for arguments in ({}, {"attention_mask": mask}):
        keep = arguments.get("attention_mask", torch.ones_like(mask)).bool()
        assert_near(theirs(x, **arguments).logits[keep], ours(x, **arguments).logits[keep])
        generated = [
            model.generate(x, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0, **arguments)
            for model in (ours, theirs)
        ]
        assert torch.equal(*generated)
        static = theirs.generate(
            x, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0, cache_implementation="static",
            **arguments,
        )  # fmt: skip
        assert torch.equal(static, generated[0])
    positions = torch.tensor([[*range(10), *range(7)]]).repeat(2, 1)
    packed = theirs(x, position_ids=positions, use_cache=False)  # with a cache transformers does not look for documents
    assert_near(packed.logits, ours(x, position_ids=positions).logits)


def test_an_encoder_looks_to_both_sides_and_to_the_sinks():
    config = BertConfig(
        vocab_size=61, hidden_size=20, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        attn_implementation="frankenstein_swa", hidden_dropout_prob=0.0,
    )  # fmt: skip
    config.mixer_params = {"swa": {"window_size": 6, "num_sinks": 2}}
    model = BertModel(config).eval()
    embeds = torch.randn(1, 15, 20, requires_grad=True)
    model(inputs_embeds=embeds).last_hidden_state[0, 8].sum().backward()
    seen = embeds.grad.abs().sum(-1)[0].nonzero().flatten().tolist()
    assert seen == [0, 1, 6, 7, 8, 9, 10]


def test_a_mixer_name_as_attn_implementation_is_the_pattern():
    config = tiny_config("standard")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="gla")
    assert model.config.layer_pattern == ["gla"] and model.config._attn_implementation == "sdpa"
    assert model.model.config.layer_pattern == ["gla"]
    assert config.layer_pattern == ["standard"]


def test_a_mixer_name_reinterprets_weights_that_match_and_refuses_others(tmp_path):
    model, x = tiny_model("standard"), tokens(1, 20)
    model.save_pretrained(tmp_path, save_code=False)
    windowed = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="swa")
    assert windowed.config.layer_pattern == ["swa"]
    assert_near(windowed(x).logits, model(x).logits)  # 20 tokens are within the window
    with pytest.raises(ValueError, match=r"layers\.0\.mixer\.decay_down_proj\.weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="gla")


def test_an_unknown_backend_names_the_nearest_mixer_and_a_built_model_keeps_its_mixers():
    with pytest.raises(ValueError, match="did you mean 'gated_deltanet'"):
        AutoModelForCausalLM.from_config(tiny_config("standard"), attn_implementation="gated_deltanett")
    model = tiny_model("standard")
    with pytest.raises(ValueError, match="chosen when a model is built"):
        model.set_attn_implementation("gla")
    model.set_attn_implementation("eager")
    assert model.model.config._attn_implementation == "eager"


def test_our_names_are_not_offered_to_other_models():
    with pytest.raises(ValueError):
        llama("gla", {})


def test_flex_attention_agrees_with_sdpa():
    x = tokens(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :3] = 0
    pattern = ["standard", "gqa", "memory"]
    expected, flexible = tiny_model(pattern), tiny_model(pattern, attn_implementation="flex_attention")
    with torch.no_grad():
        for arguments in ({}, {"attention_mask": mask}):
            keep = arguments.get("attention_mask", torch.ones_like(mask)).bool()
            assert_near(flexible(x, **arguments).logits[keep], expected(x, **arguments).logits[keep])


def test_version_is_exposed():
    assert fhf.__version__
