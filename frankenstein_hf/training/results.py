"""What a run found, for people: the loss curve as a picture, and a section of the model card."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult
from huggingface_hub.repocard_data import eval_results_to_model_index

from ..hub.cards import checkpoint_link, is_hub_name
from ..hub.foreign import Markdown, code, markdown, one_line
from .pictures import COLOURS, Picture

LOSS_PICTURE = "loss.png"
NOTHING = Markdown("")
Curve = dict[str, list[list[float]]]


@dataclass(frozen=True)
class Results:
    """What a run found.

    Attributes:
        metrics: With "before" and "after", the baseline and the "recipe", dicts from names to values; as in
            `metrics.json`.
        baseline: Key of the baseline in `metrics`.
        baseline_words: What the baseline is.
        task: What the Hub calls the task.
        data: What it was trained on.
        dataset: The same as a name of the Hub, if it has one.
        picture: Name of the file with the loss curve, or None.
        data_words: What it was trained on, for a card.
        held_out: What it was evaluated on, for a card.
        sample: What the model makes of held-out data, for a card; "" for none.
        license, languages: What the user said about the model.
    """

    metrics: dict[str, Any]
    baseline: str
    baseline_words: str
    task: str
    data: str
    dataset: str | None = None
    picture: str | None = None
    data_words: Markdown = NOTHING
    held_out: Markdown = NOTHING
    sample: Markdown = NOTHING
    license: str | None = None
    languages: tuple[str, ...] = ()

    def text(self, start: str | None = None) -> Markdown:
        """Markdown: the data, a table of the metrics before and after, the picture, the recipe and a sample.

        Args:
            start: The checkpoint that training started from, a name of the Hub or a folder; None or "" for none.
        """
        before, after, baseline = (self.metrics.get(key, {}) for key in ("before", "after", self.baseline))
        said = [f"Trained on {self.data_words or code(self.data)}."]  # without folders of this machine
        if start:
            said.insert(0, f"Training started from the checkpoint {checkpoint_link(start)}.")
        if after:
            said.append(f"Evaluated on {self.held_out or 'the part of it that was held out'}:")
        parts = [" ".join(said)]
        if after:
            rows = [("", "before", "after", self.baseline_words), ("---", "---:", "---:", "---:")]
            rows += [
                (k.replace("_", " "), *map(_number, (before.get(k), v, baseline.get(k)))) for k, v in after.items()
            ]
            parts.append(_table(rows))
        if self.picture:
            parts.append(f"![Loss of training and of held-out data]({self.picture})")
        if recipe := self.metrics.get("recipe"):
            parts.append("### Recipe")
            parts.append(_table([("", ""), ("---", "---"), *((k, _number(v)) for k, v in recipe.items())]))
        if self.sample:
            parts.append(self.sample)
        return Markdown("\n\n".join(parts))

    def metadata(self) -> dict[str, Any]:
        """What the Hub reads about licence, languages and data."""
        known = {
            "license": self.license,
            "language": list(self.languages),
            "datasets": [self.dataset] if self.dataset and is_hub_name(self.dataset) else None,
        }
        return {key: value for key, value in known.items() if value}

    def model_index(self, name: str) -> list[dict[str, Any]] | None:
        """The metrics after training as the Hub's `model-index` of a model called `name`; None without any."""
        results = [
            EvalResult(
                task_type=self.task,
                dataset_type=self.dataset if self.dataset and is_hub_name(self.dataset) else "other",
                dataset_name=one_line(self.data),
                metric_type=one_line(metric),
                metric_value=value,
            )
            for metric, value in self.metrics.get("after", {}).items()
            if value is not None and math.isfinite(value)
        ]
        return eval_results_to_model_index(name, results) if results else None


def _number(value: Any) -> str:
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    return "–" if value is None else value


def _table(rows: list[tuple[Any, ...]]) -> str:
    border = rows[1]
    return "\n".join(f"| {' | '.join(row if row is border else map(markdown, row))} |" for row in rows)


def loss_curve(history: list[dict[str, Any]], metrics: dict[str, Any]) -> Curve:
    """Training and held-out loss against steps: "train" and "held_out", lists of [step, loss].

    Args:
        history: `trainer.state.log_history` after training, which a checkpoint brings along when training resumes.
        metrics: With the evaluation "before" the first step, if there was one.
    """
    train = {entry["step"]: entry["loss"] for entry in history if "loss" in entry}
    held_out = {entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry}
    if "before" in metrics:
        held_out[0] = metrics["before"]["loss"]
    return {name: sorted(map(list, points.items())) for name, points in (("train", train), ("held_out", held_out))}


def draw_loss(
    curve: Curve, path: Path, title: str = "", baseline: float | None = None, baseline_words: str = ""
) -> tuple[str | None, str | None]:
    """Draw the curve into a PNG.

    A training loss is the mean since the one before, and stands in the middle of the steps it is the mean of.

    Args:
        curve: From `loss_curve`.
        path: Where to write.
        title: What was trained.
        baseline, baseline_words: The loss of knowing next to nothing, if there is one, and what that is.

    Returns:
        The file's name, or None when it could not be drawn, and then why, in one line.
    """
    if not any(curve.values()):
        return None, None
    try:
        picture = Picture(title)
    except ImportError as error:
        return None, f"No {path.name}: {one_line(error)}"
    (axes,) = picture.panels
    places = [0, *(step for step, _ in curve["train"])]
    middles = [[(before + step) / 2, loss] for before, (step, loss) in zip(places, curve["train"])]
    held_out = "o-" if len(curve["held_out"]) > 2 else "o"  # a line through two points would tell of a course
    picture.curve(axes, "training", middles, COLOURS[0], "-")
    picture.curve(axes, "held out", curve["held_out"], COLOURS[1], held_out)
    if baseline is not None and math.isfinite(baseline):
        picture.level(axes, baseline_words, baseline)
    axes.set_xlabel("training step")
    axes.set_ylabel("loss (nats)" if baseline is not None else "loss")
    picture.save(path)
    return path.name, None
