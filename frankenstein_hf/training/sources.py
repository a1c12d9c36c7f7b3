"""Reading what a training program was told to train on: files, a dataset of the Hub, or what is there anyway."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from .arguments import FILE_TYPES, BadInput, SourceArguments


class Source(NamedTuple):
    """The data of a program.

    Attributes:
        rows: A `DatasetDict` with the splits "train" and "validation".
        origin: Where it comes from, in words.
        name: The same, short and without folders.
        split_here: Whether "validation" was taken from the only split there was.
    """

    rows: Any
    origin: str
    name: str
    split_here: bool


def load_source(data: SourceArguments, seed: int, embedded: Callable[[float], Any], **reader: Any) -> Source:
    """Read the data.

    Args:
        data: What the user asked for, checked.
        seed: Decides what is held out, if nothing was given to evaluate on.
        embedded: Makes the `DatasetDict` used when the user named no data, from the share to hold out.
        reader: Options for reading files.

    Raises:
        BadInput: It cannot be read, has no split "train", or only a single row.
    """
    from datasets import DatasetDict, load_dataset
    from datasets.exceptions import DatasetsError

    share = data.validation_split_percentage / 100
    if not data.dataset_name and not data.train_file:
        rows = embedded(share)
        info = rows["train"].info
        return _limited(Source(rows, f"{info.description} ({info.license})", info.description, True), data)
    try:
        if data.dataset_name:
            loaded = load_dataset(data.dataset_name, data.dataset_config_name)
            name = origin = " ".join(name for name in (data.dataset_name, data.dataset_config_name) if name)
        else:
            files = {"train": data.train_file, "validation": data.validation_file}
            given = {split: file for split, file in files.items() if file is not None}
            kind = FILE_TYPES[Path(str(data.train_file)).suffix.lower()]
            loaded, origin = load_dataset(kind, data_files=given, **reader), " and ".join(map(str, given.values()))
            name = " and ".join(Path(file).name for file in given.values())
    except (DatasetsError, OSError, ValueError) as error:
        raise BadInput(f"Cannot read {data.dataset_name or data.train_file}: {error}") from error
    if "train" not in loaded:
        raise BadInput(f"{origin} has no split 'train', only {', '.join(loaded)}.")
    held_out = next((name for name in ("validation", "test") if name in loaded), None)
    if held_out is not None:
        rows = DatasetDict(train=loaded["train"], validation=loaded[held_out])
        return _limited(Source(rows, origin, name, False), data)
    if len(loaded["train"]) < 2:
        raise BadInput(
            f"{origin} has a single row or document, so none can be held out; give --validation_file"
            + (" or --sample_by." if reader else ".")
        )
    parts = loaded["train"].train_test_split(test_size=share, seed=seed)
    rows = DatasetDict(train=parts["train"], validation=parts["test"])
    return _limited(Source(rows, origin, name, True), data)


def _limited(source: Source, data: SourceArguments) -> Source:
    for split, limit in (("train", data.max_train_samples), ("validation", data.max_eval_samples)):
        rows = source.rows[split]
        if limit is not None:
            source.rows[split] = rows.select(range(min(limit, len(rows))))
    return source


def strings(dataset: Any) -> list[str]:
    """The columns of text."""
    return [name for name, kind in dataset.features.items() if is_text(kind)]


def is_text(kind: Any) -> bool:
    """Whether a column's feature is text."""
    return getattr(kind, "dtype", None) in ("string", "large_string")


def text_column(
    dataset: Any, asked: str | None, flag: str = "text_column", never: tuple[str, ...] = (), hint: str = ""
) -> str:
    """The column of text the user asked for, or 'text', or the only one.

    Args:
        dataset: With `features`.
        asked: The user's choice, if any.
        flag: The flag for it.
        never: Columns that are used for something else.
        hint: Added to the error when there are several.
    """
    found = [name for name in strings(dataset) if name not in never]
    if asked is not None:
        if asked not in found:
            raise BadInput(f"--{flag} {asked!r} is no column of text; there are {', '.join(found) or 'none'}.")
        return asked
    if "text" in found:
        return "text"
    if len(found) != 1:
        raise BadInput(f"Choose the column of text with --{flag}: {', '.join(found) or 'there is none'}.{hint}")
    return found[0]
