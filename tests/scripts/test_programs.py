"""The training programs: what they leave behind, resuming, files of flags, and bad input."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, pipeline

import frankenstein_hf as fhf
from frankenstein_hf.data.atomic import write_json
from frankenstein_hf.training import callbacks, failures, preparation
from frankenstein_hf.training.arguments import BadInput
from frankenstein_hf.training.checkpoints import checkpoint_problem, last_complete_checkpoint, write_manifest

from ..hub.own import registering
from .conftest import TINY


def _weights(folder):
    return load_file(Path(folder) / "model.safetensors")


def _equal(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_a_run_leaves_a_model_a_tokenizer_and_metrics(program, flags, tmp_path):
    metrics = program.main(flags(learning_rate=0.01))
    out = tmp_path / "out"
    assert json.loads((out / "metrics.json").read_text()) == metrics
    assert metrics["train"]["steps"] == 4 and metrics["after"]["loss"] < metrics["before"]["loss"]
    assert 2 < metrics["unigram"]["loss"] < metrics["before"]["loss"]
    assert not [path for path in out.rglob("*") if ".saving" in path.name or path.suffix == ".tmp"]
    task, auto = ("fill-mask", AutoModelForMaskedLM) if "mlm" in program.__name__ else ("text-generation", None)
    model = (auto or AutoModelForCausalLM).from_pretrained(out)
    use = pipeline(task, model=model, tokenizer=AutoTokenizer.from_pretrained(out))
    assert use("Paragraph [MASK] says") if auto else use("Paragraph", max_new_tokens=3)


def test_an_interrupted_run_keeps_a_checkpoint_and_goes_on_as_if_nothing_had_happened(
    program, flags, tmp_path, monkeypatch
):
    extra = {"gradient_accumulation_steps": 2, "save_steps": 3}
    if program.__name__ == "run_mlm":
        extra |= {"mask_rate": 0.6, "final_mask_rate": 0.1, "packing": "documents", "block_size": 64}
    program.main(flags("whole", **extra))

    def press_ctrl_c(self, args, state, control, **kwargs):
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(callbacks.Progress, "on_step_end", press_ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            program.main(flags("parts", **extra))
    parts = tmp_path / "parts"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert last_complete_checkpoint(parts) == parts / "checkpoint-2"
    assert not (parts / "metrics.json").exists() and not (parts / "model.safetensors").exists()

    metrics = program.main(flags("parts", **extra))
    assert metrics["train"]["steps"] == 4
    whole = json.loads((tmp_path / "whole" / "metrics.json").read_text())
    assert (metrics["before"], metrics["after"]) == (whole["before"], whole["after"])
    assert _equal(_weights(parts), _weights(tmp_path / "whole"))
    assert _equal(_weights(parts), _weights(parts / "checkpoint-4"))

    program.main(flags("parts", **extra))  # finished: nothing is trained, nothing changes
    assert _equal(_weights(parts), _weights(tmp_path / "whole"))


@pytest.mark.parametrize("ask", [{"max_steps": 4}, {"max_steps": -1, "num_train_epochs": 0.3}])
def test_a_finished_run_started_again_changes_nothing(ask, flags, tmp_path, capsys):
    """Also where it ends amid an epoch: Trainer itself would take one step more."""
    run_clm = __import__("run_clm")
    asked = flags(lr_scheduler_type="constant", **ask)
    first = run_clm.main(asked)
    weights, names = _weights(tmp_path / "out"), sorted(path.name for path in (tmp_path / "out").iterdir())
    again = run_clm.main(asked)
    assert "nothing to train" in capsys.readouterr().out
    assert _equal(_weights(tmp_path / "out"), weights)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert {key: again[key] for key in ("train", "before", "after")} == {
        key: first[key] for key in ("train", "before", "after")
    }
    more = run_clm.main(flags(lr_scheduler_type="constant", max_steps=first["train"]["steps"] + 2))
    assert more["train"]["steps"] == first["train"]["steps"] + 2


def test_unknown_flags_are_named_with_what_was_meant(flags, tmp_path):
    run_clm = __import__("run_clm")
    for extra, message in (
        (["--max_stepz", "3"], r"--max_stepz'; did you mean --max_steps"),
        (["--hidden_size", "64"], "--config_overrides hidden_size=…"),
        (["stray"], "Unknown argument 'stray'"),
    ):
        with pytest.raises(BadInput, match=message):
            run_clm.main([*flags(), *extra])
    with pytest.raises(BadInput, match=r"must be the only argument: write --max_steps into run\.yaml"):
        run_clm.main(["run.yaml", "--max_steps", "6"])
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_cut_short_is_not_resumed_from(flags, tmp_path, capsys):
    import run_clm

    run_clm.main(flags())
    out = tmp_path / "out"
    expected = _weights(out)
    (out / "metrics.json").unlink()
    weights = out / "checkpoint-4" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors has" in checkpoint_problem(out / "checkpoint-4")
    state = out / "checkpoint-2" / "trainer_state.json"
    complete = state.read_text()
    state.write_text(complete[:50])
    assert "trainer_state.json" in checkpoint_problem(out / "checkpoint-2")
    with pytest.raises(BadInput, match="no complete checkpoint"):
        run_clm.main(flags())
    state.write_text(complete)
    optimizer = out / "checkpoint-2" / "optimizer.pt"
    whole = optimizer.read_bytes()
    optimizer.write_bytes(whole[:-10])
    assert "optimizer.pt has" in checkpoint_problem(out / "checkpoint-2")
    optimizer.write_bytes(whole)

    saved = torch.load(optimizer, weights_only=True)  # as if the parameters had been in another order then
    group = saved["param_groups"][0]["params"]
    saved["state"][group[0]], saved["state"][group[1]] = saved["state"][group[1]], saved["state"][group[0]]
    torch.save(saved, optimizer)
    write_manifest(out / "checkpoint-2")
    with pytest.raises(BadInput, match="optimizer state"):
        run_clm.main(flags())
    optimizer.write_bytes(whole)
    write_manifest(out / "checkpoint-2")
    capsys.readouterr()
    run_clm.main(flags())
    captured = capsys.readouterr()
    output = captured.out
    assert "missing keys" not in captured.err
    assert "Set checkpoint-4 aside as damaged-checkpoint-4: model.safetensors has" in output
    assert (out / "damaged-checkpoint-4").is_dir()
    assert "Resuming from" in output and "checkpoint-2" in output
    assert _equal(_weights(out), expected)


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_file_of_flags_says_the_same_as_flags(flags, text, tmp_path, suffix):
    import run_mlm

    run_mlm.main(flags("by_flags", learning_rate="2e-3", max_steps=2, mixer_params='{"gated_deltanet": {}}'))
    settings = {"output_dir": str(tmp_path / "by_file"), "train_file": str(text), **TINY, "max_steps": 2}
    settings["layer_pattern"] = ["gated_deltanet", "standard"]
    settings["config_overrides"] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    settings["mixer_params"] = {"gated_deltanet": {}}
    file = tmp_path / f"settings.{suffix}"
    lines = [f"{key}: {json.dumps(value)}\n" for key, value in settings.items()]
    if suffix == "yaml":
        file.write_text("".join(lines) + "learning_rate: 2e-3\n")  # YAML 1.1 takes this for text
    else:
        file.write_text(json.dumps({**settings, "learning_rate": 2e-3}))
    run_mlm.main([str(file)])
    assert _equal(_weights(tmp_path / "by_flags"), _weights(tmp_path / "by_file"))


BAD = {
    "missing file": ({"train_file": "nowhere.txt"}, "nowhere.txt: there is no such file"),
    "unknown type": ({"train_file": "text.doc"}, r"'\.doc'.*\.parquet"),
    "two sources": ({"dataset_name": "some/dataset"}, "not both"),
    "validation only": ({"train_file": None, "validation_file": "x.txt"}, "needs --train_file"),
    "config of no dataset": ({"dataset_config_name": "en"}, "needs --dataset_name"),
    "unknown mixer": ({"layer_pattern": "gated_deltanet,standart"}, "did you mean 'standard'"),
    "unknown parameter": ({"mixer_params": '{"gated_deltanet": {"headz": 2}}'}, "headz"),
    "broken JSON": ({"mixer_params": "{swa: 3}"}, "--mixer_params is not valid JSON"),
    "unknown key": ({"config_overrides": "hiden_size=8"}, "did you mean 'hidden_size'"),
    "no pair": ({"config_overrides": "hidden_size"}, "key=value"),
    "vocabulary in the wrong place": ({"config_overrides": "vocab_size=99"}, "--vocab_size"),
    "impossible size": ({"config_overrides": "hidden_size=17,num_hidden_layers=2"}, "not divisible"),
    "unknown packing": ({"packing": "block"}, "did you mean 'blocks'"),
    "negative length": ({"block_size": -1}, "--block_size -1 must be at least 1"),
    "nothing to resume": ({"resume_from_checkpoint": "checkpoint-9"}, "no such folder"),
    "no checkpoint": ({"resume_from_checkpoint": "true"}, "no checkpoint to resume from"),
    "two models": ({"model_name_or_path": "some/model"}, "cannot be chosen with --model_name_or_path"),
    "no such checkpoint": (
        {"model_name_or_path": "nowhere/at/all", "layer_pattern": None, "config_overrides": None},
        "Cannot read --model_name_or_path nowhere/at/all",
    ),
    "no text": ({"output_dir": "a\udcff"}, "--output_dir .* is no text in UTF-8"),
    "no name of the Hub": ({"hub_model_id": 'x"); import os; ("'}, "--hub_model_id .* must be a name on the Hub"),
    "no licence": ({"license": "MIT License"}, "--license 'MIT License' must be a short name"),
    "no language": ({"language": "en,Deutsch"}, "--language 'Deutsch' must be a short name"),
    "no place to write": ({"output_dir": None}, "--output_dir is missing"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named_before_anything_is_written(case, flags, tmp_path, monkeypatch):
    import run_clm

    changes, message = BAD[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        preparation, "load_source", lambda *args, **reader: pytest.fail("data was read before the check")
    )
    before = sorted(tmp_path.iterdir())
    with pytest.raises(BadInput, match=message):
        run_clm.main(flags(**changes))
    assert sorted(tmp_path.iterdir()) == before


def test_bad_files_of_flags_and_bad_mask_rates_are_named(flags, tmp_path):
    import run_mlm

    file = tmp_path / "settings.yaml"
    for content, message in (
        ("learning_rat: 1", "did you mean 'learning_rate'"),
        ("- 1", "keys and values"),
        ("a: [", "not valid YAML"),
        ("output_dir: x\nlearning_rate: fast", "must be a number"),
    ):
        file.write_text(content)
        with pytest.raises(BadInput, match=message):
            run_mlm.main([str(file)])
    with pytest.raises(BadInput, match="no such file"):
        run_mlm.main([str(tmp_path / "absent.json")])
    with pytest.raises(BadInput, match=r"Unknown --mask_schedule 'cosin'.*cosine"):
        run_mlm.main(flags(mask_schedule="cosin"))
    with pytest.raises(BadInput, match="leave one out"):
        run_mlm.main(flags(mask_schedule="cosine", final_mask_rate=0.1))
    with pytest.raises(BadInput, match="--final_mask_rate 2"):
        run_mlm.main(flags(final_mask_rate=2))


def test_a_used_output_folder_is_not_overwritten_unasked(flags, tmp_path):
    import run_clm

    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("precious")
    with pytest.raises(BadInput, match="not empty"):
        run_clm.main(flags(max_steps=2))
    run_clm.main([*flags(max_steps=2), "--overwrite_output_dir"])
    assert (out / "thesis.txt").read_text() == "precious"
    with pytest.raises(BadInput, match=r"another model: layer_pattern is \['gated_deltanet', 'standard'\]"):
        run_clm.main(flags(max_steps=2, layer_pattern="gla"))
    run_clm.main([*flags(max_steps=2, layer_pattern="gla"), "--overwrite_output_dir"])
    assert json.loads((out / "config.json").read_text())["layer_pattern"] == ["gla"]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_tables_are_read_and_their_column_of_text_is_found(kind, flags, tmp_path):
    import run_clm
    from datasets import Dataset

    rows = {"number": list(range(30)), "body": [f"Row {i} of a table with text in it." for i in range(30)]}
    path = tmp_path / f"table.{kind}"
    writer = {"jsonl": "to_json", "csv": "to_csv", "parquet": "to_parquet"}[kind]
    getattr(Dataset.from_dict(rows), writer)(path)
    if kind == "csv":
        with pytest.raises(BadInput, match=r"--text_column 'text'.*body"):
            run_clm.main(flags(train_file=path, text_column="text"))
    metrics = run_clm.main(flags(train_file=path, validation_file=path, max_steps=1, max_train_samples=20))
    assert metrics["data"]["documents"] == {"train": 20, "validation": 30}


def test_training_goes_on_from_a_checkpoint_and_can_be_pushed(flags, tmp_path, monkeypatch):
    import run_clm

    run_clm.main(flags(max_steps=2))
    pushed = []
    monkeypatch.setattr("transformers.Trainer.push_to_hub", lambda self, **card: pushed.append(card))
    monkeypatch.setattr("transformers.Trainer.init_hf_repo", lambda self, *args, **kwargs: None)
    monkeypatch.setattr("transformers.Trainer._push_from_checkpoint", lambda self, folder: None)
    old = str(tmp_path / "out")
    changes = {"model_name_or_path": old, "layer_pattern": None, "config_overrides": None, "max_steps": 1}
    metrics = run_clm.main([*flags("next", **changes), "--push_to_hub"])
    assert metrics["before"] == json.loads((tmp_path / "out" / "metrics.json").read_text())["after"]
    assert pushed == [{"tasks": "text-generation", "finetuned_from": old}]


def test_a_failed_write_leaves_the_old_file(flags, tmp_path, monkeypatch):
    path = write_json(tmp_path / "metrics" / "metrics.json", {"loss": 1})
    with pytest.raises(TypeError):
        write_json(path, {"loss": object()})
    monkeypatch.setattr(os, "replace", lambda *args: pytest.fail("interrupted"))
    with pytest.raises(pytest.fail.Exception):
        write_json(path, {"loss": 2})
    assert json.loads(path.read_text()) == {"loss": 1}
    assert list(path.parent.iterdir()) == [path]


def test_bad_input_ends_a_program_with_one_line_and_a_status(capsys):
    def bad():
        raise BadInput("--block_size 0 must be at least 1.")

    with pytest.raises(SystemExit) as end:
        failures.run_main(bad)
    assert end.value.code == 2 and "error: --block_size 0" in capsys.readouterr().err


def conversations(path):
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {i} plus one?"},
                {"role": "assistant", "content": f"That is {i + 1}."},
            ]
        }
        for i in range(40)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_conversations_train_on_the_assistants_turns_and_leave_a_model_to_talk_to(flags, tmp_path, capsys):
    import run_clm

    file = conversations(tmp_path / "talk.jsonl")
    metrics = run_clm.main(flags(train_file=file, block_size=64))
    assert metrics["data"]["conversations"] == {"train": 38, "validation": 2}
    assert metrics["data"]["packing"] == "documents"
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("python -c ") and "'role': 'user'" in last.replace("'\"'\"'", "'")
    talk = pipeline("text-generation", str(tmp_path / "out"))
    answer = talk([{"role": "user", "content": "What is 3 plus one?"}], max_new_tokens=4)[0]["generated_text"]
    assert answer[-1]["role"] == "assistant"
    again = run_clm.main(flags(train_file=file, block_size=64))
    assert again["after"] == metrics["after"]


def test_a_chat_template_goes_with_a_tokenizer_trained_on_text(flags, tmp_path):
    import run_clm

    own = tmp_path / "own.jinja"
    own.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    for name, asked in (("a", "turns"), ("b", own)):
        run_clm.main(flags(output=name, chat_template=asked, max_steps=1))
        assert AutoTokenizer.from_pretrained(tmp_path / name).chat_template
    own.write_text("{% for %}")
    with pytest.raises(BadInput, match="chat template cannot be used"):
        run_clm.main(flags(output="c", chat_template=own))
    with pytest.raises(BadInput, match="none of turns"):
        run_clm.main(flags(output="c", chat_template="turn"))
    new = {"layer_pattern": None, "config_overrides": None, "max_steps": 1, "block_size": 64}
    run_clm.main(flags(output="d", max_steps=1))
    file = conversations(tmp_path / "talk.jsonl")
    with pytest.raises(BadInput, match="no chat template for the conversations in 'messages'"):
        run_clm.main(flags(output="e", train_file=file, model_name_or_path=tmp_path / "d", **new))


def test_the_last_line_is_a_command_that_uses_the_model(program, flags, tmp_path, capsys):
    import shlex

    output = "an 'odd' name"
    program.main(flags(output, max_steps=1))
    where, command = capsys.readouterr().out.strip().splitlines()[-2:]
    assert where == f"The model is in {tmp_path / output}. To use it:"
    python, option, code = shlex.split(command)
    assert (python, option) == ("python", "-c")
    exec(code, {"print": lambda found: print(type(found).__name__)})
    assert capsys.readouterr().out.strip() == "list"


def test_without_a_terminal_lines_tell_how_far_training_is(flags, monkeypatch, capsys):
    import run_clm

    monkeypatch.setattr(callbacks.Progress, "every", 0.0)
    run_clm.main(flags())
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  step ")]
    assert len(lines) == 4 and lines[-1].startswith("  step 4 of 4, training loss ")
    assert all(" left" in line and ("steps/s" in line or "s a step" in line) for line in lines)
    monkeypatch.setattr(callbacks.Progress, "every", 1e9)
    run_clm.main(flags("quiet"))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  step ")]
    assert len(lines) == 1  # the end is always told
    assert [callbacks.duration(seconds) for seconds in (3, 200, 7500)] == ["3 s", "3 min 20 s", "2 h 5 min"]


def test_there_are_about_fifty_losses_whatever_the_length(flags):
    import run_clm

    metrics = run_clm.main(flags(max_steps=120, save_steps=500, vocab_size=260))
    assert 40 <= len(metrics["curve"]["train"]) <= 60


def test_a_mixer_whose_code_cannot_travel_is_found_before_anything_is_written(program, flags, tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "load_source", lambda *args, **reader: pytest.fail("data was read too early"))
    spec = fhf.MixerSpec(name="somebodys", family="test", summary="Nothing.", reference="none")
    with registering():
        fhf.register_mixer(spec, type("Identity", (fhf.Mixer,), {}))
        with pytest.raises(BadInput, match="'somebodys' cannot travel"):
            program.main(flags(layer_pattern="somebodys"))
    assert not (tmp_path / "out").exists()
