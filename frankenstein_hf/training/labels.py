"""Reading labels out of a dataset: which problem they pose, their names, and the numbers a model is trained on."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .arguments import BadInput
from .sources import Source, is_text

PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")
LABEL_COLUMNS = ("label", "labels")
TAG_COLUMNS = ("labels", "tags", "ner_tags", "label")
YES = {1: 1.0, 0: 0.0}  # True and False as well


@dataclass(frozen=True)
class Labels:
    """What the label columns hold.

    Attributes:
        problem_type: One of `PROBLEM_TYPES`, or None for tags of words.
        names: What each output of the model stands for, in order.
        columns: `Dataset` columns to read.
        encode: From the values of the columns in one row, to what the model is trained on: an id, a list of ids, a list
            of 0.0 and 1.0, or a number.
    """

    problem_type: str | None
    names: list[str]
    columns: list[str]
    encode: Callable[..., Any]

    def config(self) -> dict[str, Any]:
        """Keys for the model's config."""
        keys: dict[str, Any] = {
            "id2label": dict(enumerate(self.names)),
            "label2id": {name: place for place, name in enumerate(self.names)},
        }
        return keys if self.problem_type is None else {**keys, "problem_type": self.problem_type}


def sequence_labels(
    source: Source, asked: str | None, problem_type: str | None, known: Iterable[str] | None = None
) -> Labels:
    """The labels of sequences.

    Args:
        source: The data.
        asked: A column, or several with commas, each of which says yes or no to one label; by default 'label' or
            'labels'.
        problem_type: One of `PROBLEM_TYPES`, or None to go by the data: several columns or lists are several labels,
            fractions are regression, all else is a single label.
        known: Names in the order of a checkpoint to continue from; used if they are the same ones.

    Raises:
        BadInput: A column that is missing, values that do not fit the problem, a label missing in a row, a label that
            only the validation data has, or fewer than two labels.
    """
    columns = _columns(source, asked, "label_column", LABEL_COLUMNS)
    feature = source.rows["train"].features[columns[0]]
    inferred = _problem(columns, feature)
    problem = problem_type or inferred
    if problem == "regression":
        if len(columns) > 1 or inferred == "multi_label_classification":
            raise BadInput(f"Regression needs one number a row; --label_column {', '.join(columns)} holds several.")
        for split, row, value in _values(source, columns[0]):
            number(value, columns[0], split, row)
        return Labels(problem, columns, columns, lambda value: float(value))
    if problem == "single_label_classification":
        if inferred == "multi_label_classification":
            raise BadInput(f"--label_column {', '.join(columns)} holds several labels a row, not a single one.")
        if inferred == "regression":
            raise BadInput(
                f"--label_column {columns[0]} holds fractions, which are no classes; use --problem_type regression."
            )
        read = _reader(feature)
        names = _names(source, columns[0], lambda value: [read(value)], known, _class_names(feature))
        ids = {name: place for place, name in enumerate(names)}
        return Labels(problem, names, columns, lambda value: ids[read(value)])
    if inferred != "multi_label_classification":
        raise BadInput(
            f"Several labels a row need lists in --label_column {columns[0]}, or several columns of yes and no: "
            "--label_column one,two,three."
        )
    if len(columns) > 1:
        for column in columns:
            for split, row, value in _values(source, column):
                if value not in YES:
                    raise BadInput(f"Row {row} of {split}: {column} must be 0 or 1, got {value!r}.")
        return Labels(problem, columns, columns, lambda *values: [YES[value] for value in values])
    feature = feature.feature
    read = _reader(feature)
    names = _names(source, columns[0], lambda values: map(read, values), known, _class_names(feature))
    return Labels(
        problem, names, columns, lambda values: [float(name in set(map(read, values))) for name in names]
    )  # fmt: skip


def token_labels(source: Source, asked: str | None, words: str, known: Iterable[str] | None = None) -> Labels:
    """The labels of words.

    Args:
        source: The data.
        asked: A column of lists; by default the first there is of `TAG_COLUMNS`.
        words: The column with the words.
        known: As in `sequence_labels`.

    Raises:
        BadInput: As in `sequence_labels`, or a row that has more or fewer labels than words.
    """
    column = _columns(source, asked, "label_column", TAG_COLUMNS)[0]
    feature = source.rows["train"].features[column]
    if not hasattr(feature, "feature"):
        raise BadInput(f"--label_column {column} must hold a list of labels in each row, one a word.")
    for split in ("train", "validation"):
        rows = source.rows[split].select_columns([words, column])
        for row, (row_words, tags) in enumerate(zip(rows[words], rows[column])):
            if row_words is not None and tags is not None and len(row_words) != len(tags):
                raise BadInput(f"Row {row} of {split} has {len(row_words)} words and {len(tags)} labels.")
    read = _reader(feature.feature)
    names = _names(source, column, lambda values: map(read, values), known, _class_names(feature.feature))
    ids = {name: place for place, name in enumerate(names)}
    return Labels(None, names, [column], lambda values: [ids[read(value)] for value in values])


