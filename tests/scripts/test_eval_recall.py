"""The recall task is what it says, and the program runs."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).resolve().parents[2] / "scripts" / "eval_recall.py"


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("eval_recall", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_question_repeats_the_key_of_its_pair(program):
    inputs, values, asked = program.batch(3, 5, torch.Generator().manual_seed(0))
    assert inputs.shape == (3, 10, 33) and values.shape == (3, 5, 16)
    keys = inputs[..., :16]
    for row in range(3):
        assert sorted(asked[row].tolist()) == list(range(5))
        assert torch.equal(keys[row, 5:], keys[row, :5][asked[row]])
        assert torch.equal(inputs[row, :5, 16:32], values[row] * 4)
        assert (inputs[row, 5:, 16:32] == 0).all() and inputs[row, :, 32].tolist() == [0] * 5 + [4] * 5


def test_a_perfect_answer_scores_highest_and_the_program_writes_its_results(program, tmp_path, monkeypatch):
    inputs, values, asked = program.batch(4, 6, torch.Generator().manual_seed(1))
    perfect = values.gather(1, asked[..., None].expand(-1, -1, 16))
    assert torch.equal(program.scores(lambda _: perfect, inputs, values).argmax(-1), asked)
    saved, page = tmp_path / "recall.json", tmp_path / "recall.md"
    flags = ["--pairs", "2", "--steps", "2", "--questions", "8", "--learning_rates", "1e-2", "--seeds", "2"]
    results = program.main(["--mixers", "gla", *flags, "--json", str(saved)])
    assert len(results["gla"]["2"]["runs"]) == 2
    assert json.loads(saved.read_text())["results"]["gla"]["2"]["learning_rate"] == 0.01
    # an interrupted run goes on where it was
    monkeypatch.setattr(program, "accuracy", lambda name, *_: {"retnet": 0.5}[name])
    again = program.main(["--mixers", "gla", "retnet", *flags, "--json", str(saved), "--markdown", str(page)])
    assert again["gla"] == results["gla"] and again["retnet"]["2"]["accuracy"] == 0.5
    assert "| retnet | 50.0% (50.0% 50.0%; lr 0.01) |" in page.read_text()
    if importlib.util.find_spec("matplotlib"):
        figure = tmp_path / "recall.png"
        program.main(["--mixers", "gla", "retnet", *flags, "--json", str(saved), "--plot", str(figure)])
        assert figure.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="other settings"):
        program.main(["--mixers", "gla", *flags[:-1], "1", "--json", str(saved)])
    with pytest.raises(ValueError, match="'memory' cannot be evaluated"):
        program.main(["--mixers", "memory"])
    with pytest.raises(ValueError, match=r"pairs\[1\] must be at least 1"):
        program.main(["--pairs", "4", "0"])
