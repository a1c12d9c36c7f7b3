"""Faults a reviewer found by fuzzing, each as the property it violated."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import frankenstein_hf as fhf
from frankenstein_hf.data import train_tokenizer

from ..tiny import assert_near, tiny_config, tiny_model, tokens


def test_a_mask_of_real_tokens_changes_nothing_in_a_packed_loss():
    model, x = tiny_model("standard"), tokens(1, 10)
    positions = torch.tensor([[*range(6), *range(4)]])
    expected = model(x, labels=x, position_ids=positions).loss
    assert torch.equal(model(x, labels=x, position_ids=positions, attention_mask=torch.ones_like(x)).loss, expected)
    # pads between and around the documents
    padded = torch.full((1, 14), 7)
    mask = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1, 0]])
    place = mask[0].bool()
    padded[0, place], spread, labels = x[0], torch.zeros_like(padded), torch.full_like(padded, -100)
    spread[0, place], labels[0, place] = positions[0], x[0]
    kept = model(padded, attention_mask=mask, position_ids=spread).logits[0, place]
    assert_near(kept, model(x, position_ids=positions).logits[0])
    numbers = torch.zeros_like(padded)
    numbers[0, place] = torch.tensor([0] * 6 + [1] * 4)
    losses = [
        model(padded, attention_mask=mask, labels=labels, **how).loss
        for how in ({"position_ids": spread}, {"seq_idx": numbers})
    ]
    assert torch.equal(*losses)


@pytest.mark.parametrize("pattern", ["swa", "retnet", "standard"])
def test_pads_do_not_lengthen_a_row_for_rotary_scalings(pattern):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16}
    model, x = tiny_model(pattern, rope_parameters=rope, max_position_embeddings=16), tokens(1, 14)
    pads = tokens(1, 20)
    expected = model(x).logits
    right = model(torch.cat([x, pads], 1), attention_mask=torch.tensor([[1] * 14 + [0] * 20])).logits[:, :14]
    left = model(torch.cat([pads, x], 1), attention_mask=torch.tensor([[0] * 20 + [1] * 14])).logits[:, 20:]
    assert_near(right, expected)
    assert_near(left, expected)


def test_our_own_attention_names_mean_the_mixer_on_our_models_too():
    model = AutoModelForCausalLM.from_config(tiny_config("standard"), attn_implementation="frankenstein_swa")
    assert model.config.layer_pattern == ["swa"]
    with pytest.raises(ValueError, match="chosen when a model is built"):
        tiny_model("standard").set_attn_implementation("frankenstein_swa")


@pytest.mark.parametrize("name", ["swa", "gla"])
def test_a_call_of_pads_only_can_be_undone(name):
    model, x = tiny_model(name), tokens(1, 6)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    model(x[:, :4], attention_mask=torch.zeros(1, 4, dtype=torch.long), cache=cache)
    cache.crop(-1)
    assert_near(model(x[:, 3:], cache=cache).logits, model(x[:, 3:]).logits)


def test_recording_switched_off_and_on_keeps_a_rollback_that_is_still_due():
    model, x = tiny_model("gla"), tokens(1, 9)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    model(x, cache=cache)
    cache.crop(-1)
    for layer in cache.layers:
        layer.record_past = False
    cache.activate_past_recording()
    assert_near(model(x[:, 8:], cache=cache).logits, model(x).logits[:, 8:])


def test_a_cache_left_uneven_by_a_failed_crop_is_refused():
    model, x = tiny_model(["standard", "gla"]), tokens(1, 9)
    cache = DynamicCache(config=model.config)
    model(x, cache=cache)
    with pytest.raises(ValueError, match="the past is not recorded"):
        cache.crop(-2)
    with pytest.raises(ValueError, match=r"different numbers of tokens \(\[7, 9\]\)"):
        model(x[:, :1], cache=cache)


def test_early_exit_drafting_equals_greedy_and_leaves_the_model_whole():
    model, x = tiny_model(["swa", "gla", "standard", "mamba"]), tokens(1, 9)
    common = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False)
    expected = model.generate(x, **common)
    assert torch.equal(model.generate(x, assistant_early_exit=2, **common), expected)
    assert model.config.num_hidden_layers == 4


def test_generate_stops_at_strings_and_takes_the_tokenizer_that_finds_them():
    tokenizer = train_tokenizer(["abcdef ghij"] * 9, 300, "clm")
    model, x = tiny_model(["gla", "swa"], vocab_size=len(tokenizer)), tokens(1, 4)
    letter = tokenizer.convert_tokens_to_ids("a")

    def insist(module, inputs, output):
        output.logits[..., letter] = 1e4

    model.register_forward_hook(insist)
    written = model.generate(x, max_new_tokens=8, do_sample=False, stop_strings=["aaa"], tokenizer=tokenizer)
    assert written[0, 4:].tolist() == [letter] * 3


def test_generate_takes_token_type_ids():
    model, x = tiny_model("standard"), tokens(1, 5)
    common = dict(max_new_tokens=3, do_sample=False)
    assert torch.equal(model.generate(x, token_type_ids=torch.zeros_like(x), **common), model.generate(x, **common))


def test_attentions_to_a_past_sum_to_one_at_real_tokens():
    model, x = tiny_model(["swa", "standard"], attn_implementation="eager"), tokens(1, 8)
    cache = DynamicCache(config=model.config)
    model(x[:, :4], cache=cache)
    mask = torch.tensor([[1, 1, 1, 1, 0, 1, 1, 1]])
    windowed, dense = model(x[:, 4:], attention_mask=mask, cache=cache, output_attentions=True).attentions
    for weights in (windowed, dense):
        assert weights.shape[:3] == (1, 2, 4)
        assert_near(weights[:, :, 1:].sum(-1), torch.ones(1, 2, 3))


@pytest.mark.parametrize("head_dim", [1, 5, 7])
@pytest.mark.parametrize("pattern", ["standard", "swa", "gla", "retnet"])
def test_heads_of_odd_width(head_dim, pattern):
    for rope in (None, {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}):
        model, x = tiny_model(pattern, head_dim=head_dim, rope_parameters=rope), tokens(1, 9)
        generated = [model.generate(x, max_new_tokens=4, do_sample=False, use_cache=use) for use in (True, False)]
        assert torch.equal(*generated)


def test_a_built_in_mixer_cannot_be_replaced():
    class Other(fhf.modeling.mixers.base.Mixer):
        """Not gla."""

    with pytest.raises(ValueError, match="'gla' is registered already"):
        fhf.register_mixer(fhf.mixer_spec("gla"), Other)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (dict(rms_norm_eps=-1.0), "rms_norm_eps"),
        (dict(layer_pattern=["swa", "gla"]), "does not divide"),
        (dict(layer_pattern="swaa"), "did you mean 'swa'"),
        (dict(hidden_act="nope"), "Unknown hidden_act"),
        (dict(head_dim=0), "head_dim=0"),
        (dict(mixer_params={"standard": {"windw": 1}}), "no parameter 'windw'"),
    ],
)
def test_overrides_while_loading_are_checked(override, message, tmp_path):
    tiny_model(["standard"] * 3).save_pretrained(tmp_path, save_code=False)
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path, **override)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(per_layer_config={0: {"head_dim": 4}}), "per_layer_config cannot change head_dim"),
        (dict(per_layer_config={0: {"intermediate_size": -4}}), "intermediate_size"),
        (dict(rope_parameters={"rope_type": "linear", "rope_theta": 1e4}), "factor"),
        (dict(pad_token_id=61), "pad_token_id=61 must be below vocab_size=61"),
        (dict(rms_norm_eps=float("inf")), "finite number > 0"),
    ],
)
def test_more_values_a_config_refuses(values, message):
    with pytest.raises(ValueError, match=message):
        fhf.FrankensteinForCausalLM(tiny_config(["standard", "standard"], **values))


def test_a_config_keeps_its_own_copy_of_the_parameters():
    params = {"swa": {"window_size": 6, "num_sinks": 2}}
    config = tiny_config("swa", mixer_params=params)
    params["swa"]["window_size"] = 99
    assert config.params_for(0).window_size == 6


def test_a_mask_that_disagrees_with_the_cache_is_refused():
    model, x = tiny_model("gla"), tokens(1, 8)
    cache = model(x[:, :6]).cache
    with pytest.raises(ValueError, match="other cached tokens as pads"):
        model(x[:, 6:], attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]]), cache=cache)
