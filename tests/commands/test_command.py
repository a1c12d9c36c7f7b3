"""The command `frankenstein`: answers without torch, exit statuses, JSON on stdout, and a newcomer's path."""

import json
import subprocess
import sys

import pytest

from frankenstein_hf import recipes
from frankenstein_hf.commands.app import app, status_of
from frankenstein_hf.training.failures import RunFailed, Terminated

from ..scripts.conftest import _own_caches, text  # noqa: F401

NANO = ["model.num_hidden_layers=4", "data.block_size=16", "tokenizer.train.vocab_size=300", "model.hidden_size=16"]
NANO += ["training.max_steps=2", "training.per_device_train_batch_size=2"]


def run(capsys, *argv):
    status = status_of([str(argument) for argument in argv])
    found = capsys.readouterr()
    return status, found.out, found.err


@pytest.mark.parametrize(
    "argv",
    [["--help"], ["train", "--help"], ["list", "mixers"], ["list", "mixers", "gla"], ["list", "presets"], ["schema"]],
)
def test_help_and_lists_need_neither_torch_nor_transformers(argv):
    code = (
        "import sys, time; from frankenstein_hf.commands.app import status_of; status = status_of(sys.argv[1:]);"
        "print(status, time.process_time(), *({'torch', 'transformers', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True)
    status, seconds, *heavy = done.stderr.splitlines()[-1].split()
    assert status == "0" and not heavy and float(seconds) < 1.5
    assert done.stdout


COMMANDS = "train evaluate compare generate predict embed describe validate schema list new test push doctor"


@pytest.mark.parametrize("command", COMMANDS.split())
def test_every_subcommand_says_what_it_does(command, capsys):
    status, out, _ = run(capsys, command, "--help")
    assert status == 0 and "Usage" in out
    assert command in {own.name or own.callback.__name__.rstrip("_") for own in app.registered_commands}


@pytest.mark.parametrize("kind", [*recipes.installed_schema()["x-parts"], "presets", "tasks", "plugins"])
def test_lists_say_of_each_part_what_it_is(kind, capsys):
    status, out, _ = run(capsys, "list", kind, "--json")
    found = json.loads(out)
    assert status == 0 and all(own["summary"] for own in found.values())
    for name in list(found)[:3]:
        status, out, _ = run(capsys, "list", kind, name, "--json")
        assert status == 0 and json.loads(out)["name"] == name
    if kind == "optimizers":
        _, out, _ = run(capsys, "list", kind, "muon")
        assert "ns_steps (a whole number" in out and "default 5" in out


def test_bad_input_gives_status_two_and_a_line_for_each_problem(tmp_path, capsys):
    file = tmp_path / "bad.yaml"
    file.write_text("model: {hiden_size: 3}\ntraining: {max_step: 1}\n")
    for argv, words in (
        (
            ["validate", file],
            ["bad.yaml:1:9: unknown key model.hiden_size", "bad.yaml:2:12: unknown key training.max_"],
        ),
        (["train", "nowhere.yaml"], ["nowhere.yaml: there is no such file"]),
        (["train", "modernbrt"], ["did you mean 'modernbert'"]),
        (["list", "mixer"], ["did you mean 'mixers'"]),
        (["list", "mixers", "glaa"], ["did you mean 'gla'"]),
        (["evaluate", tmp_path], ["has no recipe.resolved.yaml"]),
        (["compare", "one"], ["needs two models"]),
        (["push", tmp_path], ["has no config.json"]),
        (["nonsense"], ["nonsense"]),
        (["new", "mixer", "My-Mixer"], ["lower-case letters"]),
    ):
        status, out, err = run(capsys, *argv)
        assert (status, out) == (2, "")
        assert all(any(word in line for line in err.splitlines()) for word in words), err
        assert "Traceback" not in err
    status, out, _ = run(capsys, "validate", file, "--json")
    assert status == 2 and len(json.loads(out)["problems"]) == 2


@pytest.mark.parametrize(
    "error, status", [(KeyboardInterrupt(), 130), (Terminated(), 143), (RunFailed("the disk is full"), 1)]
)
def test_what_ends_a_run_from_outside_decides_the_status(error, status, capsys, monkeypatch, tmp_path):
    def end(recipe):
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recipes, "run", end)
    found, out, err = run(capsys, "train", "hybrid+nano")
    assert (found, out) == (status, "") and len(err.splitlines()) == 1


