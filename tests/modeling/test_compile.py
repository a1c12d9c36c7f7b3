"""`torch.compile`: a training step is the eager one, and decoding from a static cache compiles once."""

import copy
import shutil

import pytest
import torch

from frankenstein_hf.configuration.registries import MIXERS

from ..tiny import ALL_MIXERS, assert_near, relative_rms, tiny_model, tokens
from .test_training import Examples, trainer

PATTERN = ["gated_deltanet", "swa", "standard"]
CASES = [(["retnet", "standard"], "aot_eager")]
SLOW = [([name], "aot_eager") for name in ALL_MIXERS] + [(PATTERN, "inductor")]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("pattern", "backend"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def test_a_compiled_training_step_equals_the_eager_one(pattern, backend):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    is_causal = all(MIXERS.get(name).causal for name in pattern)
    eager, x = tiny_model(pattern, is_causal).train(), tokens(2, 24)
    compiled = torch.compile(copy.deepcopy(eager), backend=backend)
    mask = torch.ones_like(x)
    mask[0, 20:] = 0
    for arguments in ({}, {"attention_mask": mask})[: 1 if len(pattern) == 1 else 2]:
        losses = []
        for model in (eager, compiled):
            model.zero_grad()
            losses.append(model(input_ids=x, labels=x, **arguments).loss)
            losses[-1].backward()
        assert_near(losses[1], losses[0], rtol=1e-5)
        for (key, p), q in zip(eager.named_parameters(), compiled.parameters()):
            assert relative_rms(q.grad, p.grad) < 1e-5, key


@pytest.mark.slow
def test_trainer_compiles_when_asked(tmp_path):
    x, weights = tokens(4, 12), []
    for changes in ({}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}):
        model = tiny_model(PATTERN).train()
        trainer(model, Examples({"input_ids": x, "labels": x}), tmp_path, optim="sgd", **changes).train()
        weights.append(list(model.parameters()))
    for p, q in zip(*weights):
        assert relative_rms(q, p) < 1e-5
