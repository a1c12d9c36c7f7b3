"""Telling a complete checkpoint of the stock `Trainer` from one whose writing was cut short."""

import json
import os
import re
import shutil
import zipfile
from pathlib import Path

CHECKPOINT = re.compile(r"checkpoint-(\d+)")
STATE = "trainer_state.json"  # Trainer writes it last


def checkpoint_problem(path: str | os.PathLike) -> str | None:
    """What is wrong with a checkpoint folder, or None when it can be resumed from."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_dir():
        return "there is no such folder"
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        step = state["global_step"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{STATE} is missing or damaged ({type(error).__name__})"
    if (match := CHECKPOINT.fullmatch(path.name)) and step != int(match[1]):
        return f"{STATE} belongs to step {step}"
    for file in sorted(path.iterdir()):
        if file.suffix == ".safetensors":
            try:
                with safe_open(file, "pt"):
                    pass
            except (SafetensorError, OSError):
                return f"{file.name} is truncated or corrupt"
        elif file.suffix in (".pt", ".pth", ".bin") and not zipfile.is_zipfile(file):
            return f"{file.name} is truncated or corrupt"
    return None


def checkpoints(output_dir: str | os.PathLike) -> list[Path]:
    """The checkpoint folders in `output_dir`, the latest step first."""
    found = [path for path in Path(output_dir).glob("checkpoint-*") if CHECKPOINT.fullmatch(path.name)]
    return sorted(found, key=lambda path: -int(path.name.rpartition("-")[2]))


def last_complete_checkpoint(output_dir: str | os.PathLike) -> Path | None:
    """The latest checkpoint that can be resumed from."""
    return next((path for path in checkpoints(output_dir) if checkpoint_problem(path) is None), None)


def remove_incomplete(output_dir: str | os.PathLike) -> list[str]:
    """Delete what an interrupted run left half-written; returns what was deleted and why."""
    removed = []
    for path in checkpoints(output_dir):
        if problem := checkpoint_problem(path):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(f"{path.name}: {problem}")
    for path in Path(output_dir).glob(".saving-*"):
        shutil.rmtree(path, ignore_errors=True)
    return removed
