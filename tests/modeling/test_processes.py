"""`accelerate launch` with two processes does what one does with the doubled batch."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ..tiny import CAUSAL, assert_near, tiny_model, tokens
from .processes import run, run_sharded

ROOT = Path(__file__).parents[2]
PATTERN = ["gated_deltanet", "swa", "standard"]


def two_processes(folder: Path, pattern: list[str], **arguments) -> dict:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # the flag says GPU, but starts processes anywhere; `use_cpu` in the arguments makes them talk through gloo
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2"]
    command += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", f"--main_process_port={port}"]
    command += ["-m", "tests.modeling.processes", str(folder), json.dumps(arguments), *pattern]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    result = torch.load(folder / "result.pt")
    assert result["processes"] == 2
    return result


def assert_same(actual: dict, expected: dict) -> None:
    assert_near(torch.tensor(actual["losses"]), torch.tensor(expected["losses"]), rtol=1e-3)  # logged with four digits
    assert actual["state"].keys() == expected["state"].keys()
    for key, value in expected["state"].items():
        assert_near(actual["state"][key], value, rtol=1e-4, atol=1e-6)


def test_two_processes_equal_one(tmp_path):
    two = two_processes(tmp_path, PATTERN)
    assert two["wrapper"] == "DistributedDataParallel"
    assert_same(two, run(tmp_path, 4, {}, PATTERN))


@pytest.mark.slow
def test_no_mixer_needs_find_unused_parameters(tmp_path):
    """DDP stops at the second step if a parameter had no gradient in the first and it was not told to look for such."""
    pattern = sorted(CAUSAL)
    two = two_processes(tmp_path, pattern, ddp_find_unused_parameters=False, learning_rate=1e-3)
    assert_same(two, run(tmp_path, 4, {"learning_rate": 1e-3}, pattern))


@pytest.mark.slow
def test_fully_sharded_processes_equal_one(tmp_path):
    """torch's FSDP2 by hand: between CPU processes accelerate (1.15) takes DDP instead, without a word."""
    pattern = sorted(CAUSAL)
    two = two_processes(tmp_path, pattern, sharded=True)
    assert two["wrapper"].startswith("FSDP")
    assert_same(two, run_sharded(pattern, 1))


def test_a_context_holds_nothing_that_fsdp_would_follow_in_circles():
    """FSDP2 looks for tensors in the arguments of a layer, through dataclasses, dicts and lists."""

    def depth(value: object, seen: int = 0) -> int:
        assert seen < 20
        if dataclasses.is_dataclass(value):
            value = [getattr(value, field.name) for field in dataclasses.fields(value)]
        values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        return max((depth(item, seen + 1) for item in values), default=seen)

    contexts = []
    model = tiny_model(PATTERN)
    model.model.layers[-1].register_forward_hook(lambda module, arguments, output: contexts.append(arguments[1]))
    model(tokens(1, 5))
    assert contexts[0].rows[0].context is contexts[0] and depth(contexts[0]) < 20
