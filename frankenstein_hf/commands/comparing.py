"""Several language models on the same held-out rows, and how sure the difference is.

A row is scored by the sum of −log p over its predicted tokens and by how many there are. Models are compared row by
row: what makes a text hard for one makes it hard for the others, and drops out of the difference. The interval comes
from a bootstrap over rows, of the ratio of sums (nats a token; nats a character where tokenizers differ).
It says how sure the difference between *these* models is. What another seed would give, it cannot know: for that, give
each configuration several runs, joined by commas, and the interval covers seeds too (`arena/statistics.py`).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import recipes
from ..arena.statistics import difference, perhaps_best, pooled_seed_deviation
from ..recipes.loading import NOWHERE
from ..training.failures import BadInput

DRAWS, SEED = 2000, 0
UNITS = {True: "nats a token", False: "nats a character"}


@dataclass
class Comparison:
    """Rows of a comparison; `str()` is a table."""

    values: dict[str, Any]

    def __str__(self) -> str:
        head = f"{'model':<32} {self.values['unit']:>16} {'difference':>11} {'95 % interval':>20}"
        lines = [f"{head} {'parameters':>12} {'CPU s':>8}"]
        for row in self.values["models"]:
            interval = f"{row['low']:+.4f} … {row['high']:+.4f}" if "low" in row else ""
            gap = f"{row['difference']:+.4f}" if "difference" in row else ""
            lines.append(
                f"{row['model']:<32} {row['score']:>16.4f} {gap:>11} {interval:>20} {row['parameters']:>12,} "
                f"{row['cpu_seconds']:>8.2f}"
            )
        what = f"{self.values['items']} held-out rows of {self.values['data']}."
        if "perhaps_best" in self.values:
            lines.append(f"{what} The intervals are over seeds and rows.")
            lines.append(f"Not to be told from the best: {'; '.join(self.values['perhaps_best'])}.")
        else:
            lines.append(f"{what} The interval is over rows: another seed of training may differ by more.")
        return "\n".join(lines)


def compared(models: Sequence[str], recipe: str | None = None) -> Comparison:
    """Score every model on the held-out rows of a recipe, by default of the run that the first model comes from.

    Args:
        models: Folders or names on the Hub; several runs of one configuration, from different seeds, joined by commas.
        recipe: Whose data to use.

    Raises:
        BadInput: A model is no language model, may have been trained on these rows, or there is no recipe.
    """
    configurations = [[name for name in model.split(",") if name] for model in models]
    if not all(configurations) or len({len(own) for own in configurations}) > 1:
        raise BadInput("give every configuration the same number of runs, from the same seeds, joined by commas.")
    first = configurations[0][0]
    if recipe is None and not (Path(first) / recipes.RESOLVED).is_file():
        raise BadInput(f"{first} has no {recipes.RESOLVED}: say with --recipe whose held-out rows to use.")
    read = recipes.load(recipe or first)
    if read.values.get("task", "masked_lm") not in ("masked_lm", "causal_lm"):
        raise BadInput(f"compare scores language models; the task of {recipe or first} is {read.values['task']}.")
    scored = [[_scored(read, name) for name in own] for own in configurations]
    flat = [one for own in scored for one in own]
    if len({len(one.sums) for one in flat}) > 1:
        raise BadInput(
            "the models cut the held-out text into different numbers of rows, because their tokenizers differ. Use "
            "data.packing=none, so that a row is a document."
        )
    same = all(one.vocabulary == flat[0].vocabulary for one in flat)
    rows, runs, reference = [], {}, scored[0]
    units = reference[0].counts if same else reference[0].characters
    for place, (model, own) in enumerate(zip(models, scored)):
        runs[model] = np.stack([one.sums for one in own])
        own_units = own[0].counts if same else own[0].characters
        row: dict[str, Any] = {"model": model, "score": float(runs[model].mean(0).sum() / own_units.sum())}
        if place and len(own) == 1:
            row |= paired(own[0].sums, own_units, reference[0].sums, units)
        costs = {"parameters": own[0].parameters, "cpu_seconds": sum(one.seconds for one in own) / len(own)}
        rows.append(row | costs)
    found = {"unit": UNITS[same], "items": len(flat[0].sums), "data": flat[0].data, "models": rows}
    if len(reference) > 1:
        if not same:
            raise BadInput("runs from several seeds can be compared where all have one tokenizer: tokenizer.from.")
        if len(runs) < len(models):
            raise BadInput("a configuration is given twice.")
        documents = np.arange(len(units))
        deviation = pooled_seed_deviation(list(runs.values()), units)
        for row in rows[1:]:
            gap = difference(runs[row["model"]], runs[models[0]], units, documents, deviation)
            row |= {"difference": gap.value, "low": gap.low, "high": gap.high, "dominant": gap.dominant}
        found["perhaps_best"] = perhaps_best(runs, units, documents)
    return Comparison(found)


class _Scored(NamedTuple):
    """One model's rows: sums of −log p, predicted tokens and characters, [N] each; and what it is."""

    sums: np.ndarray
    counts: np.ndarray
    characters: np.ndarray
    seconds: float
    parameters: int
    vocabulary: dict[str, int]
    data: str


