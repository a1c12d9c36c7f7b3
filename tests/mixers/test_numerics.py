"""Every mixer with a recurrent state against its own recurrence in fp64: long sequences in half precision, and inputs
that push every gate to its ends. The registry says which mixers these are."""

import copy

import pytest
import torch

from frankenstein_hf.configuration.registries import MIXERS

from ..tiny import relative_rms
from .run import make_mixer, run

D = 20
RECURRENT = sorted(spec.name for spec in MIXERS if "state" in spec.cache)
every_recurrent = pytest.mark.parametrize("name", RECURRENT)


def reference(mixer, x, is_causal=True):
    """Token by token in fp64, with the weights and inputs as they were rounded."""
    exact = copy.deepcopy(mixer).double()
    with torch.no_grad():
        return run(exact, x.double(), is_causal, "eager")


@every_recurrent
def test_4096_tokens_in_bfloat16_stay_near_the_fp64_recurrence(name):
    mixer = make_mixer(name).to(torch.bfloat16)
    x = torch.randn(1, 4096, D).to(torch.bfloat16)
    expected = reference(mixer, x)
    with torch.no_grad():
        output = run(mixer, x)
    assert output.isfinite().all()
    for part in (slice(0, 64), slice(2000, 2100), slice(4000, None)):  # errors must not grow along the sequence
        assert relative_rms(output[:, part], expected[:, part]) < 2e-2, part


INPUTS = {
    # gates open and shut from token to token, some tokens say nothing at all
    "mixture": lambda T: torch.randn(1, T, D) * torch.tensor([0.0, 1.0, 60.0])[torch.randint(3, (1, T, 1))],
    # shut at a stretch, open at another
    "bursts": lambda T: torch.randn(1, T, D).sign() * torch.where(torch.arange(T) // 20 % 2 == 0, 60.0, 0.5)[:, None],
    # the same saturated key again and again, sometimes its mirror image
    "repeated": lambda T: 60.0 * torch.randn(1, 1, D) * torch.where(torch.arange(T) % 7 == 6, -1.0, 1.0)[:, None],
}


@every_recurrent
@pytest.mark.parametrize("kind", INPUTS)
def test_saturated_gates_stay_near_the_fp64_recurrence_and_gradients_finite(name, kind):
    mixer, x = make_mixer(name).float(), INPUTS[kind](150)
    for is_causal in (True, False) if MIXERS.get(name).bidirectional else (True,):
        mixer.zero_grad()
        inputs = x.clone().requires_grad_()
        output = run(mixer, inputs, is_causal)
        output.square().mean().backward()
        assert relative_rms(output.detach(), reference(mixer, x, is_causal)) < 1e-3
        for parameter in (inputs, *mixer.parameters()):
            assert parameter.grad is None or parameter.grad.isfinite().all()
