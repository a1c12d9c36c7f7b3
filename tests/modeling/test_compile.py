"""`torch.compile`: a training step is the eager one, and decoding from a static cache compiles once."""

import copy
import shutil
from typing import Any

import pytest
import torch
from transformers import CompileConfig, StaticCache

from frankenstein_hf.configuration.registries import MIXERS

from ..tiny import ALL_MIXERS, CAUSAL, assert_near, relative_rms, tiny_model, tokens
from .test_training import Examples, trainer

PATTERN = ["gated_deltanet", "swa", "standard"]
CASES = [(["retnet"], "eager")]
SLOW = [([name], "aot_eager") for name in ALL_MIXERS] + [(PATTERN, "aot_eager"), (["gated_deltanet"], "inductor")]


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


WHOLE = [PATTERN, *([name] for name in ("gla", "kda", "rglru"))]


@pytest.mark.parametrize("pattern", WHOLE, ids=str)
def test_a_training_step_is_one_graph_and_its_cores_are_operators(pattern):
    eager, x = tiny_model(pattern).train(), tokens(2, 40)
    graphs: list[Any] = []

    def compiler(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(copy.deepcopy(eager), backend=compiler, fullgraph=True)
    losses = [model(input_ids=x, labels=x, use_cache=False).loss for model in (eager, compiled)]
    for loss in losses:
        loss.backward()
    assert_near(losses[1], losses[0], rtol=1e-5)
    for (key, p), q in zip(eager.named_parameters(), compiled.parameters()):
        assert relative_rms(q.grad, p.grad) < 1e-5, key
    (graph,) = graphs
    assert any(str(node.target).startswith("frankenstein.") for node in graph.graph.nodes)


@pytest.mark.slow
def test_trainer_compiles_when_asked(tmp_path):
    x, weights = tokens(4, 12), []
    for changes in ({}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}):
        model = tiny_model(PATTERN).train()
        trainer(model, Examples({"input_ids": x, "labels": x}), tmp_path, optim="sgd", **changes).train()
        weights.append(list(model.parameters()))
    for p, q in zip(*weights):
        assert relative_rms(q, p) < 1e-5


# ---------------------------------------------------------------------- decoding from a static cache

STEPS = [["gated_deltanet", "standard"]]


@pytest.mark.parametrize(
    "pattern", [*STEPS, *(pytest.param([name], marks=pytest.mark.slow) for name in sorted(CAUSAL))]
)
def test_a_decoding_step_is_one_graph_compiled_for_all_lengths(pattern):
    """Once for the first length, once for any length, and never again; exact, and without a single break."""
    model, x = tiny_model(pattern), tokens(2, 16)
    with torch.no_grad():
        expected = model(x, use_cache=False).logits
        cache = StaticCache(config=model.config, max_cache_len=20)
        model(x[:, :8], cache=cache)
        places = [tensor.data_ptr() for tensor in kept_tensors(cache)]
        graphs = CountGraphs()
        step = torch.compile(model, backend=graphs, fullgraph=True)
        for t in range(8, 16):
            assert_near(step(x[:, t : t + 1], cache=cache).logits, expected[:, t : t + 1])
    assert graphs.count <= 2
    assert [tensor.data_ptr() for tensor in kept_tensors(cache)] == places  # nothing moved


class CountGraphs:
    """A compiler that runs what it gets as it is, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph, example_inputs, **options):
        self.count += 1
        return graph.forward

    def __deepcopy__(self, memo):  # generate() copies its settings
        return self


def kept_tensors(cache: StaticCache) -> list[torch.Tensor]:
    named = [getattr(layer, "states", None) or layer.streams for layer in cache.layers]
    return [tensor for tensors in named for _, tensor in sorted(tensors.items())]


def test_generate_compiles_its_steps_when_asked():
    model, x = tiny_model(["retnet", "standard"]), tokens(2, 7)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    common = dict(attention_mask=mask, max_new_tokens=9, min_new_tokens=9, pad_token_id=0, do_sample=False)
    graphs = CountGraphs()
    settings = CompileConfig(backend=graphs, fullgraph=True)
    settings._compile_all_devices = True  # transformers compiles on accelerators only, unless told
    compiled = model.generate(x, cache_implementation="static", compile_config=settings, **common)
    assert torch.equal(compiled, model.generate(x, **common))
    assert 1 <= graphs.count <= 2
