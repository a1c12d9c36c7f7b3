"""Checkpoints of the stock `Trainer`: which are complete, which to go on from, and saving at the end of a run."""

import hashlib
import json
import os
import pickle
import re
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..data.atomic import write_json
from ..hub.foreign import one_line
from ..modeling.hub_bundle import bundle_files, refuse_foreign
from .arguments import BadInput, ProgramArguments
from .lock import LOCK

CHECKPOINT = re.compile(r"checkpoint-(\d+)")
STATE = "trainer_state.json"  # Trainer writes it last
MANIFEST = "manifest.json"  # and we close it with this
CARD = "README.md"


def write_manifest(path: str | os.PathLike) -> None:
    """Note names, sizes and SHA-256 of a finished checkpoint's files, in a file that is written last."""
    path = Path(path)
    files = {}
    for file in _files(path):
        with open(file, "rb") as content:
            files[file.relative_to(path).as_posix()] = {
                "size": file.stat().st_size,
                "sha256": hashlib.file_digest(content, "sha256").hexdigest(),
            }
            os.fsync(content.fileno())  # the manifest must not reach the disk before them
    write_json(path / MANIFEST, {"files": files})


def checkpoint_problem(path: str | os.PathLike) -> str | None:
    """What is wrong with a checkpoint folder, or None when it can be resumed from, exactly."""
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
    return _not_as_noted(path) if (path / MANIFEST).exists() else _unreadable(path)


def _not_as_noted(path: Path) -> str | None:
    try:
        noted = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
        expected = [(name, entry["size"], entry["sha256"]) for name, entry in noted.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} is damaged ({type(error).__name__})"
    for name, size, digest in expected:
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size:,} bytes instead of {size:,}"
        with open(file, "rb") as content:
            if hashlib.file_digest(content, "sha256").hexdigest() != digest:
                return f"{name} is damaged (its checksum is another)"
    return _incomplete({name for name, *_ in expected})


def _unreadable(path: Path) -> str | None:
    """The same for a checkpoint without a manifest: of the stock Trainer, or one that was killed just before."""
    from safetensors import SafetensorError, safe_open

    for file in _files(path):
        try:
            if file.suffix == ".safetensors":
                with safe_open(file, "pt"):
                    pass
            elif file.suffix in (".pt", ".pth", ".bin"):
                with zipfile.ZipFile(file) as archive:
                    if archive.testzip() is not None:
                        return f"{file.name} is damaged"
            elif file.suffix == ".json":
                json.loads(file.read_text(encoding="utf-8"))
        except (SafetensorError, zipfile.BadZipFile, ValueError, OSError):
            return f"{file.name} is truncated or damaged"
    return _incomplete({file.relative_to(path).as_posix() for file in _files(path)})


def _incomplete(names: set[str]) -> str | None:
    """What a checkpoint lacks that an exact continuation needs; states in many parts are left to their makers."""
    if any(name.count("/") and ("optimizer" in name or "optim_states" in name) for name in names):
        return None  # of DeepSpeed or FSDP
    if not any(re.fullmatch(r"(.*model.*|adapter.*)\.(safetensors|bin)(\.index\.json)?", name) for name in names):
        return "the weights are missing"
    wanted = ["optimizer.pt", "scheduler.pt"]
    if not any(re.fullmatch(r"rng_state(_\d+)?\.pth", name) for name in names):
        wanted.append("rng_state.pth")
    missing = [name for name in wanted if name not in names]
    return f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing" if missing else None


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file() and file.name != MANIFEST)


class Manifests(TrainerCallback):
    """Closes every checkpoint of a run with its manifest."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the manifest, once all processes have written their part."""
        PartialState().wait_for_everyone()
        if args.should_save:
            write_manifest(Path(str(args.output_dir)) / f"checkpoint-{state.global_step}")


def checkpoints(output_dir: str | os.PathLike) -> list[Path]:
    """The checkpoint folders in `output_dir`, the latest step first."""
    found = [path for path in Path(output_dir).glob("checkpoint-*") if CHECKPOINT.fullmatch(path.name)]
    return sorted(found, key=lambda path: -int(path.name.rpartition("-")[2]))


def last_complete_checkpoint(output_dir: str | os.PathLike) -> Path | None:
    """The latest checkpoint that can be resumed from."""
    return next((path for path in checkpoints(output_dir) if checkpoint_problem(path) is None), None)


