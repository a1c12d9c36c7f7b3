"""The embedded corpus: real text, the same every time, cached whole or not at all."""

import ast
import json
import sysconfig
from pathlib import Path

import pytest

from frankenstein_hf.data import cache_directory, embedded_corpus, read_corpus
from frankenstein_hf.data import corpus as corpus_module


@pytest.fixture
def few_modules(monkeypatch):
    monkeypatch.setattr(corpus_module, "MODULES", ("argparse", "heapq", "json", "no_such_module", "textwrap"))


def test_documents_are_the_docstrings_that_python_itself_reports(few_modules, tmp_path):
    import textwrap

    documents = dict(read_corpus(tmp_path).documents)
    assert documents["textwrap.dedent"] == ast.get_docstring(
        next(
            node
            for node in ast.parse(Path(textwrap.__file__).read_text()).body
            if getattr(node, "name", None) == "dedent"
        )
    )
    method = "Wrap a single paragraph of text, returning a list of wrapped lines."  # wrap()'s docstring starts so
    assert documents["textwrap.wrap"].startswith(method)
    assert "json.decoder.JSONDecoder" in documents


def test_the_cache_is_reused_and_a_damaged_one_is_read_anew(few_modules, tmp_path, monkeypatch):
    first = read_corpus(tmp_path)
    (path,) = tmp_path.iterdir()  # and no temporary file beside it
    assert json.loads(path.read_text())["license"] == "PSF-2.0"
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": "/nowhere"})
    assert read_corpus(tmp_path) == first
    monkeypatch.undo()
    monkeypatch.setattr(corpus_module, "MODULES", ("argparse", "heapq", "json", "no_such_module", "textwrap"))
    for damage in (path.read_text()[:1000], path.read_text().replace("the", "teh")):
        path.write_text(damage)
        assert read_corpus(tmp_path) == first


def test_another_list_of_modules_has_another_cache(few_modules, tmp_path, monkeypatch):
    first = read_corpus(tmp_path)
    monkeypatch.setattr(corpus_module, "MODULES", ("heapq",))
    assert len(read_corpus(tmp_path).documents) < len(first.documents) and len(list(tmp_path.iterdir())) == 2


def test_a_python_without_sources_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": "/nowhere"})
    with pytest.raises(RuntimeError, match="/nowhere"):
        read_corpus(tmp_path)


def test_the_split_is_by_document_and_repeatable(few_modules, tmp_path):
    splits = embedded_corpus(held_out=0.2, cache_dir=tmp_path)
    again = embedded_corpus(held_out=0.2, cache_dir=tmp_path / "elsewhere")
    assert {name: split["text"] for name, split in splits.items()} == {
        name: split["text"] for name, split in again.items()
    }
    train, validation = (set(splits[name]["text"]) for name in ("train", "validation"))
    assert train and validation and not train & validation
    assert len(train) + len(validation) == len(read_corpus(tmp_path).documents)
    assert splits["train"].info.license == "PSF-2.0"


def test_the_cache_follows_the_environment(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.delenv("HF_HOME", raising=False)
    assert cache_directory() == Path("/x/huggingface/frankenstein_hf")
    monkeypatch.setenv("HF_HOME", "/h")
    assert cache_directory() == Path("/h/frankenstein_hf")
