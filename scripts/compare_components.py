"""One small hybrid model, one option changed at a time: held-out loss, step time, parameters and memory of each.

    python scripts/compare_components.py --json docs/component_results.json --markdown docs/component_results.md
    python scripts/compare_components.py --options norm=layer_norm residual=mhc --seeds 1 --steps 20

The model alternates gated_deltanet and standard and learns the embedded corpus with AdamW, at one rate and for the same
number of steps whatever the option. By default every component of every registry takes its turn, of the activations
one of each sort; `--options` takes any `field=value` of a configuration, several joined by `+`. A seed decides the
initial weights and the order of the rows, and is the same for all options, so that differences are taken pair by pair.

Every run is written to --json as soon as it is finished, and the same command again goes on where it was interrupted.
An option that this model cannot have is a row with the reason.
"""

import json
import math
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmark_mixers import interleaved, peak_bytes
from comparing import Results, Run, corpus_rows, warm_up_then_cosine, written_by
from torch import Tensor
from torch.nn import functional as F
from transformers import HfArgumentParser

import frankenstein_hf as fhf
from frankenstein_hf.arena.statistics import difference, perhaps_best, pooled_seed_deviation
from frankenstein_hf.configuration.registries import KINDS
from frankenstein_hf.data.atomic import write_text
from frankenstein_hf.hub.foreign import code, markdown
from frankenstein_hf.training.pictures import Picture

BASE = "as it is"
HELD_OUT = 48  # rows the loss is reported on
ROUNDS = 5  # interleaved steps that time an option beside the model as it is
# one of each sort: bounded, piecewise, smooth, the identity, learned slopes and shapes, rational
ACTIVATIONS = ["relu", "gelu", "tanh", "mish", "identity", "selu", "prelu", "swish_trainable", "softexp", "raf"]
# what is no component of a registry
OTHERS = [
    "norm_placement=post",
    "norm_placement=sandwich",
    "num_loops=2+loop_begin_layers=1+loop_end_layers=1",
    "fixed_cross_entropy=true",
    "attention_bias=true",
]
NEEDS = {"residual=hyperloop": "num_loops=2+loop_begin_layers=1+loop_end_layers=1"}  # and what makes it possible
# Final losses of the campaign of the paper this library began with, less that of its own baseline (10.401).
CLAIMED = {
    "norm=flash_norm": -0.652,
    "norm=dynamic_tanh": -0.155,
    "norm=derf": -0.106,
    "norm=layer_norm": 0.0,
    "norm=prms_norm": 0.172,
    "residual=mhc": -0.215,
    "residual=full_attn": 0.032,
    "residual=hyperloop": -0.493,
    "hidden_act=relu": -0.008,
    "fixed_cross_entropy=true": 0.0,
    "positions=pape": -0.946,
    "positions=pape_ri": -1.166,
    "positions=pape_efficient": -0.946,
    "positions=learned_absolute": -0.876,
    "positions=hope": -0.053,
    "positions=sinusoidal_absolute": -0.037,
    "positions=bam": -0.004,
    "positions=nope": -0.004,
    "positions=alibi": 0.016,
    "embedding=factorized": -0.778,
    "feed_forward=gated": -0.5,
}


def default_options() -> list[str]:
    """Every component of every registry that is not the default, and the other options."""
    config = fhf.FrankensteinConfig()
    found = []
    for kind, how in KINDS.items():
        names = ACTIVATIONS if kind == "activation" else how.registry.names()
        found += [f"{how.field}={name}" for name in names if name != getattr(config, how.field)]
    return found + OTHERS


def overrides(option: str) -> dict[str, Any]:
    """What an option changes in the configuration.

    Raises:
        ValueError: It is not `field=value`, several joined by `+`.
    """
    if option == BASE:
        return {}
    changed: dict[str, Any] = {}
    for part in f"{option}+{NEEDS[option]}".split("+") if option in NEEDS else option.split("+"):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"--options {option!r}: {part!r} is not field=value, for example norm=layer_norm.")
        try:
            changed[key] = json.loads(value)
        except ValueError:
            changed[key] = value
    return changed


