"""Labelled data that comes with Python or with an installed package, for programs started without files.

Nothing is downloaded or copied into this package: the data is read where it was installed, and each function names its
licence. All return the splits "train" and "validation".
"""

import hashlib
import importlib.util
import io
import keyword
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import corpus

if TYPE_CHECKING:
    from datasets import DatasetDict

CODE_MODULES = "argparse ast calendar csv datetime dis enum fractions heapq inspect pprint statistics textwrap".split()  # noqa: SIM905
WORDS_A_ROW = 64
LONGEST_WORD = 60  # characters; longer ones are docstrings


def digits(held_out: float = 0.2) -> "DatasetDict":
    """1,797 handwritten digits of scikit-learn, each as 64 words: the pixels row by row, `a` (white) to `q` (black).

    The images of one writer follow each other; the last ones are held out, so writers are not shared.

    Args:
        held_out: Fraction of the images in "validation", in (0, 1).

    Returns:
        Columns `text` and `label` (0 … 9).

    Raises:
        ImportError: scikit-learn is not installed.
    """
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    texts = [" ".join(chr(ord("a") + int(pixel)) for pixel in image) for image in data.data]
    features = Features({"text": Value("string"), "label": ClassLabel(names=[str(digit) for digit in range(10)])})
    rows = Dataset.from_dict(
        {"text": texts, "label": data.target.tolist()},
        info=_info("Handwritten digits of scikit-learn, 64 pixels as words", "CC BY 4.0", features),
    )
    border = round(len(rows) * (1 - held_out))
    return DatasetDict(train=rows.select(range(border)), validation=rows.select(range(border, len(rows))))


def valence(held_out: float = 0.2) -> "DatasetDict":
    """7,500 words and emoticons with the mean of ten people's ratings, −4 (negative) to 4 (positive).

    The lexicon of VADER (Hutto and Gilbert, 2014), as installed with vaderSentiment (MIT). Forms of one word may stand
    on both sides of the split.

    Args:
        held_out: Fraction of the words in "validation", in (0, 1).

    Returns:
        Columns `text` and `label` (a float).

    Raises:
        ImportError: vaderSentiment is not installed.
    """
    spec = importlib.util.find_spec("vaderSentiment")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("vaderSentiment is not installed.")
    text = (Path(spec.submodule_search_locations[0]) / "vader_lexicon.txt").read_text(encoding="utf-8")
    rows = [line.split("\t") for line in text.splitlines() if line]
    columns = [(row[0], {"text": row[0], "label": float(row[1])}) for row in rows]
    return _split(columns, held_out, "Valence of words, lexicon of vaderSentiment", "MIT", {"label": "float32"})


def code_tokens(held_out: float = 0.2) -> "DatasetDict":
    """Tokens of Python source with their kinds, from a dozen modules of the standard library (PSF-2.0).

    Kinds are those of Python's own `tokenize`, names divided by what they stand behind: keyword, function (being
    defined), class (being defined), attribute, name, number, string, operator, comment.

    Args:
        held_out: Fraction of the rows in "validation", in (0, 1).

    Returns:
        Columns `tokens` and `labels`, both lists of strings, of 64 or a few more words a row.
    """
    from datasets import List, Value

    library = Path(sysconfig.get_paths()["stdlib"])
    rows = [
        (f"{module}:{number}", {"tokens": [word for word, _ in row], "labels": [kind for _, kind in row]})
        for module in CODE_MODULES
        if (library / f"{module}.py").is_file()
        for number, row in enumerate(_code_rows((library / f"{module}.py").read_bytes()))
    ]
    features = {"tokens": List(Value("string")), "labels": List(Value("string"))}
    return _split(rows, held_out, "Tokens of the Python standard library's source", corpus.LICENSE, features)


def docstring_pairs(held_out: float = 0.1) -> "DatasetDict":
    """Summary and remainder of the docstrings of `embedded_corpus`, which belong together.

    Args:
        held_out: Fraction of the pairs in "validation", in (0, 1).

    Returns:
        Columns `anchor` (the first paragraph) and `positive` (the rest, at least 64 characters).
    """
    rows = []
    for name, text in corpus.read_corpus().documents:
        summary, _, rest = (part.strip() for part in text.partition("\n\n"))
        if summary and len(rest) >= corpus.MIN_CHARACTERS:
            rows.append((name, {"anchor": summary, "positive": rest}))
    return _split(rows, held_out, "Summaries and bodies of the Python standard library's docstrings", corpus.LICENSE)


def _code_rows(source: bytes) -> Iterator[list[tuple[str, str]]]:
    """Rows of (word, kind), cut at the ends of lines."""
    row: list[tuple[str, str]] = []
    before = ""
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if token.type == tokenize.NEWLINE and len(row) >= WORDS_A_ROW:
            yield row
            row = []
        word = token.string.strip()
        if (kind := _kind(token, before)) and 0 < len(word) <= LONGEST_WORD:
            row.append((word, kind))
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            before = token.string
    if row:
        yield row


def _kind(token: tokenize.TokenInfo, before: str) -> str | None:
    if token.type == tokenize.NAME:
        if keyword.iskeyword(token.string):
            return "keyword"
        return {"def": "function", "class": "class", ".": "attribute"}.get(before, "name")
    name = tokenize.tok_name[token.type]
    if name.startswith("FSTRING"):  # Python 3.12 takes them apart
        return "string"
    return {"NUMBER": "number", "STRING": "string", "OP": "operator", "COMMENT": "comment"}.get(name)


def _info(description: str, license: str, features: Any) -> Any:
    from datasets import DatasetInfo

    return DatasetInfo(description=description, license=license, features=features)


def _split(
    rows: list[tuple[str, dict[str, Any]]], held_out: float, description: str, license: str, features: Any = None
) -> "DatasetDict":
    """Whether a row is held out depends on its name alone."""
    from datasets import Dataset, DatasetDict, Features, Value

    kinds = {name: Value("string") for name in rows[0][1]}
    kinds |= {name: Value(kind) if isinstance(kind, str) else kind for name, kind in (features or {}).items()}
    info = _info(description, license, Features(kinds))
    parts: dict[str, list[dict[str, Any]]] = {"train": [], "validation": []}
    for name, row in rows:
        place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
        parts["validation" if place < held_out else "train"].append(row)
    return DatasetDict({split: Dataset.from_list(part, info=info) for split, part in parts.items()})
