"""Several language models on the same held-out rows, and how sure the difference is.

A row is scored by the sum of −log p over its predicted tokens and by how many there are. Models are compared row by
row: what makes a text hard for one makes it hard for the others, and drops out of the difference. The interval comes
from a bootstrap over rows, of the ratio of sums (nats a token; nats a character where tokenizers differ).
It says how sure the difference between *these* models is. What another seed would give, it cannot know.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import recipes
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
            difference = f"{row['difference']:+.4f}" if "difference" in row else ""
            lines.append(
                f"{row['model']:<32} {row['score']:>16.4f} {difference:>11} {interval:>20} {row['parameters']:>12,} "
                f"{row['cpu_seconds']:>8.2f}"
            )
        lines.append(
            f"{self.values['items']} held-out rows of {self.values['data']}. The interval is over rows: another "
            "seed of training may differ by more."
        )
        return "\n".join(lines)


def compared(models: Sequence[str], recipe: str | None = None) -> Comparison:
    """Score every model on the held-out rows of a recipe, by default of the run that the first model comes from.

    Raises:
        BadInput: A model is no language model, two have other objectives, or there is no recipe.
    """
    if recipe is None:
        if not (Path(models[0]) / recipes.RESOLVED).is_file():
            raise BadInput(f"{models[0]} has no {recipes.RESOLVED}: say with --recipe whose held-out rows to use.")
        recipe = models[0]
    read = recipes.load(recipe)
    if read.values.get("task", "masked_lm") not in ("masked_lm", "causal_lm"):
        raise BadInput(f"compare scores language models; the task of {recipe} is {read.values['task']}.")
    items = read.values.get("evaluation", {}).get("items", 400)
    scored, data, vocabularies = [], "", []
    for model in models:
        settings = {"training": {"do_train": False, "output_dir": NOWHERE}, "model": None, "tokenizer": None}
        one = read.with_settings(settings, "compare").with_settings({"model": {"from": model}}, "compare")
        run = recipes.validate(one)
        tokenizer, train, held_out = run.prepare_data()
        built = run.build_model().eval()
        trainer = run.trainer(built, train, held_out)
        sums, counts, characters, seconds = _score(trainer, tokenizer, items)
        vocabularies.append(tokenizer.get_vocab())
        data = run.metrics["data"]["origin"]
        parameters = sum(p.numel() for p in built.parameters())
        scored.append((model, sums, counts, characters, parameters, seconds))
    same = all(v == vocabularies[0] for v in vocabularies) and len({len(sums) for _, sums, *_ in scored}) == 1
    if not same and any(len(sums) != len(scored[0][1]) for _, sums, *_ in scored):
        raise BadInput(
            "the models cut the held-out text into different numbers of rows, because their tokenizers differ. Use "
            "data.packing=none, so that a row is a document."
        )
    units = [counts if same else characters for _, _, counts, characters, _, _ in scored]
    rows = []
    for place, (model, sums, _, _, parameters, seconds) in enumerate(scored):
        row: dict[str, Any] = {"model": model, "score": float(sums.sum() / units[place].sum())}
        if place:
            row |= paired(sums, units[place], scored[0][1], units[0])
        rows.append(row | {"parameters": parameters, "cpu_seconds": seconds})
    return Comparison({"unit": UNITS[same], "items": len(scored[0][1]), "data": data, "models": rows})


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
    difference = sums.sum() / units.sum() - other_sums.sum() / other_units.sum()
    return {"difference": float(difference), "low": float(low), "high": float(high)}


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
