"""Statistics of campaigns on simulated ones, of which the truth is known."""

import numpy as np
import pytest

from frankenstein_hf.arena.statistics import difference, pair_effects, perhaps_best, pooled_seed_deviation

SEEDS, DOCUMENTS, ITEMS = 3, 60, 4  # items a document


def campaign(rng, truths, seed=0.05, document=0.05, item=0.1):
    """Sums [S, N] of configurations with these true scores; what is common to all drops out of differences."""
    counts = rng.integers(8, 30, DOCUMENTS * ITEMS).astype(float)
    documents = np.repeat(np.arange(DOCUMENTS), ITEMS)
    common = rng.normal(0, 1, (1, len(counts))) + rng.normal(0, 0.2, (SEEDS, 1))
    runs = {}
    for name, truth in truths.items():
        own = rng.normal(0, document, DOCUMENTS)[documents] + rng.normal(0, item, len(counts))
        runs[name] = (truth + common + own + rng.normal(0, seed, (SEEDS, 1))) * counts
    return runs, counts, documents


@pytest.mark.parametrize("noise", [{}, {"seed": 0.002, "document": 0.2}, {"document": 0.0, "item": 0.01}])
def test_intervals_of_ninety_five_percent_cover_the_truth_that_often(noise):
    rng = np.random.default_rng(1)
    truths = {str(number): 5 + 0.02 * number for number in range(6)}
    inside = trials = 0
    for _ in range(150):
        runs, counts, documents = campaign(rng, truths, **noise)
        deviation = pooled_seed_deviation(list(runs.values()), counts)
        for one, other in (("0", "1"), ("2", "5")):
            found = difference(runs[one], runs[other], counts, documents, deviation)
            inside += found.low <= truths[one] - truths[other] <= found.high
            trials += 1
    assert 0.92 <= inside / trials <= 0.985


def test_what_dominates_is_said_and_the_pooled_deviation_is_that_of_a_difference():
    rng = np.random.default_rng(2)
    found = []
    for _ in range(50):
        runs, counts, documents = campaign(rng, dict.fromkeys("abcdef", 5.0), seed=0.05)
        deviation, degrees = pooled_seed_deviation(list(runs.values()), counts)
        found.append(deviation**2)
        assert degrees == 10
    assert np.sqrt(np.mean(found)) == pytest.approx(0.05 * np.sqrt(2), rel=0.1)
    assert difference(runs["a"], runs["b"], counts, documents, (deviation, degrees)).dominant == "seeds"
    assert difference(runs["a"], runs["b"], counts, documents, (1e-6, degrees)).dominant == "items"
    with pytest.raises(ValueError, match="different seeds or items"):
        difference(runs["a"], runs["b"][:2], counts, documents, (deviation, degrees))
    with pytest.raises(ValueError, match="two configurations and two seeds"):
        pooled_seed_deviation([runs["a"][:1]], counts)


def test_noise_has_no_winner_and_the_true_best_is_among_those_that_may_be_it():
    rng = np.random.default_rng(3)
    winners = kept = 0
    for _ in range(120):
        runs, counts, documents = campaign(rng, dict.fromkeys("abcdef", 5.0))
        winners += len(perhaps_best(runs, counts, documents)) == 1
        truths = dict(zip("abcdef", [5.0, 5.03, 5.06, 5.1, 5.2, 5.4]))
        kept += "a" in perhaps_best(*campaign(rng, truths))
    assert winners <= 6 and kept >= 114
    clear = perhaps_best(*campaign(rng, {"a": 5.0, "b": 6.0, "c": 5.9}))
    assert clear == ["a"]
    assert perhaps_best(*campaign(rng, {"a": 5.0})) == ["a"]


def test_planted_effects_of_pairs_come_back_also_where_cells_are_missing():
    rng = np.random.default_rng(4)
    names = "abcdef"
    first, second = (dict(zip(names, values - values.mean())) for values in rng.normal(0, 0.2, (2, 6)))
    cells = {(x, y): 5 + first[x] + second[y] for x in names for y in names}
    some = {pair: score for number, (pair, score) in enumerate(cells.items()) if number % 5 != 2}
    for measured in (cells, some):
        found = pair_effects(measured)
        assert found.mean == pytest.approx(5)
        assert found.first == pytest.approx(first) and found.second == pytest.approx(second)
        assert all(abs(value) < 1e-9 for value in found.interactions.values())
        for (x, y), value in found.order.items():
            assert value == pytest.approx(first[x] + second[y] - first[y] - second[x])
    planted = pair_effects({**cells, ("a", "b"): cells["a", "b"] - 0.5})
    assert min(planted.interactions, key=planted.interactions.get) == ("a", "b")
    with pytest.raises(ValueError, match="fall apart"):
        pair_effects({("a", "b"): 1.0, ("c", "d"): 2.0})
