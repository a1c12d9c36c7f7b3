"""Presets that bear the name of a published model give its logits from its weights."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from frankenstein_hf.recipes import load, validate


def test_llama_gives_the_logits_of_transformers_llama_with_the_same_weights():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    settings = [f"model.{key}={value}" for key, value in {**sizes, "intermediate_size": 48}.items()]
    run = validate(load("llama", settings))
    torch.manual_seed(0)
    ours = run.auto_class.from_config(run._config(300)).eval()
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300,
            intermediate_size=48,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            **sizes,
        )
    ).eval()
    names = {"mixer": "self_attn", "post_mixer_layernorm": "post_attention_layernorm"}
    renamed = {
        ".".join(names.get(part, part) for part in name.split(".")): tensor
        for name, tensor in ours.state_dict().items()
    }
    theirs.load_state_dict(renamed)
    ids = torch.randint(0, 300, (2, 17))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, atol=1e-5, rtol=1e-5)
