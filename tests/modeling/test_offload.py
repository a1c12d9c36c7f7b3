"""Weights on the CPU or on disk, brought in when a module is called (accelerate's device_map)."""

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from transformers import AutoModelForCausalLM

from ..tiny import MODES, assert_near, tiny_model, tokens


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize(("name", "is_causal"), MODES)
@torch.no_grad()
def test_every_mixer_runs_with_its_weights_offloaded(name, is_causal, where, tmp_path):
    model, x = tiny_model([name, name], is_causal), tokens(2, 7)
    mask = torch.ones_like(x)
    mask[0, :2] = 0

    def results() -> list[torch.Tensor]:
        whole = model(x, attention_mask=mask).logits
        if not is_causal:
            return [whole]
        cache = model(x[:, :5], attention_mask=mask[:, :5]).cache
        return [whole, model(x[:, 5:], attention_mask=mask, cache=cache).logits]

    expected = results()
    if where == "cpu":
        cpu_offload(model, execution_device="cpu")
    else:
        disk_offload(model, str(tmp_path), execution_device="cpu")
    assert all(p.device.type == "meta" for p in model.model.layers.parameters())
    for result, wanted in zip(results(), expected):  # hooks keep projections from being one product: other rounding
        assert_near(result, wanted)


@torch.no_grad()
def test_from_pretrained_puts_layers_on_disk(tmp_path):
    model, x = tiny_model(["ode", "gated_deltanet", "swa"], tie_word_embeddings=True), tokens(2, 7)
    model.save_pretrained(tmp_path / "saved")
    places = dict.fromkeys(["model.embed_tokens", "model.layers.2", "model.norm", "lm_head"], "cpu")
    places |= {"model.layers.0": "disk", "model.layers.1": "disk"}
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", device_map=places, offload_folder=str(tmp_path / "offloaded")
    )
    assert loaded.model.layers[0].mixer.q_proj.weight.device.type == "meta"
    assert_near(loaded(x).logits, model(x).logits)
    assert torch.equal(loaded.generate(x, max_new_tokens=3), model.generate(x, max_new_tokens=3))
