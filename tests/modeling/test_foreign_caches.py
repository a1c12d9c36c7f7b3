"""transformers' quantised caches and continuous batching serve dense patterns; others are named."""

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig

from frankenstein_hf.configuration.registries import MIXERS

from ..tiny import CAUSAL, tiny_model, tokens

DENSE = ["standard", "gqa", "xsa", "gated_softmax"]
NEW = 6


@pytest.mark.parametrize("name", sorted(CAUSAL))
def test_quantised_caches_and_pages_work_or_name_the_mixer(name):
    model = tiny_model(["standard", name])
    dense = model.model.layers[1].mixer.plain_cache
    assert dense or name not in DENSE
    calls = [
        lambda: model.generate(
            tokens(1, 5), max_new_tokens=2, cache_implementation="quantized", cache_config={"backend": "fp8"}
        ),
        lambda: model.generate_batch(
            [[4, 5, 6]], generation_config=GenerationConfig(max_new_tokens=2, do_sample=False)
        ),
    ]
    for call in calls[: 1 if dense else 2]:  # pages of dense patterns are below
        if dense and not MIXERS.get(name).needs_input_ids:
            assert call().shape == (1, 7)
        elif not dense:
            with pytest.raises(ValueError, match=f"cannot hold the cache of {name}\\."):
                call()


@torch.no_grad()
def test_a_quantised_cache_gives_nearly_what_the_default_gives():
    model, x = tiny_model(DENSE), tokens(2, 9)
    mask = torch.ones_like(x)
    mask[0, :3] = 0
    common = dict(attention_mask=mask, max_new_tokens=NEW, do_sample=False, output_logits=True, pad_token_id=0)
    common["return_dict_in_generate"] = True
    exact = model.generate(x, **common).logits
    coded = model.generate(x, cache_implementation="quantized", cache_config={"backend": "fp8"}, **common)
    assert type(coded.cache.layers[0]).__name__ == "MixerQuantizedLayer" and not torch.equal(coded.logits[1], exact[1])
    torch.testing.assert_close(coded.logits[0], exact[0])  # a prompt is read as it is
    torch.testing.assert_close(coded.logits[1], exact[1], rtol=0.0, atol=0.2 * exact[1].abs().max().item())


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_continuous_batching_gives_what_generate_gives(backend):
    model = tiny_model(["standard", "xsa", "gated_softmax"])
    model.set_attn_implementation(backend)
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (3, 7, 5)]
    settings = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    pages = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=32, max_memory_percent=0.01)  # else most of all RAM
    outputs = model.generate_batch(prompts, generation_config=settings, continuous_batching_config=pages)
    generated = {tuple(output.prompt_ids): output.generated_tokens for output in outputs.values()}
    for prompt in prompts:
        expected = model.generate(torch.tensor([prompt]), generation_config=settings)[0, len(prompt) :]
        assert generated[tuple(prompt)] == expected.tolist()
