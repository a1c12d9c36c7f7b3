"""What all methods for matrices share."""

import pytest
import torch
from torch import nn

from frankenstein_hf.optim.spec import OPTIMIZERS, load

from .toy import small

NAMES = [spec.name for spec in OPTIMIZERS if spec.family == "orthogonal"]


def weights_after(name, start, layouts, steps=4):
    """Of tensors in groups of their layout, after steps along noise."""
    params = [nn.Parameter(w.clone()) for w in start]
    groups = [{"params": [p], "kind": "matrix", "layout": layout} for p, layout in zip(params, layouts)]
    optimizer = load(OPTIMIZERS.get(name).implementation)(groups, **small(name), weight_decay=0.1)
    torch.manual_seed(1)
    for _ in range(steps):
        noise = torch.randn(24, dtype=torch.float64)
        for p in params:
            p.grad = noise.reshape(p.shape).clone()
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("name", NAMES)
def test_convolutions_are_flattened(name):
    torch.manual_seed(0)
    w = torch.randn(4, 6, dtype=torch.float64)
    flat, conv = weights_after(name, [w, w.reshape(4, 3, 2)], ["stack", "flatten"])
    torch.testing.assert_close(conv.reshape(4, 6), flat)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "tuon"])  # which mixes the matrices of a stack
def test_stacked_experts_are_trained_one_by_one(name):
    torch.manual_seed(0)
    stacked = nn.Parameter(torch.randn(2, 4, 3, dtype=torch.float64))
    single = [nn.Parameter(w.clone()) for w in stacked.detach()]
    method = load(OPTIMIZERS.get(name).implementation)
    ours = method([{"params": [stacked], "kind": "matrix", "layout": "stack"}], **small(name))
    theirs = method([{"params": single, "kind": "matrix", "layout": "stack"}], **small(name))
    for _ in range(4):
        stacked.grad = torch.randn_like(stacked)
        for p, g in zip(single, stacked.grad):
            p.grad = g.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(stacked.detach(), torch.stack([p.detach() for p in single]))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "tuon"])
def test_parameters_do_not_depend_on_their_neighbours(name):
    torch.manual_seed(0)
    a, b = torch.randn(2, 4, 6, dtype=torch.float64)
    (alone,) = weights_after(name, [a], ["stack"])
    together, _ = weights_after(name, [a, b], ["stack", "stack"])
    torch.testing.assert_close(together, alone)
