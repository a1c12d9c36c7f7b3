"""What a campaign of runs allows to conclude: intervals of differences, who may be the best, effects of pairs.

A configuration is trained from S seeds and scored on N items of D documents. Runs with the same seed see the same data
in the same order, and all see the same items, so differences are taken seed by seed and item by item. What is left has
two sources: another seed (σ²_seed / S, its σ pooled over the family, as three seeds alone know little) and other items
(from a bootstrap over documents, since sentences of one document are alike).

Shapes: C configurations, S seeds, N items; scores are nats a token, lower is better.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

DRAWS, SEED, LEVEL = 2000, 0, 0.95


@dataclass(frozen=True)
class Difference:
    """The first configuration's score less the second's.

    Attributes:
        value: The difference; below 0 the first is better.
        low, high: Its 95 % interval.
        seed_error, item_error: Standard errors of the two sources.
        degrees: Degrees of freedom of `seed_error`.
    """

    value: float
    low: float
    high: float
    seed_error: float
    item_error: float
    degrees: int

    @property
    def error(self) -> float:
        """Standard error of both sources together."""
        return float(np.hypot(self.seed_error, self.item_error))

    @property
    def dominant(self) -> str:
        """What would have to be more to know more: "seeds" or "items"."""
        return "seeds" if self.seed_error >= self.item_error else "items"


@cache
def t_quantile(probability: float, degrees: int) -> float:
    """The two-sided quantile of Student's t, by simulation with a fixed seed (to about 1 %)."""
    sample = np.abs(np.random.default_rng(SEED).standard_t(degrees, 400_000))
    return float(np.quantile(sample, probability))


def _score(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Nats a token of every seed, [S], from sums [S, N] over items with `counts` [N] tokens."""
    return sums.sum(-1) / counts.sum()


def pooled_seed_deviation(family: Sequence[np.ndarray], counts: np.ndarray) -> tuple[float, int]:
    """Standard deviation over seeds of a *difference* of two configurations, pooled over all of a family.

    Every configuration is taken against the mean of the family, seed by seed: what a seed does to all alike drops out.

    Args:
        family: Sums of every configuration, [S, N] each with the same seeds.
        counts: Tokens of the items, [N].

    Returns:
        The deviation, and its degrees of freedom, (C − 1)(S − 1).
    """
    scores = np.stack([_score(sums, counts) for sums in family])  # [C, S]
    rest = scores - scores.mean(0) - scores.mean(1, keepdims=True) + scores.mean()
    degrees = (scores.shape[0] - 1) * (scores.shape[1] - 1)
    if degrees < 1:
        raise ValueError("A standard deviation over seeds needs two configurations and two seeds at least.")
    return float(np.sqrt(2 * (rest**2).sum() / degrees)), degrees


def difference(
    first: np.ndarray,
    second: np.ndarray,
    counts: np.ndarray,
    documents: np.ndarray,
    seed_deviation: tuple[float, int],
    level: float = LEVEL,
) -> Difference:
    """How much worse `first` is than `second`, and how sure that is.

    Args:
        first, second: Sums of −log p, [S, N], of the same seeds and items.
        counts: Tokens of the items, [N].
        documents: Number of the document of each item, [N].
        seed_deviation: Of the family; see `pooled_seed_deviation`.
        level: Of the interval.
    """
    if first.shape != second.shape:
        raise ValueError(f"The runs have different seeds or items: {first.shape} and {second.shape}.")
    gap = (first - second).mean(0)
    numbers = np.unique(documents)
    by_document = np.stack([[gap[documents == d].sum(), counts[documents == d].sum()] for d in numbers])
    chosen = np.random.default_rng(SEED).integers(0, len(numbers), (DRAWS, len(numbers)))
    drawn = by_document[chosen].sum(1)
    item_error = float((drawn[:, 0] / drawn[:, 1]).std())
    seed_error = seed_deviation[0] / np.sqrt(len(first))
    value = float(gap.sum() / counts.sum())
    reach = t_quantile(level, seed_deviation[1]) * float(np.hypot(seed_error, item_error))
    return Difference(value, value - reach, value + reach, float(seed_error), item_error, seed_deviation[1])


def perhaps_best(
    runs: Mapping[str, np.ndarray], counts: np.ndarray, documents: np.ndarray, level: float = LEVEL
) -> list[str]:
    """The configurations that cannot be told from the best one, best first; a winner only if it is alone.

    Each is compared with the one of the lowest score; Holm's procedure keeps the chance of any wrong exclusion below
    1 − `level`.

    Args:
        runs: Sums of each configuration, [S, N].
        counts, documents: As in `difference`.
        level: How sure an exclusion has to be.
    """
    order = sorted(runs, key=lambda name: _score(runs[name], counts).mean())
    if len(order) < 2:
        return order
    deviation = pooled_seed_deviation(list(runs.values()), counts)
    gaps = {name: difference(runs[name], runs[order[0]], counts, documents, deviation) for name in order[1:]}
    surest = sorted(gaps, key=lambda name: gaps[name].value / gaps[name].error, reverse=True)
    excluded = []
    for place, name in enumerate(surest):
        needed = t_quantile(1 - (1 - level) / (len(surest) - place), deviation[1])
        if gaps[name].value / gaps[name].error < needed:
            break
        excluded.append(name)
    return [name for name in order if name not in excluded]


# ---------------------------------------------------------------------- pairs of mixers


@dataclass(frozen=True)
class PairEffects:
    """L_AB = μ + a_A + b_B + s_AB: what mixers do in the first and in the second place.

    Attributes:
        mean: μ.
        first, second: a and b, each with mean 0.
        interactions: s of every measured cell.
        order: L_AB − L_BA of every pair measured both ways; below 0, A first is better.
    """

    mean: float
    first: dict[str, float]
    second: dict[str, float]
    interactions: dict[tuple[str, str], float]
    order: dict[tuple[str, str], float]


def pair_effects(cells: Mapping[tuple[str, str], float]) -> PairEffects:
    """Fit the effects to the cells that were measured, by least squares; missing cells bias nothing.

    Args:
        cells: (first mixer, second mixer) -> score.

    Raises:
        ValueError: The cells do not connect all mixers, so that effects cannot be told apart.
    """
    names = sorted({name for pair in cells for name in pair})
    firsts, seconds = sorted({a for a, _ in cells}), sorted({b for _, b in cells})
    design = np.zeros((len(cells), 1 + len(firsts) + len(seconds)))
    for row, (a, b) in enumerate(cells):
        design[row, [0, 1 + firsts.index(a), 1 + len(firsts) + seconds.index(b)]] = 1
    if np.linalg.matrix_rank(design) < len(firsts) + len(seconds) - 1:
        raise ValueError(f"The measured pairs of {', '.join(names)} fall apart into groups that share no mixer.")
    scores = np.array(list(cells.values()))
    fitted, *_ = np.linalg.lstsq(design, scores, rcond=None)
    a, b = fitted[1 : 1 + len(firsts)], fitted[1 + len(firsts) :]
    return PairEffects(
        float(fitted[0] + a.mean() + b.mean()),
        dict(zip(firsts, (a - a.mean()).tolist())),
        dict(zip(seconds, (b - b.mean()).tolist())),
        dict(zip(cells, (scores - design @ fitted).tolist())),
        {(x, y): cells[x, y] - cells[y, x] for x, y in cells if x < y and (y, x) in cells},
    )
