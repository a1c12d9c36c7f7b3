"""What the programs that compare share: finished runs in a file, the embedded corpus in rows, a schedule, a line."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from frankenstein_hf.data import embedded_corpus, pack, train_tokenizer
from frankenstein_hf.data.atomic import write_json
from frankenstein_hf.hub.foreign import code

Run = dict[str, Any]


class Results:
    """Finished runs, kept in a file as they come.

    Args:
        path: The file, which may hold runs of an earlier call; None keeps them in memory.
        setting: What all runs of a file must have in common.
        keys: Entries of a run that tell it from all others.

    Raises:
        ValueError: The file holds runs of another setting.
    """

    def __init__(self, path: str | None, setting: dict[str, Any], keys: tuple[str, ...]) -> None:
        self.path, self.setting, self.keys = path, setting, keys
        self.runs: list[Run] = [] if path is None else self._read(Path(path), setting)

    @staticmethod
    def _read(path: Path, setting: dict[str, Any]) -> list[Run]:
        if not path.exists():
            return []
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["setting"] != setting:
            raise ValueError(
                f"{path} holds runs of {stored['setting']}, not of {setting}; give another --json or the same flags."
            )
        return stored["runs"]

    def find(self, *wanted: Any) -> Run | None:
        """The run with these values of `keys`, if it is finished."""
        return next((r for r in self.runs if tuple(r[key] for key in self.keys) == wanted), None)

    def add(self, result: Run) -> None:
        """Keep a run."""
        self.runs.append(result)
        if self.path:
            write_json(self.path, {"setting": self.setting, "runs": self.runs})


def corpus_rows(vocab_size: int, block_size: int, held_out: int) -> tuple[Tensor, Tensor]:
    """Rows of token ids of the embedded corpus, [N, block_size] to train on and [held_out, block_size] to hold out."""
    corpus = embedded_corpus()
    tokenizer = train_tokenizer(corpus["train"]["text"], vocab_size, "clm")
    train, rest = (
        torch.tensor(pack(corpus[split], tokenizer, block_size)["input_ids"]) for split in ("train", "validation")
    )
    return train, rest[:held_out]


def warm_up(steps: int) -> int:
    """Steps of the warm-up of a run."""
    return max(1, steps // 10)


def warm_up_then_cosine(step: int, steps: int) -> float:
    """Factor of the learning rate in update number `step` of `steps`, from 0: it rises, then falls to zero."""
    warm = warm_up(steps)
    if step < warm:
        return (step + 1) / warm
    return 0.5 + 0.5 * math.cos(math.pi * (step - warm) / max(1, steps - warm))


def written_by(script: str, flags: str) -> str:
    """The line of a page that says how it was made; flags hold names of files, which stay text."""
    return f"Written by {code(f'python scripts/{script} {flags}')}."
