"""Reading what a training program was told to train on: files, a dataset of the Hub, or what is there anyway."""

import contextlib
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..hub.cards import checkpoint_link
from ..hub.foreign import Markdown, code, markdown
from .arguments import FILE_TYPES, BadInput, SourceArguments


class Source(NamedTuple):
    """The data of a program.

    Attributes:
        rows: A `DatasetDict` with the splits "train" and "validation".
        origin: Where it comes from, in words.
        name: The same, short and without folders.
        split_here: Whether "validation" was taken from the only split there was.
        words: `name` for a model card.
        held_out: What "validation" is, for a model card.
    """

    rows: Any
    origin: str
    name: str
    split_here: bool
    words: Markdown = Markdown("")
    held_out: Markdown = Markdown("")


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
        origin = f"{info.description} ({info.license})"
        part = Markdown(f"{data.validation_split_percentage:g} % of it, held out")
        return _limited(Source(rows, origin, info.description, True, markdown(origin), part), data)
    try:
        if data.dataset_name:
            loaded = load_dataset(data.dataset_name, data.dataset_config_name)
            name = origin = " ".join(name for name in (data.dataset_name, data.dataset_config_name) if name)
            words = checkpoint_link(data.dataset_name, "datasets/")
            if data.dataset_config_name:
                words = Markdown(f"{words} ({code(data.dataset_config_name)})")
        else:
            files = {"train": data.train_file, "validation": data.validation_file}
            given = {split: file for split, file in files.items() if file is not None}
            loaded, origin = read_files(given, **reader), " and ".join(map(str, given.values()))
            name = " and ".join(Path(file).name for file in given.values())
            words = code(Path(str(data.train_file)).name)
    except (DatasetsError, OSError, ValueError) as error:
        raise BadInput(f"Cannot read {data.dataset_name or data.train_file}: {error}") from error
    if "train" not in loaded:
        raise BadInput(f"{origin} has no split 'train', only {', '.join(loaded)}.")
    held_out = next((name for name in ("validation", "test") if name in loaded), None)
    if held_out is not None:
        rows = DatasetDict(train=loaded["train"], validation=loaded[held_out])
        file = data.validation_file
        part = Markdown(f"its split `{held_out}`") if file is None else code(Path(file).name)
        return _limited(Source(rows, origin, name, False, words, part), data)
    if len(loaded["train"]) < 2:
        raise BadInput(
            f"{origin} has a single row or document, so none can be held out; give --validation_file"
            + (" or --sample_by." if reader else ".")
        )
    parts = loaded["train"].train_test_split(test_size=share, seed=seed)
    rows = DatasetDict(train=parts["train"], validation=parts["test"])
    part = Markdown(f"{100 * share:g} % of its rows, drawn with the seed {seed} and held out")
    return _limited(Source(rows, origin, name, True, words, part), data)


def read_files(files: Mapping[str, str], **reader: Any) -> Any:
    """A `DatasetDict` of files of one type by split; their names are taken as they are.

    `datasets` reads names as patterns, and some as addresses: `a[1].txt`, `a*.txt`, `a::b.txt`. Such files are read
    through links with a plain name.
    """
    from datasets import load_dataset

    kind = FILE_TYPES[Path(next(iter(files.values()))).suffix.lower()]
    plain = all(re.fullmatch(r"[\w./ +,=@%-]*", str(file)) for file in files.values())
    with contextlib.nullcontext() if plain else tempfile.TemporaryDirectory() as folder:
        given = {split: str(file) for split, file in files.items()}
        if folder is not None:
            for split, file in files.items():
                link = Path(folder) / f"{split}{Path(file).suffix}"
                try:
                    link.symlink_to(Path(file).absolute())
                except OSError:  # not everybody may make links on Windows
                    shutil.copyfile(file, link)
                given[split] = str(link)
        return load_dataset(kind, data_files=given, **reader)


def _limited(source: Source, data: SourceArguments) -> Source:
    for split, limit in (("train", data.max_train_samples), ("validation", data.max_eval_samples)):
        rows = source.rows[split]
        if limit is not None and limit < len(rows):
            source.rows[split] = rows.select(range(limit))
            first = f"the first {limit:,} rows of "
            if split == "train":
                source = source._replace(words=Markdown(first + source.words))
            else:
                source = source._replace(held_out=Markdown(first + source.held_out))
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
