"""The loss of knowing only how often each token occurs: what a language model must beat to have learned anything."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from datasets import Dataset


def unigram_loss(train: "Dataset", evaluation: "Dataset", vocab_size: int, never: Iterable[int] = ()) -> float:
    """Mean negative log-probability, in nats, of the evaluated tokens under the token frequencies in `train`.

    Evaluated are the labels (other than −100) of `evaluation` if it has any (`mask_once`), else every token that a
    causal model predicts: all but the first of each row and of each packed document.

    Args:
        train: With a column `input_ids`.
        evaluation: With a column `labels`, or `input_ids` and possibly `position_ids`.
        vocab_size: Number of tokens; every one counts once more than it occurs.
        never: Tokens that are never predicted.
    """
    counts = np.ones(vocab_size)
    for (ids,) in _columns(train, "input_ids"):
        counts += np.bincount(ids, minlength=vocab_size)[:vocab_size]
    counts[list(never)] = 0
    with np.errstate(divide="ignore"):
        losses = -np.log(counts / counts.sum())
    total, number = 0.0, 0
    if "labels" in evaluation.column_names:
        for (labels,) in _columns(evaluation, "labels"):
            total += losses[labels[labels != -100]].sum()
            number += int((labels != -100).sum())
    else:
        packed = "position_ids" in evaluation.column_names
        for row in evaluation.select_columns(["input_ids", "position_ids"] if packed else ["input_ids"]):
            ids = np.asarray(row["input_ids"])
            predicted = np.arange(len(ids)) > 0
            if packed:
                predicted[1:] &= np.diff(np.asarray(row["position_ids"])) > 0
            total += losses[ids[predicted]].sum()
            number += int(predicted.sum())
    return total / max(number, 1)


def _columns(dataset: "Dataset", *names: str) -> Iterable[list[np.ndarray]]:
    for table in dataset.select_columns(list(names)).with_format("arrow").iter(1000):
        yield [table[name].combine_chunks().flatten().to_numpy() for name in names]
