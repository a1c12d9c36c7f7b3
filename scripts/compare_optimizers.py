"""Train one small hybrid language model with many optimizers: held-out loss, time and state of each.

    python scripts/compare_optimizers.py --json results.json --markdown results.md --plot results.png
    python scripts/compare_optimizers.py --optimizers adamw muon --factors 0.3 1 3 --seeds 1 --steps 50

The model alternates gated_deltanet and swa and learns the embedded corpus. For each optimizer the learning rate is
swept on the first seed (while the best is at an edge of the grid, the grid grows by one, a few times) and the best one
is repeated on the others; a seed decides the initial weights and the order of the rows.
All learning rates of an optimizer (also the AdamW's inside) move by the same factor from their documented defaults,
over a linear warm-up and a cosine to zero; schedule-free methods have their own warm-up and nothing else. Gradients are
clipped to norm 1, as transformers' `Trainer` does, except where the method evaluates the loss itself. Seconds are those
of the process' CPU time, evaluations left out.

Every run is written to --json as soon as it is finished. The same command again goes on where it was interrupted, and
only writes the page and the plot once all runs are there; further optimizers can be added to the same file.
"""

import math
import platform
import statistics
import sys
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from comparing import Results, Run, corpus_rows, warm_up, warm_up_then_cosine, written_by
from torch import Tensor, nn
from transformers import HfArgumentParser

import frankenstein_hf as fhf
from frankenstein_hf.data.atomic import write_text
from frankenstein_hf.optim.spec import OPTIMIZERS
from frankenstein_hf.training.pictures import Picture

# At least one of every family, the costly ones last.
DEFAULT = [
    "adamw", "sgd_momentum", "lion", "adafactor", "muon", "turbo_muon", "mars_adamw", "cautious_adamw", "apollo",
    "galore_adamw", "prodigy", "schedulefree_adamw", "soap", "ea4llm",
]  # fmt: skip
HELD_OUT = 32  # rows the loss is reported on
EVALUATIONS = 10  # points of a curve after the first
# Why adafactor leads the default comparison; measured with `groups={"norms": {"lr": 0.09}}` and all else alike.
ASIDE = (
    "Most of adafactor's lead is one of rates, not of directions: its steps are relative to a tensor's size, so norm "
    "gains, which start at 1, move 0.09 a step while matrices, which start at 0.02, hardly do. AdamW at 0.009 with "
    "norms at 0.09 ended at 4.39 on the first seed instead of 5.12."
)
POPULATION = 10  # most evaluations of the loss in a step of an evolution strategy


