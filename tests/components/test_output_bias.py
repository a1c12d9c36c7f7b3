"""`attention_output_bias`: a bias on a mixer's last projection, or none there, whatever the others have."""

import pytest
import torch

import frankenstein_hf as fhf
from frankenstein_hf.configuration.registries import MIXERS

from ..tiny import ALL_MIXERS, tiny_config


def keys(name: str, **changes) -> set[str]:
    with torch.device("meta"):
        model = fhf.FrankensteinModel(tiny_config(name, **changes), is_causal=MIXERS.get(name).causal)
    return set(model.state_dict())


@pytest.mark.parametrize("name", ALL_MIXERS)
def test_only_the_last_projection_changes(name):
    with_all, with_none = keys(name, attention_bias=True), keys(name)
    last = {f"layers.0.mixer.{projection}.bias" for projection in ("o_proj", "out_proj")}
    assert keys(name, attention_bias=True, attention_output_bias=False) == with_all - (last & (with_all - with_none))
    assert keys(name, attention_output_bias=True) == with_none | (last & with_all)
    assert keys(name, attention_bias=True, attention_output_bias=True) == with_all