def _scored(read: recipes.Recipe, model: str) -> _Scored:
    settings = {"training": {"do_train": False, "output_dir": NOWHERE}, "model": None, "tokenizer": None}
    one = read.with_settings(settings, "compare").with_settings({"model": {"from": model}}, "compare")
    run = recipes.validate(one)
    tokenizer, train, held_out = run.prepare_data()
    _check_held_out(read, model, bool(run.source and run.source.split_here))
    built = run.build_model().eval()
    items = read.values.get("evaluation", {}).get("items", 400)
    numbers = _score(run.trainer(built, train, held_out), tokenizer, items)
    parameters = sum(p.numel() for p in built.parameters())
    return _Scored(*numbers, parameters, tokenizer.get_vocab(), run.metrics["data"]["origin"])


def _check_held_out(read: recipes.Recipe, model: str, split_here: bool) -> None:
    """Raise `BadInput` if the model's run held out other rows of the same data, and trained on these."""
    if not (Path(model) / recipes.RESOLVED).is_file():
        return
    other = recipes.load(model)
    ours, theirs = read.values.get("data", {}), other.values.get("data", {})
    source = ("dataset_name", "dataset_config_name", "train_file")
    if not split_here or any(ours.get(key) != theirs.get(key) for key in source):
        return
    share = [data.get("validation_split_percentage", 5.0) for data in (ours, theirs)]
    seeds = [recipe.values.get("training", {}).get("seed", 42) for recipe in (read, other)]
    named = any(ours.get(key) for key in source)  # the embedded corpus is divided without a seed
    if share[0] != share[1] or (named and seeds[0] != seeds[1]):
        raise BadInput(
            f"{model} held out other rows of the same data (training.seed or data.validation_split_percentage differ), "
            "so it was trained on some of these. Give all runs data.validation_file."
        )


def paired(
    sums: np.ndarray, units: np.ndarray, other_sums: np.ndarray, other_units: np.ndarray, draws: int = DRAWS
) -> dict[str, float]:
    """The difference of two ratios of sums over the same rows, with its 95 % interval.

    Args:
        sums, units: Of the model, one a row.
        other_sums, other_units: Of the one it is compared with.
        draws: Of the bootstrap.
    """
    chosen = np.random.default_rng(SEED).integers(0, len(sums), (draws, len(sums)))
    first = sums[chosen].sum(1) / units[chosen].sum(1)
    differences = first - other_sums[chosen].sum(1) / other_units[chosen].sum(1)
    low, high = np.quantile(differences, (0.025, 0.975))
    value = sums.sum() / units.sum() - other_sums.sum() / other_units.sum()
    return {"difference": float(value), "low": float(low), "high": float(high)}


@torch.no_grad()
def _score(trainer: Any, tokenizer: Any, items: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Sums of −log p, numbers of predicted tokens and of characters, row by row, and CPU seconds."""
    rows = trainer.eval_dataset.select(range(min(items, len(trainer.eval_dataset))))
    model, device = trainer.model, trainer.args.device
    sums, counts, characters = [], [], []
    began = time.process_time()
    causal = bool(getattr(model, "is_causal", "CausalLM" in type(model).__name__))
    for row in rows:
        batch = trainer.data_collator([row])
        labels = batch.pop("labels").to(device)
        logits = model(**{key: value.to(device) for key, value in batch.items()}).logits
        if causal:
            logits, labels = logits[:, :-1], labels[:, 1:]
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).double(), labels.flatten(), ignore_index=-100, reduction="sum"
        )
        sums.append(losses.item())
        counts.append(int((labels != -100).sum()))
        characters.append(len(tokenizer.decode(row["input_ids"], skip_special_tokens=True)))
    return np.array(sums), np.array(counts, float), np.array(characters, float), time.process_time() - began