@dataclass
class Arguments:
    """What to compare."""

    optimizers: list[str] = field(default_factory=lambda: DEFAULT, metadata={"help": "optimizers to run"})
    factors: list[float] = field(
        default_factory=lambda: [1 / 3, 1.0, 3.0],
        metadata={"help": "the sweep, in units of each optimizer's default learning rate"},
    )
    learning_rates: list[float] | None = field(
        default=None, metadata={"help": "the sweep in numbers, the same for all, instead of --factors"}
    )
    extensions: int = field(default=2, metadata={"help": "most rates by which a sweep grows beyond its grid"})
    seeds: int = field(default=3, metadata={"help": "runs at the best learning rate, the sweep's among them"})
    steps: int = field(default=200, metadata={"help": "updates of a run"})
    batch_size: int = field(default=8, metadata={"help": "rows a step"})
    block_size: int = field(default=128, metadata={"help": "tokens of a row"})
    hidden_size: int = field(default=64, metadata={"help": "width of the model, a multiple of 32"})
    num_hidden_layers: int = field(default=4, metadata={"help": "layers of the model, an even number"})
    vocab_size: int = field(default=1024, metadata={"help": "tokens of the vocabulary"})
    json: str | None = field(default=None, metadata={"help": "where finished runs are kept"})
    markdown: str | None = field(default=None, metadata={"help": "where to write the page"})
    plot: str | None = field(default=None, metadata={"help": "where to draw the curves (needs 'plots')"})

    def __post_init__(self) -> None:
        for name in self.optimizers:
            OPTIMIZERS.get(name)
        for name in ("seeds", "steps", "batch_size", "block_size", "hidden_size", "num_hidden_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}.")
        if self.extensions < 0:
            raise ValueError(f"--extensions must be at least 0, got {self.extensions}.")
        if self.hidden_size % 32:
            raise ValueError(f"--hidden_size must be a multiple of 32, got {self.hidden_size}.")
        if self.num_hidden_layers % 2:
            raise ValueError(f"--num_hidden_layers must be even, got {self.num_hidden_layers}.")
        for name in ("factors", "learning_rates"):
            rates = getattr(self, name)
            if rates is not None and not (rates and all(0 < rate < math.inf for rate in rates)):
                raise ValueError(f"--{name} must be positive numbers, got {rates}.")
        if self.plot and find_spec("matplotlib") is None:
            raise ImportError("--plot needs matplotlib: pip install 'frankenstein_hf[plots]'")

    def rates(self, name: str) -> list[float]:
        """The learning rates to sweep for an optimizer, ascending."""
        default = OPTIMIZERS.get(name).params().lr
        return sorted(self.learning_rates or (float(f"{factor * default:.3g}") for factor in self.factors))

    def setting(self) -> dict[str, int]:
        """What all runs of a file must have in common."""
        names = ("steps", "batch_size", "block_size", "hidden_size", "num_hidden_layers", "vocab_size")
        return {name: getattr(self, name) for name in names}


# ---------------------------------------------------------------------- one run


def make_model(arguments: Arguments, seed: int) -> Any:
    """A causal hybrid of gated_deltanet and swa with tied embeddings."""
    torch.manual_seed(seed)
    config = fhf.FrankensteinConfig(
        vocab_size=arguments.vocab_size,
        hidden_size=arguments.hidden_size,
        intermediate_size=8 * arguments.hidden_size // 3,
        num_hidden_layers=arguments.num_hidden_layers,
        num_attention_heads=4,
        layer_pattern=["gated_deltanet", "swa"],
        mixer_params={"swa": {"window_size": 64}},
        max_position_embeddings=arguments.block_size,
    )
    return fhf.FrankensteinForCausalLM(config)


def make_data(arguments: Arguments) -> tuple[Tensor, Tensor]:
    """Rows of token ids to train on and to hold out, [N, block_size] each."""
    return corpus_rows(arguments.vocab_size, arguments.block_size, HELD_OUT)