@dataclass
class Arguments:
    """What to compare."""

    options: list[str] = field(default_factory=default_options, metadata={"help": "field=value, joined by +"})
    seeds: int = field(default=3, metadata={"help": "runs of every option"})
    steps: int = field(default=200, metadata={"help": "updates of a run"})
    batch_size: int = field(default=8, metadata={"help": "rows a step"})
    block_size: int = field(default=128, metadata={"help": "tokens of a row"})
    hidden_size: int = field(default=64, metadata={"help": "width of the model"})
    num_hidden_layers: int = field(default=4, metadata={"help": "layers of the model, an even number"})
    vocab_size: int = field(default=1024, metadata={"help": "tokens of the vocabulary"})
    learning_rate: float = field(default=3e-3, metadata={"help": "of AdamW, the largest of a warm-up and a cosine"})
    json: str | None = field(default=None, metadata={"help": "where finished runs are kept"})
    markdown: str | None = field(default=None, metadata={"help": "where to write the page"})
    plot: str | None = field(default=None, metadata={"help": "where to draw the differences (needs 'plots')"})

    def __post_init__(self) -> None:
        for name in ("seeds", "steps", "batch_size", "block_size", "hidden_size", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}.")
        if self.num_hidden_layers < 2 or self.num_hidden_layers % 2:
            raise ValueError(f"--num_hidden_layers must be even, got {self.num_hidden_layers}.")
        for option in self.options:
            unknown = set(overrides(option)) - set(vars(fhf.FrankensteinConfig()))
            if unknown:
                raise ValueError(f"--options {option!r}: there is no field {', '.join(sorted(unknown))}.")

    def setting(self) -> dict[str, Any]:
        """What all runs of a file must have in common."""
        names = "steps batch_size block_size hidden_size num_hidden_layers vocab_size learning_rate"
        return {name: getattr(self, name) for name in names.split()}


# ---------------------------------------------------------------------- one run


def make_data(arguments: Arguments) -> tuple[Tensor, Tensor]:
    """Rows of token ids to train on and to hold out, [N, block_size] each."""
    return corpus_rows(arguments.vocab_size, arguments.block_size, HELD_OUT)


def make_model(option: str, arguments: Arguments, seed: int) -> Any:
    """The model with one option changed.

    Raises:
        ValueError: It cannot have that option.
    """
    torch.manual_seed(seed)
    config = {
        "vocab_size": arguments.vocab_size,
        "hidden_size": arguments.hidden_size,
        "num_hidden_layers": arguments.num_hidden_layers,
        "num_attention_heads": 4,
        "layer_pattern": ["gated_deltanet", "standard"],
        "max_position_embeddings": arguments.block_size,
    }
    return fhf.FrankensteinForCausalLM(fhf.FrankensteinConfig(**config | overrides(option)))


@torch.no_grad()
def row_losses(model: Any, rows: Tensor, batch_size: int) -> list[float]:
    """Summed −log p of the predicted tokens of every row."""
    model.eval()
    sums = []
    for part in rows.split(batch_size):
        logits = model(input_ids=part).logits[:, :-1]
        sums += F.cross_entropy(logits.mT, part[:, 1:], reduction="none").sum(1).tolist()
    return sums


def train_step(model: Any, rows: Tensor) -> None:
    """Forward and backward."""
    model.zero_grad()
    model(input_ids=rows, labels=rows).loss.backward()


def cost(option: str, arguments: Arguments, train: Tensor) -> dict[str, float]:
    """Time and peak memory of a training step, in units of the model as it is."""
    rows = train[: arguments.batch_size]
    steps = {name: partial(train_step, make_model(name, arguments, 0).train(), rows) for name in (BASE, option)}
    seconds = interleaved(steps, ROUNDS)
    peaks = {name: peak_bytes(step) for name, step in steps.items()}
    return {"time": seconds[option] / seconds[BASE], "memory": peaks[option] / max(1, peaks[BASE])}