def test_a_newcomer_trains_evaluates_describes_and_compares(tmp_path, text, capsys, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    common = [f"data.train_file={text}", *NANO]
    status, out, _ = run(capsys, "validate", "hybrid+nano", *common)
    assert (status, out) == (0, "hybrid+nano: nothing is wrong.\n")

    status, out, err = run(capsys, "train", "hybrid+nano", *common, "--dry-run", "--json")
    planned = json.loads(out)
    assert status == 0 and not (tmp_path / "runs").exists()
    status, out, err = run(capsys, "train", "hybrid+nano", *common, "--json")
    metrics = json.loads(out)
    assert status == 0 and "held-out loss" in err
    assert planned["parameters"]["all"] == metrics["model"]["parameters"] and planned["steps"] == 2
    assert planned["rows"]["to train on"] == metrics["data"]["rows"]["train"]
    assert planned["vocab_size"] == metrics["model"]["vocab_size"]
    first = tmp_path / "runs" / "hybrid+nano"

    status, out, _ = run(capsys, "train", "hybrid+nano", *common, "--resume", "never")
    assert status == 3 and out == ""
    status, out, _ = run(capsys, "evaluate", first, "--json")
    assert status == 0 and json.loads(out)["before"] == metrics["after"]

    for what in (first, "hybrid+nano"):
        status, out, err = run(capsys, "describe", what, "--json")
        assert status == 0, err
        described = json.loads(out)
        assert status == 0 and described["layers"] == ["gated_deltanet", "swa", "gated_deltanet", "standard"] * (
            1 if what == first else 3
        )
    status, out, _ = run(capsys, "describe", first)
    assert "decode state of one sequence" in out and f"{metrics['model']['parameters']:,}" in out

    other = ["training.output_dir=other", "model.layer_pattern=[swa]", "training.learning_rate=0.01"]
    assert run(capsys, "train", "hybrid+nano", *common, *other)[0] == 0
    status, out, err = run(capsys, "compare", first, "other", first, "--json")
    rows = json.loads(out)["models"]
    assert status == 0 and rows[2]["difference"] == rows[2]["low"] == rows[2]["high"] == 0.0
    assert rows[1]["low"] <= rows[1]["difference"] <= rows[1]["high"] and rows[1]["difference"] != 0
    assert rows[0]["score"] == pytest.approx(metrics["after"]["loss"], rel=0.02)
    assert run(capsys, "compare", first, "other", "--fail-if-worse", "-1")[0] == 3
    seeds = ["training.seed=7", "training.output_dir=again"]
    assert run(capsys, "train", "hybrid+nano", *common, *seeds)[0] == 0
    status, _, err = run(capsys, "compare", first, "again")  # which held out other rows of the file
    assert status == 2 and "again held out other rows of the same data" in err

    status, out, _ = run(capsys, "generate", first, "Paragraph", "--max-new-tokens", "3", "--json")
    assert status == 0 and json.loads(out)[0]["prompt"] == "Paragraph"
    status, out, _ = run(capsys, "push", first, "--repo-id", "me/model", "--dry-run", "--json")
    assert status == 0 and "model.safetensors" in json.loads(out)["files"]
    assert run(capsys, "push", first, "--repo-id", "me/model")[0] == 3  # nobody is there to say yes
    assert run(capsys, "predict", first, "x")[0] == 2


def test_runs_from_several_seeds_are_compared_by_seeds_and_rows(tmp_path, text, capsys, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("\n\n".join(f"Paragraph {i} says that {i} foxes sleep." for i in range(100, 120)))
    common = [f"data.train_file={text}", f"data.validation_file={held_out}", *NANO]
    for name, pattern in (("a", "[swa]"), ("b", "[gla]")):
        for seed in (1, 2):
            own = [f"training.seed={seed}", f"training.output_dir={name}{seed}", f"model.layer_pattern={pattern}"]
            assert run(capsys, "train", "hybrid+nano", *common, *own)[0] == 0
    status, out, err = run(capsys, "compare", "a1,a2", "b1,b2", "--json")
    assert status == 0, err
    found = json.loads(out)
    row = found["models"][1]
    assert row["low"] < row["difference"] < row["high"] and row["dominant"] in ("seeds", "items")
    assert set(found["perhaps_best"]) <= {"a1,a2", "b1,b2"} and found["perhaps_best"]
    assert run(capsys, "compare", "a1,a2", "b1")[0] == 2


def test_what_is_begun_is_written_once_and_its_test_fails_until_it_is_written(tmp_path, capsys):
    for what in ("mixer", "recipe", "plugin"):
        status, out, _ = run(capsys, "new", what, "my_part", "--in", tmp_path)
        assert status == 0 and all((tmp_path / line).exists() for line in out.splitlines())
        assert run(capsys, "new", what, "my_part", "--in", tmp_path)[0] == 3
    assert run(capsys, "validate", tmp_path / "my_part.yaml")[0] == 0
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]; import torch, my_part, test_my_part as t\n"
        "try: t.test_my_part_is_the_recurrence_of_the_paper()\n"
        "except NotImplementedError: print('to be written')\n"
        "def eager(x, decay, h):\n"
        "    hs = []\n"
        "    for t in range(x.shape[1]): hs.append(h := decay * h + x[:, t])\n"
        "    return torch.stack(hs, 1), h\n"
        "my_part.eager_my_part = t.eager_my_part = eager\n"
        "t.test_my_part_is_the_recurrence_of_the_paper()\n"
        "import frankenstein_hf as f\n"
        "c = f.FrankensteinConfig(vocab_size=9, hidden_size=8, num_attention_heads=2, num_hidden_layers=1, "
        "layer_pattern='my_part')\n"
        "print(f.FrankensteinForCausalLM(c).eval().generate(torch.tensor([[1, 2]]), max_new_tokens=3, "
        "pad_token_id=0).shape)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["to be written", "torch.Size([1, 5])"], done.stderr