def hyperparameters(name: str, arguments: Arguments) -> dict[str, Any]:
    """What differs from the defaults: ranks, gaps and populations for a small model and a short run, and a warm-up."""
    spec = OPTIMIZERS.get(name)
    most = {
        "rank": max(1, arguments.hidden_size // 4),
        "update_proj_gap": max(1, arguments.steps // 4),
        "population": POPULATION,
    }
    default = spec.params().as_dict()
    values = {key: limit for key, limit in most.items() if key in default and default[key] > limit}
    if spec.family == "schedule-free":
        values["warmup_steps"] = warm_up(arguments.steps)
    return values | ({"safeguard_warmup": True} if "safeguard_warmup" in default else {})


def schedule(step: int, name: str, arguments: Arguments) -> float:
    """Factor of the learning rate in update number `step`, from 0."""
    if OPTIMIZERS.get(name).family == "schedule-free":
        return 1.0
    return warm_up_then_cosine(step, arguments.steps)


@torch.no_grad()
def evaluate(model: nn.Module, optimizer: Any, rows: Tensor, batch_size: int) -> float:
    """Mean loss of `rows`, with the weights the optimizer evaluates with."""
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    model.eval()
    total = sum(float(model(input_ids=part, labels=part).loss) * len(part) for part in rows.split(batch_size))
    model.train()
    if hasattr(optimizer, "train"):
        optimizer.train()
    return total / len(rows)


def run(name: str, learning_rate: float, seed: int, arguments: Arguments, data: tuple[Tensor, Tensor]) -> Run:
    """Train once.

    Returns:
        What was run; "curve", lists of [step, CPU seconds, held-out loss]; "loss", its last, None where training
        diverged; mean CPU seconds of a whole step and of the optimizer's part; bytes of its state.
    """
    spec = OPTIMIZERS.get(name)
    train, held_out = data
    model = make_model(arguments, seed)
    optimizer = fhf.create_optimizer(model, name, **hyperparameters(name, arguments))
    scale = learning_rate / spec.params().lr
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: scale * schedule(step, name, arguments))
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    whole = inside = 0.0
    due = {round(arguments.steps * i / EVALUATIONS) for i in range(1, EVALUATIONS + 1)}
    curve = [[0, 0.0, evaluate(model, optimizer, held_out, arguments.batch_size)]]
    for step in range(arguments.steps):
        rows = train[order[torch.arange(step * arguments.batch_size, (step + 1) * arguments.batch_size) % len(order)]]
        inputs = {"input_ids": rows, "labels": rows}

        def closure(inputs: dict[str, Tensor] = inputs) -> Tensor:
            optimizer.zero_grad()
            loss = model(**inputs).loss
            if torch.is_grad_enabled():
                loss.backward()
            return loss.detach()

        start = time.process_time()
        try:
            if spec.closure:
                own = time.process_time()
                loss = optimizer.step(closure)
            else:
                loss = closure()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                own = time.process_time()
                if hasattr(optimizer, "estimate") and optimizer.due(step):
                    optimizer.estimate(model, inputs, step)
                optimizer.step()
        except torch.linalg.LinAlgError:  # decompositions of what is no longer finite
            loss = math.nan
        end = time.process_time()
        scheduler.step()
        whole, inside = whole + end - start, inside + end - own
        if not math.isfinite(float(loss)) or optimizer.skipped_updates():
            loss = math.nan  # gradients were left out because they were not finite: it has diverged
            break
        if step + 1 in due:
            curve.append([step + 1, whole, evaluate(model, optimizer, held_out, arguments.batch_size)])
    last_step, _, last = curve[-1]
    return {
        "optimizer": name,
        "learning_rate": learning_rate,
        "seed": seed,
        "loss": last if last_step == arguments.steps and math.isfinite(last) else None,
        "curve": [point for point in curve if math.isfinite(point[2])],
        "step_seconds": whole / (step + 1),
        "optimizer_seconds": inside / (step + 1),
        "state_bytes": optimizer.state_bytes(),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


# ---------------------------------------------------------------------- all runs


def loss_of(result: Run) -> float:
    """Its last loss, infinite where training diverged."""
    return math.inf if result["loss"] is None else result["loss"]


def compare(arguments: Arguments, results: Results) -> None:
    """Finish what is missing: the sweep on the first seed, then its best rate on the others."""
    data: list[tuple[Tensor, Tensor]] = []

    def finished(name: str, rate: float, seed: int) -> Run:
        if (result := results.find(name, rate, seed)) is None:
            if not data:
                data.append(make_data(arguments))
            result = run(name, rate, seed, arguments, data[0])
            results.add(result)
            seconds = result["step_seconds"] * arguments.steps
            print(f"{name} lr={rate:g} seed={seed}: {loss_of(result):.4f} ({seconds:.0f} s)", flush=True)
        return result

    for name in arguments.optimizers:
        sweep = {rate: loss_of(finished(name, rate, 0)) for rate in arguments.rates(name)}
        for _ in range(arguments.extensions):
            beyond = extension(sweep)
            if beyond is None:
                break
            sweep[beyond] = loss_of(finished(name, beyond, 0))
        for seed in range(1, arguments.seeds):
            finished(name, min(sweep, key=lambda rate: sweep[rate]), seed)


def extension(sweep: dict[float, float]) -> float | None:
    """The next learning rate beyond the best one, if that is at an edge of a grid of several."""
    rates, best = sorted(sweep), min(sweep, key=lambda rate: sweep[rate])
    if len(rates) < 2 or best not in (rates[0], rates[-1]):
        return None
    inward = rates[1] if best == rates[0] else rates[-2]
    return float(f"{best * best / inward:.3g}")


# ---------------------------------------------------------------------- what is reported


def summarise(runs: list[Run]) -> list[dict[str, Any]]:
    """One row an optimizer, best first: the learning rate that won on seed 0, and all its runs."""
    rows = []
    for name in dict.fromkeys(r["optimizer"] for r in runs):
        own = [r for r in runs if r["optimizer"] == name]
        sweep = [r for r in own if r["seed"] == 0]
        best = min(sweep, key=loss_of)["learning_rate"]
        chosen = sorted((r for r in own if r["learning_rate"] == best), key=lambda r: r["seed"])
        losses = [loss_of(r) for r in chosen]
        rates = [r["learning_rate"] for r in sweep]
        rows.append(
            {
                "optimizer": name,
                "learning_rate": best,
                "at_edge": len(rates) > 1 and best in (min(rates), max(rates)),
                "loss": statistics.mean(losses),
                "spread": statistics.stdev(losses) if len(losses) > 1 and math.inf not in losses else 0.0,
                "runs": chosen,
                "state_bytes": chosen[0]["state_bytes"],
                "parameters": chosen[0]["parameters"],
                "step_seconds": statistics.median(r["step_seconds"] for r in own),
                "optimizer_seconds": statistics.median(r["optimizer_seconds"] for r in own),
            }
        )
    return sorted(rows, key=lambda row: row["loss"])


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    base = next((row for row in rows if row["optimizer"] == "adamw"), None)

    def relative(row: dict[str, Any], key: str) -> str:
        return "–" if base is None else f"{row[key] / base[key]:.2f}"

    lines = [
        "| optimizer | family | learning rate | held-out loss | ± | runs | state bytes / parameter "
        "| `step()` / adamw | whole step / adamw |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        spec = OPTIMIZERS.get(row["optimizer"])
        rate = f"{row['learning_rate']:g} (default × {row['learning_rate'] / spec.params().lr:.2g}" + (
            ", the grid's edge)" if row["at_edge"] else ")"
        )
        cells = [
            f"`{spec.name}`", spec.family, rate, f"{row['loss']:.3f}", f"{row['spread']:.3f}", str(len(row["runs"])),
            f"{row['state_bytes'] / row['parameters']:.2f}", relative(row, "optimizer_seconds"),
            relative(row, "step_seconds"),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page(rows: list[dict[str, Any]], arguments: Arguments, flags: str) -> str:
    """The results page."""
    setting = arguments.setting()
    tokens = setting["steps"] * setting["batch_size"] * setting["block_size"]
    runs = [r for row in rows for r in row["runs"]]
    rest = [name for name in fhf.list_optimizers() if name not in {row["optimizer"] for row in rows}]
    seeds = max(len(row["runs"]) for row in rows)
    image = Path(arguments.plot).name if arguments.plot else None
    changed = ", ".join(
        f"{row['optimizer']} {key} {value}"
        for row in rows
        for key, value in hyperparameters(row["optimizer"], arguments).items()
    )
    parts = [
        "# Optimizers compared",
        written_by("compare_optimizers.py", flags),
        "**A small experiment, not a ranking.** "
        f"One causal model of {rows[0]['parameters']:,} parameters ({setting['num_hidden_layers']} layers of "
        f"gated_deltanet and swa in turn, width {setting['hidden_size']}, {setting['vocab_size']} tokens of byte-level "
        f"BPE) learns the docstrings of Python's standard library for {setting['steps']} steps of "
        f"{setting['batch_size']} × {setting['block_size']} tokens: {tokens:,} tokens in all, in fp32 on one thread of "
        f"a CPU ({platform.machine()}) with torch {torch.__version__}. The loss (nats a token) is that of {HELD_OUT} "
        f"held-out rows after the last step; ± is the standard deviation over {seeds} seeds, which decide the initial "
        f"weights and the order of the rows. Before training it was {runs[0]['curve'][0][2]:.3f}. Differences of a few "
        "hundredths mean nothing, and the table says little about large models or long runs.",
        "The learning rate is the best of a sweep on the first seed: ⅓, 1 and 3 times the documented default unless "
        "the command says otherwise (the rate of an inner AdamW moves along), continued in the same ratio up to "
        f"{arguments.extensions} times while the best is at the edge. Warm-up over {warm_up(arguments.steps)} steps, "
        "then cosine to zero; schedule-free methods have the warm-up only. Gradients clipped to norm 1. "
        "Otherwise the defaults (also of weight decay), except where they are made for larger models, longer runs or "
        "no warm-up: " + (changed or "none") + ".",
        table(rows).rstrip(),
        "Times are process CPU seconds, means over all steps (refreshed projections and preconditioners included), in "
        "units of adamw's. `step()` is the optimizer alone; for methods that evaluate the loss themselves it is the "
        "whole step. Beside so small a model an update weighs more than it would beside a real one; "
        "[optimizers.md](optimizers.md) has the cost of `step()` for a model of 10 M parameters.",
    ]
    if setting == Arguments().setting() and any(row["optimizer"] == "adafactor" for row in rows):
        parts.append(ASIDE)
    if image:
        parts.append(f"![Held-out loss against steps; last loss, time and state]({image})")
    if rest:
        parts.append(
            "The rest, into the same files (finished runs are not repeated):\n\n```sh\npython "
            f"scripts/compare_optimizers.py {flags} --optimizers {' '.join(rest)}\n```"
        )
    return "\n\n".join(parts) + "\n"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Held-out loss against steps, a panel a family; then the last loss, time and state of each."""
    families: dict[str, dict[str, list[list[float]]]] = {}
    for row in rows:
        curves = [r["curve"] for r in row["runs"]]
        points = [[statistics.mean(column) for column in zip(*at)] for at in zip(*curves)]
        family = OPTIMIZERS.get(row["optimizer"]).family
        families.setdefault(family, {})[row["optimizer"]] = [[step, loss] for step, _, loss in points]
    size = 3.3, max(2.7, 0.9 + 0.13 * len(rows))
    picture = Picture("Optimizers compared", len(families) + 3, 5, size=size)
    picture.multiples(families, style="-")
    for axes in picture.panels[:-3]:
        axes.set(xlabel="steps", ylabel="held-out loss (nats a token)")
    measures = {
        "last held-out loss (nats a token)": [row["loss"] if math.isfinite(row["loss"]) else math.nan for row in rows],
        "CPU seconds of a step": [row["step_seconds"] for row in rows],
        "state bytes a parameter": [row["state_bytes"] / row["parameters"] for row in rows],
    }
    names = [row["optimizer"] for row in rows]
    for axes, (label, values) in zip(picture.panels[-3:], measures.items()):
        picture.dots(axes, dict(zip(names, values)), label)
    picture.save(path)


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run what is missing, print the table and write what was asked for; returns the table's rows, best first."""
    (arguments,) = HfArgumentParser(Arguments).parse_args_into_dataclasses(argv)  # type: ignore[arg-type]
    results = Results(arguments.json, arguments.setting(), ("optimizer", "learning_rate", "seed"))
    compare(arguments, results)
    rows = summarise(results.runs)
    print("\n" + table(rows))
    if arguments.plot:
        draw(rows, Path(arguments.plot))
    if arguments.markdown:
        flags = " ".join(sys.argv[1:] if argv is None else argv)
        write_text(arguments.markdown, page(rows, arguments, flags))
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
