"""An English corpus that every Python brings along: the docstrings of its standard library.

The sources are parsed with `ast`, never imported or executed. The text belongs to the Python Software Foundation and
is licensed under PSF-2.0 (https://docs.python.org/3/license.html); it is read from the user's own Python and not
distributed with this package. It differs a little between Python versions, so it is cached and hashed per version.
"""

import ast
import contextlib
import hashlib
import json
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .atomic import write_json

if TYPE_CHECKING:
    from datasets import DatasetDict

LICENSE = "PSF-2.0"
MIN_CHARACTERS = 64  # shorter documents are mostly "Return x." over and over

# Modules and packages of every Python since 3.11, without those that distributions like to split off.
MODULES = """
_collections_abc _py_abc _pydatetime _pydecimal _pyio _strptime _threading_local _weakrefset abc argparse ast
asyncio base64 bdb bisect bz2 calendar cmd code codecs codeop collections compileall concurrent configparser
contextlib contextvars copy copyreg csv ctypes dataclasses datetime dbm decimal difflib dis doctest email enum
filecmp fileinput fnmatch fractions ftplib functools genericpath getopt getpass gettext glob graphlib gzip
hashlib heapq hmac html http imaplib importlib inspect io ipaddress json keyword linecache locale logging lzma
mailbox mimetypes modulefinder multiprocessing netrc ntpath numbers opcode operator optparse os pathlib pdb
pickle pickletools pkgutil platform plistlib poplib posixpath pprint profile pstats py_compile pyclbr pydoc
queue quopri random re reprlib rlcompleter runpy sched secrets selectors shelve shlex shutil signal site smtplib
socket socketserver sqlite3 ssl stat statistics string stringprep struct subprocess symtable sysconfig tabnanny
tarfile tempfile textwrap threading timeit token tokenize tomllib trace traceback tracemalloc types typing
unittest urllib uuid warnings wave weakref webbrowser wsgiref xml xmlrpc zipapp zipfile zipimport zoneinfo
""".split()  # noqa: SIM905


@dataclass(frozen=True)
class Corpus:
    """What was read.

    Attributes:
        documents: (name, text) of every document: a module's own docstring, or those of one top-level class or function
            and everything inside it.
        python: The Python it was read from, e.g. "CPython 3.11.7".
        sha256: Hash of all names and texts.
    """

    documents: tuple[tuple[str, str], ...]
    python: str
    sha256: str


def cache_directory() -> Path:
    """Where this package caches: `$HF_HOME/frankenstein_hf`, HF_HOME being `$XDG_CACHE_HOME/huggingface` by default."""
    xdg = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HF_HOME") or Path(xdg) / "huggingface").expanduser() / "frankenstein_hf"


def read_corpus(cache_dir: str | os.PathLike | None = None) -> Corpus:
    """The docstrings of `MODULES`, from the cache or from the standard library's sources.

    Args:
        cache_dir: Folder of the cache; `cache_directory()` by default. A cache that cannot be written is done without.

    Raises:
        RuntimeError: This Python has no standard library sources.
    """
    python = f"{platform.python_implementation()} {platform.python_version()}"
    reader = Path(__file__).read_bytes() + repr((MODULES, MIN_CHARACTERS)).encode()
    recipe = hashlib.sha256(reader).hexdigest()[:12]  # a changed list or reader reads anew
    name = f"docstrings-{python.lower().replace(' ', '-')}-{recipe}.json"
    path = Path(cache_dir if cache_dir is not None else cache_directory()) / name
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        documents = tuple((name, text) for name, text in stored["documents"])
        if stored["sha256"] == _digest(documents):
            return Corpus(documents, python, stored["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # absent, or damaged: read it again
    documents = tuple(_documents(Path(sysconfig.get_paths()["stdlib"])))
    if not documents:
        raise RuntimeError(
            f"No sources of the standard library in {sysconfig.get_paths()['stdlib']}; install Python with its "
            "library, or train on a file of your own."
        )
    corpus = Corpus(documents, python, _digest(documents))
    with contextlib.suppress(OSError):  # the cache only saves a few seconds
        write_json(path, {"license": LICENSE, "python": python, "sha256": corpus.sha256, "documents": documents})
    return corpus


def embedded_corpus(held_out: float = 0.05, cache_dir: str | os.PathLike | None = None) -> "DatasetDict":
    """The corpus as a dataset with the splits "train" and "validation" and the column "text".

    Whether a document is held out depends on its name alone, so runs, machines and Python versions agree.

    Args:
        held_out: Fraction of the documents in "validation", in (0, 1).
        cache_dir: As in `read_corpus`.
    """
    from datasets import Dataset, DatasetDict, DatasetInfo, Features, Value

    if not 0 < held_out < 1:
        raise ValueError(f"held_out={held_out} must be between 0 and 1.")
    corpus = read_corpus(cache_dir)
    info = DatasetInfo(
        description=f"Docstrings of the standard library of {corpus.python}, sha256 {corpus.sha256[:16]}…",
        homepage="https://docs.python.org/3/library/",
        license=LICENSE,
        features=Features({"text": Value("string")}),
    )
    texts: dict[str, list[str]] = {"train": [], "validation": []}
    for name, text in corpus.documents:
        place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
        texts["validation" if place < held_out else "train"].append(text)
    return DatasetDict({split: Dataset.from_dict({"text": rows}, info=info) for split, rows in texts.items()})


def _digest(documents: tuple[tuple[str, str], ...]) -> str:
    return hashlib.sha256(json.dumps(documents, ensure_ascii=False).encode()).hexdigest()


def _documents(library: Path) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()  # a docstring that stands twice must not be both trained on and held out
    for module in MODULES:
        for path in _sources(library, module):
            parts = path.relative_to(library).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            try:
                tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError):
                continue
            groups: dict[str, list[str]] = {}
            _add(groups.setdefault(name, []), tree, seen)
            for node in tree.body:
                group = groups.setdefault(f"{name}.{node.name}" if hasattr(node, "name") else name, [])
                for child in _nodes(node):
                    _add(group, child, seen)
            for document, docstrings in groups.items():
                text = "\n\n".join(docstrings)
                if len(text) >= MIN_CHARACTERS:
                    yield document, text


def _sources(library: Path, module: str) -> list[Path]:
    if (single := library / f"{module}.py").is_file():
        return [single]
    skipped = {"test", "tests", "__pycache__"}
    paths = (library / module).rglob("*.py")
    return sorted(path for path in paths if not skipped & set(path.relative_to(library).parts))


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """`node` and all below it, in the order of the source."""
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _nodes(child)


def _add(docstrings: list[str], node: ast.AST, seen: set[str]) -> None:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = (ast.get_docstring(node) or "").strip()
        if text and text not in seen:
            seen.add(text)
            docstrings.append(text)