def clear_away(output_dir: str | os.PathLike) -> list[str]:
    """Delete what an interrupted run left half-written, and set aside checkpoints newer than the last good one.

    Returns:
        What was done and why, a line for each.
    """
    said = []
    for path in checkpoints(output_dir):
        problem = checkpoint_problem(path)
        if problem is None:
            break  # the older ones stay in reserve
        if _never_finished(path):
            shutil.rmtree(path, ignore_errors=True)
            said.append(f"Removed {path.name}, which was never finished: {problem}")
        else:
            aside = _free_name(path.with_name(f"damaged-{path.name}"))
            os.replace(path, aside)
            said.append(f"Set {path.name} aside as {aside.name}: {problem}")
    for path in Path(output_dir).glob(".saving-*"):
        shutil.rmtree(path, ignore_errors=True)
    return said


def _never_finished(path: Path) -> bool:
    return not (path / STATE).exists() and not (path / MANIFEST).exists()


def _free_name(path: Path) -> Path:
    names = (path, *(path.with_name(f"{path.name}.{number}") for number in range(1, 1000)))
    return next(name for name in names if not name.exists())


def model_in(folder: str | os.PathLike) -> tuple[str, str] | None:
    """Model type and class that a folder's `config.json` names; None without a readable one."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        return str(config["model_type"]), str((config.get("architectures") or ["?"])[0])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def refuse_other_model(folder: str | os.PathLike, expected: str | None) -> None:
    """Raise `BadInput` if a folder holds the checkpoint of another class of models than the one a run trains.

    Args:
        folder: Of a checkpoint.
        expected: Name of the class; None if it cannot be known.
    """
    found = model_in(folder)
    if found is not None and expected is not None and found[1] not in ("?", expected):
        raise BadInput(
            f"{folder} holds a checkpoint of another model, {one_line(found[1])} (model type {one_line(found[0])}); "
            f"this program trains {expected} here. Choose another --output_dir or --overwrite_output_dir."
        )


def checkpoint_to_resume(args: ProgramArguments, expected: str | None = None) -> Path | None:
    """The checkpoint that a run told `args` goes on from, or None for a new one.

    Args:
        args: What the user asked for.
        expected: Name of the model's class, if it is known.

    Raises:
        BadInput: The one asked for cannot be used, or the output folder holds other things.
    """
    output = Path(args.output_dir or "")
    if output.exists() and not output.is_dir():
        raise BadInput(f"--output_dir {output} is a file.")
    asked = str(args.resume_from_checkpoint or "")
    if asked.lower() not in ("", "true", "false"):
        if problem := checkpoint_problem(asked):
            raise BadInput(f"Cannot resume from {asked}: {problem}.")
        refuse_other_model(asked, expected)
        return Path(asked)
    if not args.do_train or args.overwrite_output_dir or not output.is_dir():
        if asked.lower() == "true":
            raise BadInput(f"There is no checkpoint to resume from in --output_dir {output}.")
        return None
    problems, own = {}, set()
    for path in checkpoints(output):
        refuse_other_model(path, expected)
        problem = checkpoint_problem(path)
        if problem is None:
            return path
        if _never_finished(path):
            own.add(path.name)
        else:
            problems[path.name] = problem
    if asked.lower() == "true":
        raise BadInput(f"There is no checkpoint to resume from in --output_dir {output}{_listed(problems)}.")
    if any(name not in own and not name.startswith((".saving-", LOCK)) for name in os.listdir(output)):
        refuse_other_model(output, expected)
        raise BadInput(
            f"--output_dir {output} is not empty and holds no complete checkpoint to resume from{_listed(problems)}; "
            "choose another folder, or start over with --overwrite_output_dir."
        )
    return None


def _listed(problems: dict[str, str]) -> str:
    return f" ({'; '.join(f'{name}: {problem}' for name, problem in problems.items())})" if problems else ""


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
            refuse_foreign(output, bundle_files(temporary))
            for path in sorted(temporary.rglob("*")):
                if path.is_file():
                    target = output / path.relative_to(temporary)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(path, target)
    finally:
        if trainer.args.should_save:
            shutil.rmtree(temporary, ignore_errors=True)
