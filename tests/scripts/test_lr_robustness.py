"""The sweep of learning rates keeps finished runs, calls divergence by its name, and says which claims were seen."""

import json
import math

import pytest

TINY = ["--steps", "3", "--probe_every", "1", "--batch_size", "2", "--block_size", "16", "--hidden_size", "16",
        "--num_hidden_layers", "2", "--data", "dna"]  # fmt: skip


@pytest.fixture
def program():
    import lr_robustness

    return lr_robustness


def test_runs_are_kept_and_everything_is_written(program, tmp_path, interrupted_run):
    pytest.importorskip("matplotlib")
    outputs = {name: tmp_path / f"out.{name}" for name in ("json", "csv", "markdown", "png")}
    line = [*TINY, "--mechanisms", "SA", "SC", "swa,gla", "--rates", "0.001", "0.1", "--seeds", "2"]
    line += ["--json", str(outputs["json"]), "--csv", str(outputs["csv"]), "--markdown", str(outputs["markdown"]),
             "--plot", str(outputs["png"])]  # fmt: skip
    calls = interrupted_run(program, 3)
    with pytest.raises(KeyboardInterrupt):
        program.main(line)
    cells = program.main(line)
    stored = json.loads(outputs["json"].read_text())["runs"]
    assert len({(r["mechanism"], r["rate"], r["seed"]) for r in stored}) == len(stored) == 12
    before = len(calls)
    assert program.main(line) == cells and len(calls) == before
    assert len(outputs["csv"].read_text().splitlines()) == 13 and outputs["png"].stat().st_size > 0
    page = outputs["markdown"].read_text()
    assert "(out.png)" in page and "SC bears a wider range" in page and "| swa,gla |" in page
    assert all(0 <= r["stable"] <= 1 and 0 <= r["ascent"] <= 1 for r in stored)


def test_windows_divergence_and_claims(program):
    def runs(mechanism, losses):
        return [
            {"mechanism": mechanism, "rate": rate, "seed": 0, "first": 5.0, "loss": loss, "median": 0.01, "stable": 1.0,
             "ascent": 0.0, "parameters": 1}
            for rate, loss in zip((1e-3, 1e-2, 1e-1), losses)
        ]  # fmt: skip

    cells = program.summarise(
        [*runs("SA", (3.0, 2.0, None)), *runs("SC", (2.6, 2.55, 2.6)), *runs("MIX", (3, 2.01, 4))]
    )
    assert program.best(cells["SA"]) == 1e-2 and math.isinf(cells["SA"][1e-1].loss)
    assert program.window(cells["SA"]) == 1 and program.window(cells["SC"]) == pytest.approx(100)
    assert cells["SA"][1e-1].diverged == 1 and program.diverged({"loss": 5.1, "first": 5.0})
    found = program.claims(cells)
    assert len(found) == 4 and all(": seen" in claim for claim in found)
    assert ": not seen" in program.claims({"SA": cells["SC"], "SC": cells["SA"]})[0]


def test_the_grammar_has_its_motifs_and_files_are_read(program, tmp_path):
    sequences = program.grammar(20, 200)
    assert all(set(text) <= set("ACGT") and len(text) == 200 for text in sequences)
    assert sum(motif in text for text in sequences for motif in program.MOTIFS) > 60
    assert sequences == program.grammar(20, 200)
    fasta = tmp_path / "a.fa"
    fasta.write_text(">a\n" + "\n".join(sequences) + "\n")
    arguments = program.Arguments(data=str(fasta), block_size=16)
    tokenizer, train, held_out = program.make_data(arguments)
    assert len(train) > 100 and 0 < len(held_out) <= program.HELD_OUT
    assert tokenizer.decode(train[0]["input_ids"], skip_special_tokens=True) == sequences[0][:14]
    for wrong in ({"data": "nothing.fa"}, {"rates": [0.0]}, {"mechanisms": ["SX"]}, {"seeds": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong)) if "mechanisms" not in wrong else "SX"):
            program.Arguments(**wrong)
