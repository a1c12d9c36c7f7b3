"""`calibrate_fasa` finds the frequencies that carry the attention, and stores them."""

import pytest
import torch

import frankenstein_hf as fhf

from ..tiny import assert_near, tiny_model, tokens


def test_chunks_that_carry_the_scores_are_found_stored_and_used(tmp_path):
    params = {"fasa": {"num_tip": 1, "num_fac": 6}}
    model = tiny_model(["fasa", "standard", "fasa"], mixer_params=params, num_key_value_heads=2)
    with torch.no_grad():  # all but one chunk of each head give next to nothing
        for layer, carriers in ((0, (3, 1)), (2, (0, 4))):
            weight = model.model.layers[layer].mixer.k_proj.weight.view(2, 10, -1)
            for head, chunk in enumerate(carriers):
                others = [c for c in range(10) if c % 5 != chunk]
                weight[head, others] *= 1e-3
    x = tokens(2, 40)
    chunks = fhf.calibrate_fasa(model, x, top_k=5)
    assert chunks[0] == [[3], [1]] and chunks[2] == [[0], [4]]
    assert model.model.layers[2].mixer.params.chunks[2] == [[0], [4]]
    model.save_pretrained(tmp_path, save_code=False)
    loaded = fhf.FrankensteinForCausalLM.from_pretrained(tmp_path).eval()
    assert [list(map(list, layer)) for layer in loaded.config.params_for(0).chunks] == chunks
    with torch.no_grad():
        assert torch.equal(loaded(x).logits, model(x).logits)
        dense = tiny_model(["standard"] * 3, num_key_value_heads=2)
        dense.load_state_dict(model.state_dict())
        wide = tiny_model(
            ["fasa", "standard", "fasa"], num_key_value_heads=2, mixer_params={"fasa": {"num_tip": 1, "num_fac": 40}}
        )
        wide.load_state_dict(model.state_dict())
        assert_near(wide(x).logits, dense(x).logits)


def test_a_model_without_fasa_and_a_short_text_are_refused():
    with pytest.raises(ValueError, match="needs a model with fasa layers"):
        fhf.calibrate_fasa(tiny_model("standard"), tokens(1, 40))
    with pytest.raises(ValueError, match="more than top_k=32 tokens"):
        fhf.calibrate_fasa(tiny_model("fasa"), tokens(1, 32))
