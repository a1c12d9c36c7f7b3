"""Names of classes: `id2label`, `label2id` and `num_labels`, which say the same three ways."""

from collections.abc import Mapping
from typing import Any

from .values import checked, problem, shown

LABEL_KEYS = ("id2label", "label2id", "num_labels")
NUM_LABELS: tuple[Any, dict[str, Any]] = (int | None, {"minimum": 1, "maximum": 2**17})


def read_labels(given: Mapping[str, Any]) -> tuple[dict[int, str] | None, dict[str, int] | None]:
    """`id2label` and `label2id`, each the inverse of the other, of what was given of them and `num_labels`.

    Raises:
        ValueError: No dict of ids from 0 upwards and different names, or values that contradict each other.
    """
    id2label, label2id, number = (given.get(key) for key in ("id2label", "label2id", "num_labels"))
    if number is not None:
        checked("num_labels", number, *NUM_LABELS)
    names = None if id2label is None else _label_names("id2label", id2label)
    inverse = label2id
    if label2id is not None:
        if not isinstance(label2id, Mapping) or not all(problem(i, int, {}) == "" for i in label2id.values()):
            raise ValueError(f"label2id={shown(label2id)}: label2id must be a dict of names and whole numbers.")
        by_id = {i: name for name, i in label2id.items()}
        inverse = _label_names("label2id", by_id if len(by_id) == len(label2id) else {}, label2id)
    if names is not None and inverse is not None and names != inverse:
        raise ValueError(f"id2label={shown(id2label)} and label2id={shown(label2id)} contradict each other; give one.")
    names = names if names is not None else inverse
    if names is not None and number is not None and number != len(names):
        key, value = ("id2label", id2label) if id2label is not None else ("label2id", label2id)
        raise ValueError(f"num_labels={number} contradicts {key}={shown(value)} with {len(names)} labels; give one.")
    return names, None if names is None else {name: i for i, name in names.items()}


def _label_names(key: str, value: Any, given: object = None) -> dict[int, str]:
    """`value` with ids as numbers, in their order; a message quotes what was `given`, by default the same."""
    message = f"{key}={shown(given or value)}: {key} must give each of the ids 0, 1, 2 … one name, all different."
    if not isinstance(value, Mapping) or not value:
        raise ValueError(message)
    names = {}
    for i, name in value.items():
        number = int(i) if isinstance(i, str) and i.isascii() and i.isdigit() else i
        if not isinstance(number, int) or isinstance(number, bool) or not isinstance(name, str):
            raise ValueError(message)
        names[number] = name
    if sorted(names) != list(range(len(value))) or len(set(names.values())) != len(value):
        raise ValueError(message)
    return dict(sorted(names.items()))


def check_problem(problem_type: str | None, num_labels: int | None) -> None:
    """Raise ValueError for a single label of which there is one."""
    if problem_type == "single_label_classification" and num_labels == 1:
        raise ValueError(
            "problem_type='single_label_classification' needs num_labels of at least 2, got num_labels=1; one number "
            "is problem_type='regression'."
        )
