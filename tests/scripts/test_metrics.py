"""The metrics of the programs against formulas written out."""

import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("nervaluate")

from frankenstein_hf.training import metrics

CHANCE = np.random.default_rng(0)


def f1(predicted, true):
    """2·TP / (2·TP + FP + FN) of two boolean arrays."""
    hits = (predicted & true).sum()
    return 2 * hits / max(predicted.sum() + true.sum(), 1)


def entities(tags):
    """(kind, first, last) of each entity, by the letter of the BIO scheme."""
    found, place = set(), 0
    while place < len(tags):
        if tags[place].startswith("B-"):
            last = place
            while last + 1 < len(tags) and tags[last + 1] == "I-" + tags[place][2:]:
                last += 1
            found.add((tags[place][2:], place, last))
            place = last
        place += 1
    return found


def bio(number, length):
    """Random tags that obey the scheme."""
    rows = []
    for _ in range(number):
        row = []
        while len(row) < length:
            kind = CHANCE.choice(["x", "y"])
            part = [f"B-{kind}", *[f"I-{kind}"] * CHANCE.integers(3)] if CHANCE.random() < 0.5 else ["O"]
            row += part
        rows.append(row[:length])
    return rows


def test_single_label():
    true, predicted = CHANCE.integers(4, size=200), CHANCE.integers(4, size=200)
    predicted[:90] = true[:90]
    found = metrics.single_label(predicted, true)
    assert found["accuracy"] == pytest.approx((true == predicted).mean())
    assert found["macro_f1"] == pytest.approx(np.mean([f1(predicted == c, true == c) for c in range(4)]))
    confusion = np.array([[((true == a) & (predicted == b)).sum() for b in range(4)] for a in range(4)], float)
    rows, columns, total = confusion.sum(1), confusion.sum(0), confusion.sum()
    upper = np.trace(confusion) * total - rows @ columns
    mcc = upper / np.sqrt((total**2 - columns @ columns) * (total**2 - rows @ rows))
    assert found["mcc"] == pytest.approx(mcc)


def test_multi_label():
    true, predicted = CHANCE.random((100, 3)) < 0.4, CHANCE.random((100, 3)) < 0.5
    predicted[:50] = true[:50]
    found = metrics.multi_label(predicted.astype(float), true.astype(float))
    assert found["micro_f1"] == pytest.approx(f1(predicted, true))
    assert found["macro_f1"] == pytest.approx(np.mean([f1(predicted[:, c], true[:, c]) for c in range(3)]))
    assert found["subset_accuracy"] == pytest.approx(np.mean([np.array_equal(*row) for row in zip(predicted, true)]))


def test_regression():
    true = CHANCE.normal(size=50)
    predicted = np.exp(true) + CHANCE.normal(size=50) / 4
    found = metrics.regression(predicted, true)
    assert found["mse"] == pytest.approx(np.mean((predicted - true) ** 2))
    assert found["pearson"] == pytest.approx(np.corrcoef(predicted, true)[0, 1])
    ranks = [np.argsort(np.argsort(values)) for values in (predicted, true)]
    assert found["spearman"] == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert metrics.regression(np.full(50, 2.0), true)["pearson"] == 0


def test_token_labels_leave_out_what_is_not_asked_for_and_count_whole_entities():
    names = ["O", "B-x", "I-x", "B-y", "I-y"]
    true, predicted = bio(30, 12), bio(30, 12)
    predicted[:20] = [list(row) for row in true[:20]]
    ids = {name: place for place, name in enumerate(names)}
    asked = [[ids[tag] for tag in row] for row in true]
    given = [[ids[tag] for tag in row] for row in predicted]

    found = metrics.token_labels(
        np.array([[1, *row, 2] for row in given]), np.array([[-100, *row, -100] for row in asked]), names
    )
    assert found["accuracy"] == pytest.approx(np.mean(np.array(asked) == np.array(given)))
    sets = [({(n, *e) for n, row in enumerate(rows) for e in entities(row)}) for rows in (predicted, true)]
    hits = len(sets[0] & sets[1])
    assert found["entity_precision"] == pytest.approx(hits / len(sets[0]))
    assert found["entity_recall"] == pytest.approx(hits / len(sets[1]))
    assert found["entity_f1"] == pytest.approx(2 * hits / (len(sets[0]) + len(sets[1])))
    assert 0.5 < found["entity_f1"] < 1


def test_other_tags_have_no_entities():
    found = metrics.token_labels(np.array([[0, 1]]), np.array([[0, 1]]), ["noun", "verb"])
    assert found == {"accuracy": 1.0, "macro_f1": 1.0}
    assert not metrics.is_bio(["B-x", "I-x"]) and not metrics.is_bio(["O", "x"]) and metrics.is_bio(["B-x", "O"])
