"""What cannot be converted is refused by name, before a weight is read."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, BitsAndBytesConfig, GPTJConfig, GPTJForCausalLM

import frankenstein_hf as fhf
from frankenstein_hf.transplant.weights import FileWeights, ModelWeights

from ..tiny import VOCAB, tiny_config, tiny_model, tiny_tokenizer
from .hosts import SMALL, make_host


@pytest.fixture(autouse=True)
def _nothing_is_loaded(monkeypatch):
    def fail(self):
        raise AssertionError("a weight was read")

    monkeypatch.setattr(FileWeights, "__iter__", fail)
    monkeypatch.setattr(ModelWeights, "__iter__", fail)


def saved(tmp_path, name="llama", **changes):
    """A checkpoint whose config.json says something else than its weights."""
    make_host(name).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pretraining_tp": 2}, r"pretraining_tp=2 stands in the way.*only 1 or None"),
        ({"hidden_size": 32}, r"q_proj.weight.*Nothing was loaded"),
        ({"num_hidden_layers": 4}, r"missing \['model.layers.3"),
        ({"num_hidden_layers": 2}, r"without a place \['model.layers.2"),
        ({"attention_bias": False}, r"without a place \['model.layers.0.self_attn"),
        ({"attention_chunk": 8}, r"attention_chunk=8 stands in the way.*does not know"),
        ({"architectures": ["LlamaForAudio"]}, r"architectures='LlamaForAudio'.*LlamaForCausalLM"),
        ({"hidden_act": "quick_maths"}, r"hidden_act"),
        ({"rope_parameters": {"rope_theta": 9.0, "partial_rotary_factor": 0.5}}, r"rope_parameters=.* whole heads"),
    ],
)
def test_a_configuration_that_cannot_be_expressed_names_the_key(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        fhf.from_transformers(saved(tmp_path, **changes))


def test_a_quantized_host_is_refused():
    host = make_host("llama")
    host.config.quantization_config = BitsAndBytesConfig(load_in_8bit=True)
    with pytest.raises(ValueError, match="quantization_config="):
        fhf.from_transformers(host)


def test_a_family_outside_the_list_is_refused():
    model = GPTJForCausalLM(GPTJConfig(vocab_size=9, n_embd=8, n_layer=1, n_head=2, rotary_dim=4))
    with pytest.raises(ValueError, match=r"model_type='gptj'.*llama"):
        fhf.from_transformers(model)
    with pytest.raises(ValueError, match="takes a model of transformers, got Linear"):
        fhf.from_transformers(nn.Linear(2, 2))


def test_an_odd_number_of_rotated_channels_is_refused():
    rotary = {"rope_theta": 9.0, "partial_rotary_factor": 0.5, "rope_type": "default"}
    with pytest.raises(ValueError, match="an odd number of channels, 3"):
        fhf.from_transformers(make_host("gpt_neox", rope_parameters=rotary))


def test_layers_of_an_unknown_type_are_refused(tmp_path):
    config = AutoConfig.for_model("qwen2", **SMALL, num_key_value_heads=2)
    config.layer_types = ["chunked_attention"] * 3
    model = make_host("qwen2", 1)
    model.config = config
    with pytest.raises(ValueError, match=r"layer_types=.*'chunked_attention' is no layer"):
        fhf.from_transformers(model)


def test_a_tokenizer_with_more_tokens_than_the_embedding_is_refused(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["new"])
    tokenizer.save_pretrained(saved(tmp_path))
    with pytest.raises(ValueError, match=f"token id {VOCAB}, but vocab_size={VOCAB}.*resize_token_embeddings"):
        fhf.from_transformers(tmp_path)


def test_weights_that_are_missing_or_in_another_format_are_refused(tmp_path):
    state = load_file(saved(tmp_path) / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing \['model.layers.1.mlp.up_proj.weight'\]"):
        fhf.from_transformers(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"has no model\.safetensors.*pass"):
        fhf.from_transformers(tmp_path)


def test_arguments_are_checked():
    host = make_host("llama")
    with pytest.raises(ValueError, match="init='warm' must be one of"):
        fhf.from_transformers(host, init="warm")
    with pytest.raises(ValueError, match="not built yet"):
        fhf.from_transformers(host, init="calibrated")
    with pytest.raises(ValueError, match="dtype"):
        fhf.from_transformers(host, dtype="float8")


def test_a_model_that_no_family_can_express_says_which_layers():
    model = tiny_model(["gla", "standard", "swa", "gla"])
    with pytest.raises(ValueError, match=r"'gla' in layer 0, 3"):
        fhf.to_transformers(model)
    with pytest.raises(ValueError, match=r"'swa' with .*num_sinks=2.* in layer 0"):
        fhf.to_transformers(tiny_model(["swa", "standard"]), host="qwen2")
    with pytest.raises(ValueError, match="has a head like FrankensteinForMultipleChoice"):
        fhf.to_transformers(fhf.FrankensteinForMultipleChoice(tiny_config("standard")))
    with pytest.raises(ValueError, match=r"residual='none'"):
        fhf.to_transformers(tiny_model("standard", residual="none"))
    with pytest.raises(ValueError, match="takes a model of this family"):
        fhf.to_transformers(make_host("llama"))
    with pytest.raises(ValueError, match="no report"):
        fhf.transfer_report(model)
