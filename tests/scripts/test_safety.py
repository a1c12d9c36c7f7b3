"""Nothing is lost: damaged checkpoints, two runs in one folder, signals, full disks, and files of the user's own."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from frankenstein_hf.data.atomic import write_json
from frankenstein_hf.training import callbacks, failures, preparation
from frankenstein_hf.training.arguments import BadInput
from frankenstein_hf.training.checkpoints import MANIFEST, checkpoint_problem, clear_away, last_complete_checkpoint
from frankenstein_hf.training.failures import RunFailed, Terminated, no_room
from frankenstein_hf.training.lock import LOCK, RunLock
from tests.hub.test_cards import hub, make_trainer  # noqa: F401  (a fixture)


def weights(folder):
    return load_file(Path(folder) / "model.safetensors")


def equal(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of four steps with checkpoints 2 and 4, and its text."""
    from .conftest import SCRIPTS, TINY

    sys.path.insert(0, str(SCRIPTS))
    folder = tmp_path_factory.mktemp("finished")
    text = folder / "text.txt"
    text.write_text("\n\n".join(f"Paragraph {i} says that {i * 7919 % 1000} foxes\njump over it." for i in range(40)))
    values = {"output_dir": folder / "out", "train_file": text, **TINY}
    __import__("run_clm").main([part for name, value in values.items() for part in (f"--{name}", str(value))])
    return folder


@pytest.fixture
def used(finished, tmp_path):
    """A copy of it, whose files may be damaged."""
    shutil.copytree(finished / "out", tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def again(finished, flags):
    """Runs it once more."""
    return lambda **changes: __import__("run_clm").main(flags(**{"train_file": finished / "text.txt", **changes}))


def files_of_a_checkpoint():
    return (
        "model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
        "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "training_args.bin", MANIFEST,
    )  # fmt: skip


@pytest.mark.parametrize("name", files_of_a_checkpoint())
@pytest.mark.parametrize("harm", ["missing", "truncated", "garbled", "empty"])
def test_a_checkpoint_with_one_file_harmed_is_found_out(harm, name, used):
    path = used / "checkpoint-4" / name
    content = path.read_bytes()
    if harm == "missing":
        path.unlink()
    else:
        place = len(content) // 2
        damaged = {"truncated": content[:-1], "empty": b""}.get(
            harm, content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        )
        path.write_bytes(damaged)
    problem = checkpoint_problem(used / "checkpoint-4")
    if name == MANIFEST and harm in (
        "missing",
        "truncated",
    ):  # a checkpoint of the stock Trainer; only a line end is cut
        assert problem is None
    else:
        assert problem is not None and name in problem
        assert last_complete_checkpoint(used) == used / "checkpoint-2"


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "config.json"])
def test_without_a_manifest_what_can_be_seen_is_seen(name, used):
    for harm in ("garbled", "missing"):
        checkpoint = used / "checkpoint-4"
        (checkpoint / MANIFEST).unlink(missing_ok=True)
        path = checkpoint / name
        path.write_bytes(path.read_bytes()[:-7]) if harm == "garbled" else path.unlink()
        problem = checkpoint_problem(checkpoint)
        assert (name == "config.json" and harm == "missing") or problem is not None


def test_a_harmed_checkpoint_is_set_aside_and_training_goes_on_exactly_from_the_one_before(used, again, capsys):
    expected = weights(used)
    (used / "checkpoint-4" / "optimizer.pt").unlink()
    again()
    said = capsys.readouterr().out
    assert "Set checkpoint-4 aside as damaged-checkpoint-4: optimizer.pt is missing" in said
    assert "checkpoint-2" in said and equal(weights(used), expected)
    assert (used / "damaged-checkpoint-4" / "model.safetensors").exists()  # nothing is deleted
    for path in (used / "checkpoint-2", used / "checkpoint-4"):
        (path / "scheduler.pt").write_bytes(b"")
    with pytest.raises(
        BadInput, match=r"no complete checkpoint to resume from .*checkpoint-4: scheduler\.pt has 0 bytes"
    ):
        again()


def test_what_a_killed_run_left_half_written_is_removed(used):
    half = used / "checkpoint-6"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    assert clear_away(used) == [
        "Removed checkpoint-6, which was never finished: trainer_state.json is missing or damaged (FileNotFoundError)"
    ]
    assert clear_away(used) == [] and not half.exists()


def test_damage_to_what_was_noted_about_a_finished_run_does_not_stop_it(used, again):
    (used / "metrics.json").write_text("{")
    assert again()["train"] == {"steps": 4}
    (used / "checkpoint-4" / "config.json").write_text("{")
    with pytest.raises(BadInput, match=r"Cannot read --model_name_or_path .*checkpoint-4"):
        again(output="new", model_name_or_path=used / "checkpoint-4", layer_pattern=None, config_overrides=None)
    model = used / "checkpoint-2" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-9])
    with pytest.raises(BadInput, match=r"Cannot read --model_name_or_path .*checkpoint-2"):
        again(output="new", model_name_or_path=used / "checkpoint-2", layer_pattern=None, config_overrides=None)


# ---------------------------------------------------------------------- two runs


