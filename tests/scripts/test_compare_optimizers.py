"""The comparison runs every kind of optimizer, remembers what is finished, and reports what it promises."""

import json
import math

import pytest
import torch

import frankenstein_hf as fhf
from frankenstein_hf.optim.spec import OPTIMIZERS

VOCABULARY, ROWS, LENGTH = 300, 12, 16
TINY = ["--steps", "3", "--batch_size", "2", "--block_size", str(LENGTH), "--hidden_size", "32",
        "--num_hidden_layers", "2", "--vocab_size", str(VOCABULARY)]  # fmt: skip


@pytest.fixture
def program(monkeypatch):
    import compare_optimizers

    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=generator)
    monkeypatch.setattr(compare_optimizers, "make_data", lambda arguments: (rows, rows[:4]))
    return compare_optimizers


def test_the_default_has_a_dozen_optimizers_and_every_family(program):
    assert len(set(program.DEFAULT)) >= 12
    assert {OPTIMIZERS.get(name).family for name in program.DEFAULT} == {spec.family for spec in OPTIMIZERS}


def test_finished_runs_are_not_repeated_and_all_outputs_are_written(program, tmp_path, interrupted_run):
    pytest.importorskip("matplotlib")
    paths = {name: tmp_path / f"results.{suffix}" for name, suffix in (("markdown", "md"), ("plot", "png"))}
    line = [*TINY, "--optimizers", "adamw", "schedulefree_adamw", "--factors", "0.5", "1", "--seeds", "2",
            "--extensions", "1", "--json", str(tmp_path / "results.json")]  # fmt: skip
    line += [part for name, path in paths.items() for part in (f"--{name}", str(path))]

    calls = interrupted_run(program, 3)
    with pytest.raises(KeyboardInterrupt):
        program.main(line)
    assert len(json.loads((tmp_path / "results.json").read_text())["runs"]) == 2
    rows = program.main(line)
    stored = json.loads((tmp_path / "results.json").read_text())
    assert len(calls) == len(stored["runs"]) + 1
    keys = [(r["optimizer"], r["learning_rate"], r["seed"]) for r in stored["runs"]]
    assert len(set(keys)) == len(keys)

    before = len(calls)
    assert program.main(line) == rows and len(calls) == before  # only rendered
    page = paths["markdown"].read_text()
    assert paths["plot"].stat().st_size > 0 and "(results.png)" in page
    assert f"scripts/compare_optimizers.py {' '.join(line)}" in page
    for name in fhf.list_optimizers():  # in the table, or in the command for the rest
        assert (f"| `{name}` |" in page) == (name in ("adamw", "schedulefree_adamw"))
        assert f" {name} " in page.replace("\n", " ") or f"`{name}`" in page

    for row in rows:
        own = [r for r in stored["runs"] if r["optimizer"] == row["optimizer"]]
        sweep = {r["learning_rate"]: r["loss"] for r in own if r["seed"] == 0}
        assert row["learning_rate"] == min(sweep, key=sweep.get) and len(row["runs"]) == 2
        losses = [r["loss"] for r in own if r["learning_rate"] == row["learning_rate"]]
        assert row["loss"] == pytest.approx(sum(losses) / 2)
        assert row["spread"] == pytest.approx(abs(losses[0] - losses[1]) / math.sqrt(2))
        assert f"{row['loss']:.3f}" in page and f"{row['state_bytes'] / row['parameters']:.2f}" in page
        for r in own:
            assert [point[0] for point in r["curve"]] == [0, 1, 2, 3] and r["curve"][-1][2] == r["loss"]
            assert r["step_seconds"] >= r["optimizer_seconds"] >= 0
    adamw = next(row for row in rows if row["optimizer"] == "adamw")
    assert adamw["state_bytes"] >= 8 * adamw["parameters"]

    with pytest.raises(ValueError, match=r"results\.json holds runs of .*'steps': 3.* not of .*'steps': 4"):
        program.main([*line, "--steps", "4"])