def run(option: str, seed: int, arguments: Arguments, data: tuple[Tensor, Tensor]) -> Run:
    """Train once: summed loss of every held-out row, parameters, and on the first seed what a step costs."""
    train, held_out = data
    try:
        model = make_model(option, arguments, seed).train()
    except ValueError as error:
        return {"option": option, "seed": seed, "refused": str(error)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(warm_up_then_cosine, steps=arguments.steps))
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    for step in range(arguments.steps):
        places = torch.arange(step * arguments.batch_size, (step + 1) * arguments.batch_size) % len(order)
        train_step(model, train[order[places]])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    losses = row_losses(model, held_out, arguments.batch_size)
    result = {
        "option": option,
        "seed": seed,
        "losses": losses if all(map(math.isfinite, losses)) else None,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    if seed == 0 and option != BASE:
        result |= cost(option, arguments, train)
    return result


# ---------------------------------------------------------------------- all runs


def compare(arguments: Arguments) -> list[Run]:
    """Finish what is missing, seed by seed, so that an interrupted comparison has all options of the first seeds."""
    results = Results(arguments.json, arguments.setting(), ("option", "seed"))
    refused = {r["option"] for r in results.runs if "refused" in r}
    data: tuple[Tensor, Tensor] | None = None
    for seed in range(arguments.seeds):
        for option in [BASE, *arguments.options]:
            if option in refused or results.find(option, seed):
                continue
            data = data or make_data(arguments)
            result = run(option, seed, arguments, data)
            results.add(result)
            if "refused" in result:
                refused.add(option)
            shown = result.get("refused") or f"{mean_loss(result, arguments.block_size):.4f}"
            print(f"{option}, seed {seed}: {shown}", flush=True)
    return results.runs


def mean_loss(result: Run, block_size: int) -> float:
    """Nats a token; infinite where the training diverged."""
    losses = result["losses"]
    return math.inf if losses is None else sum(losses) / (len(losses) * (block_size - 1))


# ---------------------------------------------------------------------- what is reported


def summarise(runs: list[Run], block_size: int) -> dict[str, dict[str, Any]]:
    """A row an option that was run with every seed, the lowest loss first; then those that were refused."""
    seeds = {r["seed"] for r in runs if r["option"] == BASE}
    sums: dict[str, np.ndarray] = {}
    rows: dict[str, dict[str, Any]] = {}
    for option in dict.fromkeys(r["option"] for r in runs):
        own = sorted((r for r in runs if r["option"] == option), key=lambda r: r["seed"])
        if "refused" in own[0]:
            rows[option] = {"refused": own[0]["refused"], "loss": math.inf}
        elif {r["seed"] for r in own} >= seeds:
            rows[option] = {"loss": float(np.mean([mean_loss(r, block_size) for r in own])), **own[0]}
            if all(r["losses"] for r in own):
                sums[option] = np.array([r["losses"] for r in own])
    items = len(next(iter(sums.values()))[0])
    counts, documents = np.full(items, block_size - 1), np.arange(items)
    if len(sums) > 1 and len(seeds) > 1:
        deviation = pooled_seed_deviation(list(sums.values()), counts)
        best = perhaps_best(sums, counts, documents)
        for option, own_sums in sums.items():
            rows[option] |= {
                "difference": difference(own_sums, sums[BASE], counts, documents, deviation),
                "perhaps_best": option in best,
            }
    return dict(sorted(rows.items(), key=lambda row: row[1]["loss"]))


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The rows as Markdown."""
    base = rows[BASE]["parameters"]
    lines = [
        "| option | held-out loss | difference from `as it is`, 95 % interval | time of a step | peak memory "
        "| parameters | claimed |",
        "|---|---|---|---|---|---|---|",
    ]
    for option, row in rows.items():
        claim = f"{CLAIMED[option]:+.2f}" if option in CLAIMED else "–"
        if "refused" in row:
            cells = ["refused", markdown(row["refused"]), "–", "–", "–", claim]
        else:
            gap = row.get("difference")
            shown = "–" if gap is None or option == BASE else f"{gap.value:+.3f} ({gap.low:+.3f} … {gap.high:+.3f})"
            loss = f"{row['loss']:.3f}" if math.isfinite(row["loss"]) else "diverged"
            cells = [
                f"**{loss}**" if row.get("perhaps_best") else loss,
                shown,
                *(f"{row[key]:.2f}" if key in row else "1" for key in ("time", "memory")),
                f"{row['parameters'] / base:.2f}",
                claim,
            ]
        lines.append(f"| {code(option)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page(rows: dict[str, dict[str, Any]], arguments: Arguments, flags: str) -> str:
    """The results page."""
    setting = arguments.setting()
    tokens = setting["steps"] * setting["batch_size"] * setting["block_size"]
    flash = rows.get("norm=flash_norm", {}).get("difference")
    parts = [
        "# Components compared",
        written_by("compare_components.py", flags),
        "**A small experiment.** "
        f"One causal model of {rows[BASE]['parameters']:,} parameters ({setting['num_hidden_layers']} layers of "
        f"gated_deltanet and standard in turn, width {setting['hidden_size']}, {setting['vocab_size']} tokens of "
        "byte-level BPE) learns the docstrings of Python's standard library for "
        f"{setting['steps']} steps of {setting['batch_size']} × {setting['block_size']} tokens, {tokens:,} in all, "
        f"with AdamW at {setting['learning_rate']:g} for every option, in fp32 on one thread with torch "
        f"{torch.__version__}. A uniform guess would cost {math.log(setting['vocab_size']):.2f} nats a token.",
        f"The loss (nats a token) is that of {HELD_OUT} held-out rows, mean of {arguments.seeds} seeds. The second "
        "column is the difference from the model as it is, taken seed by seed and row by row, with its interval; an "
        "interval that holds 0 says that no difference was seen. Options that cannot be told from the best one are "
        "bold. Time and memory are those of a training step in units of the model as it is, measured in turn. "
        "No rate was tuned: an option that needs another one looks worse here than it is.",
        table(rows).rstrip(),
        "*Claimed* is what the campaign of the paper this library began with reported, as a difference from its own "
        "baseline of 10.401 nats; all of its losses are above those of a uniform guess over its vocabulary, so that "
        "they say how fast a loss falls from its start and little about models.",
    ]
    if flash is not None:
        parts.append(
            "`flash_norm` led that campaign by 0.65 nats. It is `rms_norm` without its gain, and no norm can be worth "
            f"that: here the difference is {flash.value:+.3f} ({flash.low:+.3f} … {flash.high:+.3f})."
        )
    if arguments.plot:
        parts.append(f"![Differences from the model as it is]({Path(arguments.plot).name})")
    return "\n\n".join(parts) + "\n"


def draw(rows: dict[str, dict[str, Any]], path: Path) -> None:
    """Differences and costs, a row an option."""
    shown = {option: row for option, row in rows.items() if math.isfinite(row["loss"])}
    picture = Picture("One option changed at a time", 3, size=(4.6, 1 + 0.16 * len(shown)))
    measures = {"held-out loss (nats a token)": "loss", "time of a step": "time", "peak memory": "memory"}
    for axes, (label, key) in zip(picture.panels, measures.items()):
        picture.dots(axes, {option: row.get(key, 1.0) for option, row in shown.items()}, label)
    picture.save(path)


def main(argv: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """Run what is missing, print the table and write what was asked for."""
    (arguments,) = HfArgumentParser(Arguments).parse_args_into_dataclasses(argv)  # type: ignore[arg-type]
    rows = summarise(compare(arguments), arguments.block_size)
    print("\n" + table(rows))
    if arguments.plot:
        draw(rows, Path(arguments.plot))
    if arguments.markdown:
        write_text(arguments.markdown, page(rows, arguments, " ".join(sys.argv[1:] if argv is None else argv)))
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
