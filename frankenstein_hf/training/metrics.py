"""How good predictions are, by scikit-learn, SciPy and nervaluate.

All functions take NumPy arrays of predictions and true labels and return plain numbers.
"""

from typing import Any

import numpy as np


def single_label(predicted: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Accuracy, macro F1 and Matthews' correlation coefficient of class ids [N]."""
    from sklearn import metrics

    return {
        "accuracy": float(metrics.accuracy_score(true, predicted)),
        "macro_f1": float(metrics.f1_score(true, predicted, average="macro", zero_division=0)),
        "mcc": float(metrics.matthews_corrcoef(true, predicted)),
    }


def multi_label(predicted: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Micro and macro F1, and the share of rows with every label right; of 0 and 1 [N, labels]."""
    from sklearn import metrics

    predicted, true = predicted.astype(int), true.astype(int)
    return {
        "micro_f1": float(metrics.f1_score(true, predicted, average="micro", zero_division=0)),
        "macro_f1": float(metrics.f1_score(true, predicted, average="macro", zero_division=0)),
        "subset_accuracy": float((predicted == true).all(axis=1).mean()),
    }


def regression(predicted: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Mean squared error, Pearson's and Spearman's correlation of numbers [N].

    A correlation with something that never varies does not exist; 0 is given for it.
    """
    from scipy import stats
    from sklearn import metrics

    predicted, true = predicted.astype(np.float64), true.astype(np.float64)
    results = {"mse": float(metrics.mean_squared_error(true, predicted))}
    varied = np.ptp(predicted) > 0 and np.ptp(true) > 0
    for name, correlation in (("pearson", stats.pearsonr), ("spearman", stats.spearmanr)):
        results[name] = float(correlation(predicted, true).statistic) if varied else 0.0
    return results


def token_labels(predicted: np.ndarray, true: np.ndarray, names: list[str]) -> dict[str, float]:
    """Accuracy and macro F1 of class ids [N, T] where `true` is not −100; for BIO tags also those of whole entities.

    An entity counts as found if its borders and kind are exactly right.
    """
    rows = [(p[t != -100], t[t != -100]) for p, t in zip(predicted, true)]
    scores = single_label(*(np.concatenate(part) for part in zip(*rows)))
    results = {name: scores[name] for name in ("accuracy", "macro_f1")}
    if is_bio(names):
        from nervaluate import Evaluator

        tags = [[[names[label] for label in part] for part in row] for row in rows]
        kinds = sorted({name[2:] for name in names if name != "O"})
        evaluator = Evaluator([t for _, t in tags], [p for p, _ in tags], tags=kinds, loader="list")
        strict: Any = evaluator.evaluate()["overall"]["strict"]
        for name in ("precision", "recall", "f1"):
            results[f"entity_{name}"] = float(getattr(strict, name))
    return results


def is_bio(names: list[str]) -> bool:
    """Whether labels mark the beginnings and insides of entities, as in B-person, I-person, O."""
    return "O" in names and any(name.startswith("B-") for name in names) and all(
        name == "O" or name.startswith(("B-", "I-")) for name in names
    )  # fmt: skip