@pytest.mark.parametrize("name", [spec.name for spec in OPTIMIZERS if spec.needs != "nothing" or spec.closure])
def test_methods_that_need_more_than_a_step_get_it(program, name):
    (row,) = program.main([*TINY, "--optimizers", name, "--factors", "1", "--seeds", "1"])
    curve = row["runs"][0]["curve"]
    assert curve[-1][0] == 3 and curve[-1][2] != curve[0][2]


def test_sophia_gets_its_curvature(program, monkeypatch):
    from frankenstein_hf.optim.curvature import Sophia

    seen, estimate = [], Sophia.estimate
    monkeypatch.setattr(Sophia, "estimate", lambda self, *rest: (seen.append(rest[2]), estimate(self, *rest))[1])
    program.main([*TINY, "--steps", "12", "--optimizers", "sophia", "--factors", "1", "--seeds", "1"])
    assert seen == [0, 10]


def test_the_schedule_warms_up_and_falls_to_zero_and_moves_every_group_by_the_same_factor(program, monkeypatch):
    parse = program.HfArgumentParser(program.Arguments).parse_args_into_dataclasses
    (arguments,) = parse(["--steps", "100"])
    factors = [program.schedule(step, "adamw", arguments) for step in range(100)]
    assert factors[:10] == pytest.approx([(i + 1) / 10 for i in range(10)]) and factors[10] == 1
    assert factors[55] == pytest.approx(0.5) and 0 < factors[99] < 1e-3 and sorted(factors[10:])[::-1] == factors[10:]
    assert {program.schedule(step, "schedulefree_adamw", arguments) for step in range(100)} == {1.0}

    rates, create = [], fhf.create_optimizer

    def watch(*args, **kwargs):
        optimizer = create(*args, **kwargs)
        optimizer.register_step_pre_hook(lambda o, a, k: rates.append([group["lr"] for group in o.param_groups]))
        return optimizer

    monkeypatch.setattr(fhf, "create_optimizer", watch)
    program.main([*TINY, "--optimizers", "muon", "--learning_rates", "0.06", "--seeds", "1"])
    params = OPTIMIZERS.get("muon").params()
    assert sorted(set(rates[0])) == pytest.approx(sorted([0.06, 0.06 / params.lr * params.adamw_lr]))
    assert rates[1] == rates[0] and rates[2] == pytest.approx([rate / 2 for rate in rates[0]])


def test_a_sweep_goes_on_beyond_its_edge(program):
    assert program.extension({0.1: 2.0, 0.3: 1.0, 0.9: 3.0}) is None
    assert program.extension({0.1: 3.0, 0.3: 2.0, 0.9: 1.0}) == pytest.approx(2.7)
    assert program.extension({0.1: 1.0, 0.3: 2.0, 0.9: math.inf}) == pytest.approx(0.0333)
    assert program.extension({0.1: 1.0}) is None


def test_a_run_that_diverges_is_said_so_and_never_the_best(program, tmp_path):
    (row,) = program.main([*TINY, "--optimizers", "sgd", "--learning_rates", "0.1", "1e38", "--seeds", "1",
                           "--extensions", "0", "--json", str(tmp_path / "results.json")])  # fmt: skip
    losses = {r["learning_rate"]: r["loss"] for r in json.loads((tmp_path / "results.json").read_text())["runs"]}
    assert losses[1e38] is None and losses[0.1] == row["loss"] and row["learning_rate"] == 0.1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--optimizers", "adamww"], "did you mean 'adamw'"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--factors", "0"], "--factors must be positive"),
        (["--extensions", "-1"], "--extensions must be at least 0"),
        (["--hidden_size", "48"], "multiple of 32, got 48"),
        (["--num_hidden_layers", "3"], "must be even, got 3"),
    ],
)
def test_bad_flags_are_refused(program, flags, message):
    with pytest.raises(ValueError, match=message):
        program.main([*TINY, *flags])
