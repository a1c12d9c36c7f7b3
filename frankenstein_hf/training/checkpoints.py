"""Checkpoints of the stock `Trainer`: which are complete, which to go on from, and saving at the end of a run."""

import json
import os
import pickle
import re
import shutil
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import Trainer

from .arguments import BadInput, ProgramArguments

CHECKPOINT = re.compile(r"checkpoint-(\d+)")
STATE = "trainer_state.json"  # Trainer writes it last
CARD = "README.md"


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


def checkpoint_to_resume(args: ProgramArguments) -> Path | None:
    """The checkpoint that a run told `args` goes on from, or None for a new one.

    Raises:
        BadInput: The one asked for cannot be used, or the output folder holds other things.
    """
    output = Path(args.output_dir or "")
    if output.exists() and not output.is_dir():
        raise BadInput(f"--output_dir {output} is a file.")
    if args.resume_from_checkpoint and str(args.resume_from_checkpoint).lower() not in ("true", "false"):
        if problem := checkpoint_problem(args.resume_from_checkpoint):
            raise BadInput(f"Cannot resume from {args.resume_from_checkpoint}: {problem}.")
        found: Path | None = Path(args.resume_from_checkpoint)
    elif not args.do_train or args.overwrite_output_dir:
        return None
    else:
        found = last_complete_checkpoint(output)
        if found is None and str(args.resume_from_checkpoint).lower() == "true":
            raise BadInput(f"There is no checkpoint to resume from in --output_dir {output}.")
        own = {path.name for path in checkpoints(output)}
        own |= {name for name in os.listdir(output) if name.startswith(".saving-")} if output.is_dir() else set()
        if found is None and output.is_dir() and set(os.listdir(output)) - own:
            raise BadInput(
                f"--output_dir {output} is not empty and holds no complete checkpoint to resume from; choose "
                "another folder, or start over with --overwrite_output_dir."
            )
    return found


def check_optimizer(trainer: Trainer, checkpoint: Path) -> None:
    """Refuse an optimizer state in another order of parameters: torch's fused kernels would read past its end."""
    path = checkpoint / "optimizer.pt"
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or not path.is_file():
        return
    try:
        saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError):
        return  # a kind of state that only Trainer knows how to read
    parameters = [p for group in trainer.create_optimizer().param_groups for p in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    states = [saved["state"].get(number, {}) for number in numbers]
    fits = len(parameters) == len(states) and all(
        state[name].shape == parameter.shape
        for parameter, state in zip(parameters, states)
        for name in ("exp_avg", "exp_avg_sq", "momentum_buffer")
        if isinstance(state.get(name), torch.Tensor)
    )
    if not fits:
        raise BadInput(
            f"The optimizer state in {checkpoint} does not fit the model: it was written by another version of the "
            "code or for another model. Choose another --output_dir or --overwrite_output_dir."
        )


def save_atomically(trainer: Trainer, output: Path) -> None:
    """`trainer.save_model`, with every file renamed into place once all of them are written."""
    output.mkdir(parents=True, exist_ok=True)
    temporary = (
        Path(tempfile.mkdtemp(prefix=".saving-", dir=output)) if trainer.args.should_save else output / ".saving-"
    )
    try:
        if trainer.args.should_save and (output / CARD).is_file():
            shutil.copyfile(output / CARD, temporary / CARD)  # decides whether it is written anew
        trainer.save_model(str(temporary), _internal_call=True)  # without a push to the Hub of its own
        if trainer.args.should_save:
            for path in sorted(temporary.rglob("*")):
                if path.is_file():
                    target = output / path.relative_to(temporary)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(path, target)
    finally:
        if trainer.args.should_save:
            shutil.rmtree(temporary, ignore_errors=True)
