"""The comparison of components covers the registries, remembers what is finished, and reports what it promises."""

import json

import pytest
import torch

from frankenstein_hf.configuration.registries import KINDS

TINY = ["--steps", "2", "--batch_size", "2", "--block_size", "16", "--hidden_size", "32", "--num_hidden_layers", "4",
        "--vocab_size", "300"]  # fmt: skip


@pytest.fixture
def program(monkeypatch):
    import compare_components

    rows = torch.randint(1, 300, (12, 16), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(compare_components, "make_data", lambda arguments: (rows, rows[:4]))
    monkeypatch.setattr(compare_components, "ROUNDS", 1)
    return compare_components


def test_every_registered_component_takes_its_turn(program):
    options = set(program.default_options())
    for kind, how in KINDS.items():
        named = {f"{how.field}={spec.name}" for spec in how.registry}
        if kind != "activation":
            assert len(named - options) == 1, kind  # the default


def test_runs_are_kept_and_refusals_are_rows(program, tmp_path, interrupted_run):
    pytest.importorskip("matplotlib")
    line = [*TINY, "--seeds", "2", "--options", "residual=hyperloop", "hidden_size=33",
            "--json", str(tmp_path / "runs.json"), "--markdown", str(tmp_path / "page.md"),
            "--plot", str(tmp_path / "page.png")]  # fmt: skip
    calls = interrupted_run(program, 3)
    with pytest.raises(KeyboardInterrupt):
        program.main(line)
    rows = program.main(line)
    stored = json.loads((tmp_path / "runs.json").read_text())["runs"]
    done = [(r["option"], r["seed"]) for r in stored]
    assert len(set(done)) == len(done) == 4 + 1  # the refused one once
    before = len(calls)
    again = program.main(line)
    assert len(calls) == before and again.keys() == rows.keys()
    assert "33" in rows["hidden_size=33"]["refused"]
    assert rows["residual=hyperloop"]["parameters"] > rows[program.BASE]["parameters"]
    assert rows["residual=hyperloop"]["time"] > 0 and rows["residual=hyperloop"]["memory"] > 0
    page = (tmp_path / "page.md").read_text()
    assert "(page.png)" in page and "`residual=hyperloop`" in page and "refused" in page
    with pytest.raises(ValueError, match="runs of"):
        program.main([*line, "--learning_rate", "0.1"])
    for wrong, message in (("norm", "not field=value"), ("nrom=x", "no field nrom")):
        with pytest.raises(ValueError, match=message):
            program.main([*TINY, "--options", wrong])
