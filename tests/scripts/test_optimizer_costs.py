"""The stored costs are complete, and the state in them is what the specs say."""

import json

import pytest
import torch

import frankenstein_hf as fhf
from frankenstein_hf.optim.grouping import classify
from frankenstein_hf.optim.spec import OPTIMIZERS


@pytest.fixture
def stored():
    import benchmark_optimizers

    return json.loads(benchmark_optimizers.COSTS.read_text(encoding="utf-8"))


@pytest.fixture
def infos():
    import benchmark_optimizers

    with torch.device("meta"):
        return classify(benchmark_optimizers.make_model())


def test_the_model_is_of_the_size_that_was_promised(stored, infos):
    assert stored["parameters"] == sum(info.parameter.numel() for info in infos)
    assert stored["tensors"] == len(infos)
    assert 9.5e6 < stored["parameters"] < 10.6e6 and 50 <= stored["tensors"] <= 65
    assert {info.kind for info in infos} == {"matrix", "table", "vector"}


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_every_optimizer_is_measured_and_its_state_is_the_formulas(name, stored, infos):
    assert name in stored["optimizers"], f"run scripts/benchmark_optimizers.py --optimizers {name}"
    spec, cost = OPTIMIZERS.get(name), stored["optimizers"][name]
    params, shapes = spec.params(), [(tuple(info.parameter.shape), info.kind) for info in infos]
    expected = sum(spec.state_bytes(params, *shape) for shape in shapes) + spec.shared_state_bytes(params, shapes)
    assert cost["state_bytes"] == expected
    assert cost["step"] > 0 and cost["first_step"] > 0


def test_no_cost_is_of_an_optimizer_that_is_gone(stored):
    assert list(stored["optimizers"]) == fhf.list_optimizers()


def test_new_measurements_join_the_file(monkeypatch, tmp_path):
    import benchmark_optimizers

    config = fhf.FrankensteinConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    monkeypatch.setattr(benchmark_optimizers, "make_model", lambda: fhf.FrankensteinForCausalLM(config))
    path = tmp_path / "costs.json"
    benchmark_optimizers.main(["--optimizers", "lion", "ea4llm", "--rounds", "1", "--json", str(path)])
    costs = benchmark_optimizers.main(["--optimizers", "muon", "--rounds", "1", "--json", str(path)])
    assert list(costs["optimizers"]) == ["ea4llm", "lion", "muon"] and len(costs["matrices"]) == 4
    assert json.loads(path.read_text()) == costs
    assert costs["optimizers"]["lion"]["state_bytes"] == 4 * costs["parameters"]
    with pytest.raises(ValueError, match="did you mean 'lion'"):
        benchmark_optimizers.main(["--optimizers", "lionn", "--json", str(path)])
