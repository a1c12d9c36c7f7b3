"""A checkpoint fits the model it is loaded into, or the load says what does not; only a head may be new."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from frankenstein_hf import (
    FrankensteinForCausalLM,
    FrankensteinForMaskedLM,
    FrankensteinForSequenceClassification,
    FrankensteinModel,
)

from ..tiny import tiny_model

CLASSES = [FrankensteinModel, FrankensteinForCausalLM, FrankensteinForMaskedLM, FrankensteinForSequenceClassification]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model(["standard", "gated_deltanet"]).save_pretrained(folder, save_code=False)
    return folder


@pytest.fixture
def edited(checkpoint, tmp_path):
    """A function that saves the checkpoint with other weights."""

    def save(change):
        weights = load_file(checkpoint / "model.safetensors")
        change(weights)
        save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
        (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
        return tmp_path

    return save


@pytest.mark.parametrize("model_class", CLASSES)
@pytest.mark.parametrize(
    "key", ["embed_tokens.weight", "norm.weight", "layers.0.mlp.gate_proj.weight", "layers.1.input_layernorm.weight"]
)
def test_a_missing_weight_of_the_stack_is_an_error(edited, model_class, key):
    folder = edited(lambda weights: weights.pop(f"model.{key}"))
    with pytest.raises(ValueError, match=rf"missing \[.*{key}"):
        model_class.from_pretrained(folder)


@pytest.mark.parametrize("model_class", CLASSES)
@pytest.mark.parametrize("key", ["layers.2.mlp.up_proj.weight", "layers.0.mixer.g_proj.weight", "extra.weight"])
def test_a_left_over_weight_of_the_stack_is_an_error(edited, model_class, key):
    folder = edited(lambda weights: weights.update({f"model.{key}": torch.zeros(2)}))
    with pytest.raises(ValueError, match=rf"without a place \[.*{key}"):
        model_class.from_pretrained(folder)


@pytest.mark.parametrize("model_class", CLASSES)
def test_another_feed_forward_drops_no_weights(checkpoint, model_class):
    with pytest.raises(ValueError, match=r"without a place .*gate_proj"):
        model_class.from_pretrained(checkpoint, feed_forward="plain")


@pytest.mark.parametrize("model_class", CLASSES)
def test_a_head_may_be_new_or_left_behind(checkpoint, model_class):
    assert isinstance(model_class.from_pretrained(checkpoint, is_causal=True), model_class)


def test_every_single_weight_is_needed(checkpoint, edited):
    """Each key of a whole model on its own, whatever it belongs to."""
    for key in load_file(checkpoint / "model.safetensors"):
        folder = edited(lambda weights, key=key: weights.pop(key))
        with pytest.raises(ValueError, match="missing"):
            FrankensteinForCausalLM.from_pretrained(folder)
