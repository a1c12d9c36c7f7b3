"""The labelled data that is there without files."""

import importlib.util
import keyword

import pytest

from frankenstein_hf.data import corpus, examples


def rows(data):
    """All rows, both splits."""
    return [row for split in ("train", "validation") for row in data[split]]


def test_digits_are_the_pixels_of_scikit_learn():
    datasets = pytest.importorskip("sklearn.datasets")
    found, original = rows(examples.digits()), datasets.load_digits()
    pixels = [[ord(word) - ord("a") for word in row["text"].split()] for row in found]
    assert pixels == original.data.astype(int).tolist()
    assert [row["label"] for row in found] == original.target.tolist()
    assert examples.digits(0.5)["train"].num_rows == round(len(found) / 2)


@pytest.mark.skipif(importlib.util.find_spec("vaderSentiment") is None, reason="needs vaderSentiment")
def test_valence_has_the_ratings_of_the_lexicon():
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    found, lexicon = rows(examples.valence()), SentimentIntensityAnalyzer().lexicon
    ratings: dict[str, set[float]] = {}
    for row in found:
        ratings.setdefault(row["text"].strip(), set()).add(round(row["label"], 4))
    assert len(found) > 7000 and all(-4 <= row["label"] <= 4 for row in found)
    assert set(ratings) == set(lexicon) and all(rating in ratings[word] for word, rating in lexicon.items())


def test_kinds_of_words_in_code_are_right(monkeypatch):
    monkeypatch.setattr(examples, "CODE_MODULES", ("heapq", "textwrap"))
    found = rows(examples.code_tokens())
    words = [(word, kind) for row in found for word, kind in zip(row["tokens"], row["labels"], strict=True)]
    assert {kind for _, kind in words} == {
        "keyword", "function", "class", "attribute", "name", "number", "string", "operator", "comment",
    }  # fmt: skip
    assert all(keyword.iskeyword(word) == (kind == "keyword") for word, kind in words)
    assert all(word.startswith("#") == (kind == "comment") for word, kind in words)
    assert all(word.isidentifier() for word, kind in words if kind in ("function", "class", "attribute", "name"))
    assert ("heappush", "function") in words and ("TextWrapper", "class") in words and ("join", "attribute") in words
    assert all(0 < len(row["tokens"]) < 200 for row in found)


def test_docstring_pairs_belong_together(monkeypatch):
    monkeypatch.setattr(corpus, "MODULES", ("argparse", "heapq", "textwrap"))
    texts = [text for _, text in corpus.read_corpus().documents]
    found = rows(examples.docstring_pairs(0.3))
    assert len(found) > 10
    for row in found:
        assert any(text.startswith(row["anchor"]) and text.endswith(row["positive"]) for text in texts)
        assert len(row["positive"]) >= corpus.MIN_CHARACTERS


def test_what_is_held_out_depends_on_the_share_alone(monkeypatch):
    monkeypatch.setattr(examples, "CODE_MODULES", ("heapq", "textwrap"))
    few, many = examples.code_tokens(0.2), examples.code_tokens(0.6)
    assert (
        few["validation"].num_rows < many["validation"].num_rows < many["train"].num_rows + many["validation"].num_rows
    )
    rows_of = lambda part: {" ".join(row) for row in part["tokens"]}  # noqa: E731
    assert rows_of(few["validation"]) <= rows_of(many["validation"])
    assert examples.code_tokens(0.2)["train"]["tokens"][:3] == few["train"]["tokens"][:3]