def number(value: Any, column: str, split: str, row: int) -> float:
    """A finite number, or `BadInput`."""
    try:
        result = float(value)
    except (TypeError, ValueError):
        result = math.nan
    if not math.isfinite(result):
        raise BadInput(f"Row {row} of {split}: {column} must be a number, got {value!r}.")
    return result


def _columns(source: Source, asked: str | None, flag: str, usual: tuple[str, ...]) -> list[str]:
    there = source.rows["train"].column_names
    if asked is None:
        found = [name for name in usual if name in there][:1]
        if not found:
            raise BadInput(f"Choose the column with the labels with --{flag}; there are {', '.join(there)}.")
    else:
        found = [name.strip() for name in asked.split(",") if name.strip()]
    for split in ("train", "validation"):
        columns = source.rows[split].column_names
        if missing := [name for name in found if name not in columns]:
            raise BadInput(f"--{flag}: {split} has no column {missing[0]!r}; there are {', '.join(columns)}.")
    return found


def _problem(columns: list[str], feature: Any) -> str:
    if len(columns) > 1 or hasattr(feature, "feature"):
        return "multi_label_classification"
    fractions = str(getattr(feature, "dtype", "")).startswith(("float", "double"))
    return "regression" if fractions else "single_label_classification"


def _class_names(feature: Any) -> list[str] | None:
    return getattr(feature, "names", None)


def _reader(feature: Any) -> Callable[[Any], str]:
    """From a value to the label's name."""
    names = _class_names(feature)
    if names is not None:
        return lambda value: names[value] if isinstance(value, int) and value >= 0 else str(value)
    return str


def _values(source: Source, column: str) -> Iterable[tuple[str, int, Any]]:
    for split in ("train", "validation"):
        for row, value in enumerate(source.rows[split][column]):
            if value is None:
                raise BadInput(f"Row {row} of {split} has no {column}.")
            yield split, row, value


def _names(
    source: Source,
    column: str,
    read: Callable[[Any], Iterable[str]],
    known: Iterable[str] | None,
    declared: list[str] | None,
) -> list[str]:
    """The labels' names: as the dataset declares them, else those of the training data, whole numbers in order."""
    seen: dict[str, set[str]] = {"train": set(), "validation": set()}
    for split, row, value in _values(source, column):
        for name in read(value):
            if declared is not None and name not in declared:
                raise BadInput(f"Row {row} of {split}: {column} has the value {name}, which stands for no label.")
            if name not in seen[split]:
                seen[split].add(name)
                if split == "validation" and name not in seen["train"] and not source.split_here and not declared:
                    raise BadInput(
                        f"Row {row} of validation has the label {name!r}, which no training row has; there are "
                        f"{', '.join(sorted(seen['train']))}."
                    )
    found = seen["train"] | seen["validation"]
    if len(seen["train"]) < 2:
        raise BadInput(
            f"All training rows have the same label, {', '.join(seen['train']) or 'none'}; there is nothing to learn."
        )
    names = declared or sorted(found, key=lambda name: (0, int(name), name) if _is_integer(name) else (1, 0, name))
    known = list(known or ())
    return known if set(known) == set(names) else names


def _is_integer(name: str) -> bool:
    return name.removeprefix("-").isdecimal()


def words_column(source: Source, asked: str | None) -> str:
    """The column with lists of words: the user's choice, or 'tokens' or 'words'."""
    there = source.rows["train"].features
    lists = [name for name, kind in there.items() if is_text(getattr(kind, "feature", None))]
    if asked is not None:
        if asked not in lists:
            raise BadInput(f"--text_column {asked!r} holds no lists of words; {', '.join(lists) or 'no column'} does.")
        return asked
    found = next((name for name in ("tokens", "words") if name in lists), None)
    if found is None:
        raise BadInput(
            "Choose the column with lists of words with --text_column: " + (", ".join(lists) or "there is none") + "."
        )
    return found