def test_a_second_run_in_the_same_folder_stops_and_names_the_first(used, again):
    before = sorted(used.iterdir())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        began = psutil.Process(other.pid).create_time()
        write_json(
            used / LOCK, {"pid": other.pid, "began": began, "host": os.uname().nodename, "program": "run_mlm.py"}
        )
        with pytest.raises(BadInput, match=rf"another run: process {other.pid} \(run_mlm.py\)"):
            again()
        assert sorted(used.iterdir()) == sorted([*before, used / LOCK])
        other.communicate(b"\n")
    again()  # it is gone: its lock is stale
    assert not (used / LOCK).exists()


@pytest.mark.parametrize(
    "stale",
    [
        {"pid": 2**22 + 1, "began": 1.0},  # no such process
        {"pid": os.getpid(), "began": 1.0},  # another process with its number
        {"pid": "?"}, "no JSON",
    ],
)  # fmt: skip
def test_a_stale_lock_is_recognised(stale, tmp_path):
    content = json.dumps(stale | {"host": os.uname().nodename}) if isinstance(stale, dict) else stale
    (tmp_path / LOCK).write_text(content)
    lock = RunLock(tmp_path)
    lock.check()
    with lock:
        assert lock.left and json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
        with pytest.raises(BadInput, match=f"process {os.getpid()}"), RunLock(tmp_path):
            pass
    assert list(tmp_path.iterdir()) == []


def test_a_lock_of_another_machine_is_respected_with_the_remedy(tmp_path):
    write_json(tmp_path / LOCK, {"pid": 1, "began": 1.0, "host": "elsewhere", "program": "run_clm.py"})
    with pytest.raises(BadInput, match=f"on elsewhere.*delete .*{LOCK}"):
        RunLock(tmp_path).check()


# ---------------------------------------------------------------------- signals and disks


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_a_checkpoint_that_is_gone_on_from_exactly(number, finished, again, tmp_path, monkeypatch):
    def send(self, args, state, control, **kwargs):
        if state.global_step == 1:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(callbacks.Progress, "on_step_end", send)
        with pytest.raises(KeyboardInterrupt) as caught:
            again()
    assert isinstance(caught.value, Terminated) is (number == signal.SIGTERM)
    assert last_complete_checkpoint(tmp_path / "out") == tmp_path / "out" / "checkpoint-1"
    assert (tmp_path / "out" / "checkpoint-1" / MANIFEST).exists() and not (tmp_path / "out" / LOCK).exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    again()
    assert equal(weights(tmp_path / "out"), weights(finished / "out"))


@pytest.mark.parametrize("error, status", [(Terminated(), 143), (KeyboardInterrupt(), 130), (RunFailed("full"), 1)])
def test_the_exit_status_says_what_ended_a_program(error, status):
    def main():
        raise error

    with pytest.raises(SystemExit) as end:
        failures.run_main(main)
    assert end.value.code == status


def test_a_full_disk_is_a_message_that_says_what_is_safe(again, tmp_path, monkeypatch):
    """Files cannot grow beyond a limit while the second checkpoint is written: real writes that really fail."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self, args, state, control, **kwargs):
        if state.global_step == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))

    monkeypatch.setattr(callbacks.Progress, "on_step_end", fill)
    try:
        with pytest.raises(RunFailed) as caught:
            again()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "is full" in str(caught.value) and "Safe is checkpoint-2" in str(caught.value)
    assert "run again to continue" in str(caught.value)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["checkpoint-2"]
    monkeypatch.undo()


@pytest.mark.parametrize(
    "error, expected",
    [
        (OSError(errno.ENOSPC, "x"), True),
        (OSError(errno.EACCES, "x"), False),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), True),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 128 vs 22"), False),  # there is room
        (ValueError("x"), False),
    ],
)
def test_full_disks_are_told_from_other_failures(error, expected, tmp_path):
    assert no_room(error, tmp_path) is expected
    wrapped = RuntimeError("while saving")
    wrapped.__cause__ = error
    assert no_room(wrapped, tmp_path / "not" / "there") is expected


# ---------------------------------------------------------------------- other people's files and models


def test_a_folder_with_files_of_the_users_own_is_refused_before_training(used, again, monkeypatch):
    own = used / "modeling_layer.py"
    own.write_text("mine = 1\n")
    monkeypatch.setattr(preparation, "load_source", lambda *args, **reader: pytest.fail("work before the check"))
    with pytest.raises(BadInput, match=r"modeling_layer\.py.*Move or rename"):
        again()
    assert own.read_text() == "mine = 1\n"


def test_pushes_during_training_do_not_replace_them_either(tmp_path, hub):  # noqa: F811
    (tmp_path / "modeling_layer.py").write_text("mine = 1\n")
    trainer = make_trainer(tmp_path, push_to_hub=True, hub_model_id="me/monster", save_steps=1)
    with pytest.raises(ValueError, match=r"modeling_layer\.py"):
        trainer.train()
    assert (tmp_path / "modeling_layer.py").read_text() == "mine = 1\n"


def test_another_models_folder_is_named_as_such(used, again, flags, tmp_path):
    with pytest.raises(BadInput, match=r"FrankensteinForCausalLM .*this program trains FrankensteinForMaskedLM"):
        __import__("run_mlm").main(flags())  # the other program, the same pattern
    for folder in (used / "checkpoint-4", used / "checkpoint-2"):
        shutil.rmtree(folder)
    write_json(used / "config.json", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    with pytest.raises(BadInput, match=r"another model, LlamaForCausalLM \(model type llama\)"):
        again()
