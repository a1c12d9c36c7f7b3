"""Nothing derived from weights outlives a change of them, however quietly it happens."""

import copy

import pytest
import torch

from ..tiny import MODES, tiny_model, tokens


@pytest.mark.parametrize(("name", "is_causal"), MODES)
@torch.no_grad()
def test_weights_changed_behind_autograds_back_are_the_ones_used(name, is_causal):
    """torch's fused optimizers and writes through `.data` do not count as changes: no version tells of them."""
    model = tiny_model(name, is_causal)
    x = tokens(1, 1)
    model(x)
    for p in model.parameters():
        p.data.mul_(1.5)
    assert torch.equal(model(x).logits, copy.deepcopy(model)(x).logits)
