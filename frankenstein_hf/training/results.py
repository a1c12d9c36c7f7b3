"""What a run found, for people: the loss curve as a picture, and a section of the model card."""

import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult
from huggingface_hub.repocard_data import eval_results_to_model_index

from ..data.atomic import write_bytes
from ..hub.cards import checkpoint_link

LOSS_PICTURE = "loss.png"
Curve = dict[str, list[list[float]]]


@dataclass(frozen=True)
class Results:
    """What a run found.

    Attributes:
        metrics: With "before" and "after" and the baseline, dicts from names to numbers; as in `metrics.json`.
        baseline: Key of the baseline in `metrics`.
        baseline_words: What the baseline is.
        task: What the Hub calls the task.
        data: What it was evaluated on, in words.
        dataset: The same as a name of the Hub, if it has one.
        picture: Name of the file with the loss curve, or None.
    """

    metrics: dict[str, Any]
    baseline: str
    baseline_words: str
    task: str
    data: str
    dataset: str | None
    picture: str | None

    def text(self, start: str | None = None) -> str:
        """Markdown: what it was trained on, a table of the metrics before and after, and the picture.

        Args:
            start: The checkpoint that training started from, a name of the Hub or a folder; None or "" for none.
        """
        before, after, baseline = (self.metrics.get(key, {}) for key in ("before", "after", self.baseline))
        origin = self.metrics.get("data", {}).get("origin", "")
        said = [
            f"Trained on: {origin if origin.startswith(self.data) else self.data}."
        ]  # without folders of this machine
        if start:
            said.insert(0, f"Training started from the checkpoint {checkpoint_link(start)}.")
        if after:
            said.append("Evaluated on the part of it that was held out:")
        parts = [" ".join(said)]
        if after:
            rows = [f"| | before | after | {self.baseline_words} |", "|---|---:|---:|---:|"]
            for name, value in after.items():
                cells = (before.get(name), value, baseline.get(name))
                rows.append(f"| {name.replace('_', ' ')} | {' | '.join(map(_number, cells))} |")
            parts.append("\n".join(rows))
        if self.picture:
            parts.append(f"![loss]({self.picture})")
        return "\n\n".join(parts)

    def model_index(self, name: str) -> list[dict[str, Any]] | None:
        """The metrics after training as the Hub's `model-index` of a model called `name`; None without any."""
        results = [
            EvalResult(
                task_type=self.task,
                dataset_type=self.dataset or "other",
                dataset_name=self.data,
                metric_type=metric,
                metric_value=value,
            )
            for metric, value in self.metrics.get("after", {}).items()
            if value is not None and math.isfinite(value)
        ]
        return eval_results_to_model_index(name, results) if results else None


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


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


def draw_loss(curve: Curve, path: Path) -> tuple[str | None, str | None]:
    """Draw the curve into a PNG.

    Returns:
        The file's name, or None when it could not be drawn, and then why, in one line.
    """
    if not any(curve.values()):
        return None, None
    try:
        from matplotlib.figure import Figure  # without pyplot: no display, no state
    except ImportError:
        return None, f"No {path.name}: drawing the loss needs matplotlib, pip install 'frankenstein_hf[plots]'."
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    held_out = "o-" if len(curve["held_out"]) > 2 else "o"  # a line through two points would tell of a course
    for name, label, style in (("train", "training", "-"), ("held_out", "held out", held_out)):
        if curve[name]:
            axes.plot(*zip(*curve[name]), style, label=label, markersize=4)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    axes.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    write_bytes(path, buffer.getvalue())
    return path.name, None
