"""How well models of several mechanisms bear learning rates that are too high.

    python scripts/lr_robustness.py --json docs/lr_robustness.json --markdown docs/lr_robustness.md
    python scripts/lr_robustness.py --data dna --mechanisms SA SC gla --rates 0.001 0.01 --seeds 1

Trains a small masked model for every mechanism, learning rate and seed: SA, SW, SC and MIX as `fhf.mechanism_config`
has them, or any mixers by name, joined by commas. Tokens are hidden by `betalinear30`. AdamW with weight decay 0.01 and
gradients clipped to norm 1 runs at a rate that rises over a tenth of the steps and then stays. The data is the embedded
corpus ("text"), sequences of a small grammar of motifs ("dna"), or a FASTA file by its path.

Every run is written to --json as soon as it is finished, and the same command again goes on where it was interrupted.
"""

import csv
import io
import math
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from comparing import Results, Run, warm_up, written_by
from datasets import Dataset
from torch import Tensor
from transformers import HfArgumentParser, PreTrainedTokenizerBase

import frankenstein_hf as fhf
from frankenstein_hf.data import DiffusionCollator, dna_tokenizer, embedded_corpus, pack, read_fasta, train_tokenizer
from frankenstein_hf.data.atomic import write_text
from frankenstein_hf.data.baseline import unigram_loss
from frankenstein_hf.hub.foreign import code
from frankenstein_hf.training.pictures import COLOURS, Picture

HELD_OUT = 64  # rows the loss is reported on
NEAR = 0.1  # nats a token within which a rate counts as one that works
MOTIFS = ("TTGACA", "TATAAT", "AGGAGG", "GGATCC", "GAATTC")


@dataclass
class Arguments:
    """What to compare."""

    mechanisms: list[str] = field(
        default_factory=lambda: ["SA", "SW", "SC", "MIX"], metadata={"help": "SA, SW, SC, MIX, or mixers, by commas"}
    )
    rates: list[float] = field(
        default_factory=lambda: [3e-4, 1e-3, 3e-3, 1e-2, 3e-2], metadata={"help": "learning rates of AdamW"}
    )
    seeds: int = field(default=3, metadata={"help": "runs at every rate"})
    data: str = field(default="text", metadata={"help": "text, dna, or the path of a FASTA file"})
    steps: int = field(default=300, metadata={"help": "updates of a run"})
    probe_every: int = field(default=20, metadata={"help": "updates between looks at the largest stable rate"})
    batch_size: int = field(default=8, metadata={"help": "rows a step"})
    block_size: int = field(default=64, metadata={"help": "tokens of a row"})
    hidden_size: int = field(default=64, metadata={"help": "width of the model"})
    num_hidden_layers: int = field(default=4, metadata={"help": "layers of the model"})
    vocab_size: int = field(default=1024, metadata={"help": "tokens of the vocabulary, for text"})
    json: str | None = field(default=None, metadata={"help": "where finished runs are kept"})
    csv: str | None = field(default=None, metadata={"help": "where to write a row a run"})
    markdown: str | None = field(default=None, metadata={"help": "where to write the page"})
    plot: str | None = field(default=None, metadata={"help": "where to draw loss against rate (needs 'plots')"})

    def __post_init__(self) -> None:
        for name in ("seeds", "steps", "probe_every", "batch_size", "block_size", "hidden_size", "num_hidden_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}.")
        if not self.rates or not all(0 < rate < math.inf for rate in self.rates):
            raise ValueError(f"--rates must be positive numbers, got {self.rates}.")
        if self.data not in ("text", "dna") and not Path(self.data).exists():
            raise ValueError(
                f"--data {self.data!r} must be text, dna, or the path of a FASTA file; there is no such file."
            )
        for mechanism in self.mechanisms:
            model_config(mechanism, self, 64)

    def setting(self) -> dict[str, Any]:
        """What all runs of a file must have in common."""
        names = "data steps probe_every batch_size block_size hidden_size num_hidden_layers vocab_size"
        return {name: getattr(self, name) for name in names.split()}


# ---------------------------------------------------------------------- data and model


def grammar(count: int, length: int, seed: int = 0) -> list[str]:
    """Sequences of random bases in which motifs stand, each followed by its reverse complement some bases later."""
    generator = torch.Generator().manual_seed(seed)
    complement = str.maketrans("ACGT", "TGCA")

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    def bases(n: int) -> str:
        return "".join("ACGT"[i] for i in torch.randint(4, (n,), generator=generator).tolist())

    sequences = []
    for _ in range(count):
        text = ""
        while len(text) < length:
            motif = MOTIFS[number(0, len(MOTIFS))]
            text += bases(number(2, 12)) + motif + bases(number(3, 7)) + motif.translate(complement)[::-1]
        sequences.append(text[:length])
    return sequences


def make_data(arguments: Arguments) -> tuple[PreTrainedTokenizerBase, list[Any], list[Any]]:
    """The tokenizer, and packed rows to train on and to hold out.

    Raises:
        ValueError: Less data than it takes.
    """
    if arguments.data == "text":
        corpus = embedded_corpus()
        tokenizer = train_tokenizer(corpus["train"]["text"], arguments.vocab_size)
        splits = [corpus["train"], corpus["validation"]]
    else:
        tokenizer = dna_tokenizer()
        if arguments.data == "dna":
            rows = arguments.batch_size * min(arguments.steps, 500) + HELD_OUT
            sequences = grammar(rows, arguments.block_size - 2)
        else:
            inside = arguments.block_size - 2
            whole = [record.sequence for record in read_fasta(arguments.data)]
            sequences = [text[i : i + inside] for text in whole for i in range(0, len(text), inside)]
        held = max(1, min(HELD_OUT, len(sequences) // 10))
        splits = [Dataset.from_dict({"text": part}) for part in (sequences[:-held], sequences[-held:])]
    packing = "blocks" if arguments.data == "text" else "none"
    train, held_out = (list(pack(split, tokenizer, arguments.block_size, packing)) for split in splits)
    if not train or not held_out:
        raise ValueError(f"--data {arguments.data} is too short for rows of {arguments.block_size} tokens.")
    return tokenizer, train, held_out[:HELD_OUT]


def frequency_loss(data: tuple[PreTrainedTokenizerBase, list[Any], list[Any]], size: int) -> float:
    """The held-out loss of knowing only how often each token occurs."""
    tokenizer, train, _ = data
    labels = [row for batch in held_out_batches(data, size) for row in batch["labels"].tolist()]
    rows = Dataset.from_dict({"input_ids": [row["input_ids"] for row in train]})
    return unigram_loss(rows, Dataset.from_dict({"labels": labels}), len(tokenizer), tokenizer.all_special_ids)


def held_out_batches(data: tuple[Any, list[Any], list[Any]], size: int) -> list[dict[str, Tensor]]:
    """The rows held out, with hidden tokens that are the same in every run."""
    tokenizer, _, held_out = data
    fixed = DiffusionCollator(tokenizer, seed=-1)
    return [fixed(held_out[i : i + size]) for i in range(0, len(held_out), size)]


def model_config(mechanism: str, arguments: Arguments, vocab_size: int) -> fhf.FrankensteinConfig:
    """A small encoder of the mechanism."""
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": arguments.hidden_size,
        "num_hidden_layers": arguments.num_hidden_layers,
        "num_attention_heads": 4,
        "max_position_embeddings": arguments.block_size,
    }
    if mechanism in fhf.list_mechanisms():
        return fhf.mechanism_config(mechanism, **sizes)
    return fhf.FrankensteinConfig(layer_pattern=mechanism.split(","), **sizes)


# ---------------------------------------------------------------------- one run


@torch.no_grad()
def evaluate(model: Any, batches: list[dict[str, Tensor]]) -> float:
    """Mean loss of the hidden tokens, whose places are the same in every run."""
    model.eval()
    total = sum(float(model(**batch).loss) * int((batch["labels"] != -100).sum()) for batch in batches)
    model.train()
    return total / sum(int((batch["labels"] != -100).sum()) for batch in batches)


def run(mechanism: str, rate: float, seed: int, arguments: Arguments, data: tuple[Any, list[Any], list[Any]]) -> Run:
    """Train once.

    Returns:
        "loss", the last held-out loss, None where it is not finite; "first", that before training; "median", the median
        largest stable rate; "stable" and "ascent", shares of the probes at which the rate was below it, and at which
        the update did not descend.
    """
    tokenizer, train, _ = data
    size = arguments.batch_size
    evaluation = held_out_batches(data, size)
    torch.manual_seed(seed)
    model = fhf.FrankensteinForMaskedLM(model_config(mechanism, arguments, len(tokenizer))).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=1e-2)
    warm = warm_up(arguments.steps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm))
    collator = DiffusionCollator(tokenizer, seed=seed)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed)).tolist()
    first, probes = evaluate(model, evaluation), []
    for step in range(arguments.steps):
        rows = [train[order[place % len(order)]] for place in range(step * size, (step + 1) * size)]
        batch = collator(rows)
        if step >= warm and step % arguments.probe_every == 0:
            probes.append(fhf.diagnostics.max_stable_lr(model, optimizer, batch, max_grad_norm=1.0))
        optimizer.zero_grad()
        loss = model(**batch).loss
        if not math.isfinite(loss.item()):
            break
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    last = evaluate(model, evaluation)
    median = statistics.median(probe.max_lr for probe in probes) if probes else math.nan
    return {
        "mechanism": mechanism,
        "rate": rate,
        "seed": seed,
        "first": first,
        "loss": last if math.isfinite(last) else None,
        "median": median if math.isfinite(median) else None,
        "stable": sum(probe.is_stable for probe in probes) / max(1, len(probes)),
        "ascent": sum(not probe.descends for probe in probes) / max(1, len(probes)),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def diverged(result: Run) -> bool:
    """Whether training ended without a number, or where it began."""
    return result["loss"] is None or result["loss"] >= result["first"]


def compare(arguments: Arguments) -> list[Run]:
    """Finish what is missing, seed by seed."""
    results = Results(arguments.json, arguments.setting(), ("mechanism", "rate", "seed"))
    data = None
    for seed in range(arguments.seeds):
        for rate in arguments.rates:
            for mechanism in arguments.mechanisms:
                if results.find(mechanism, rate, seed):
                    continue
                data = data or make_data(arguments)
                result = run(mechanism, rate, seed, arguments, data)
                results.add(result)
                loss = "diverged" if diverged(result) else f"{result['loss']:.4f}"
                print(f"{mechanism}, rate {rate:g}, seed {seed}: {loss}", flush=True)
    return results.runs


# ---------------------------------------------------------------------- what is reported


@dataclass(frozen=True)
class Cell:
    """A mechanism at a rate: means over its seeds.

    Attributes:
        loss: Infinite if any run diverged.
        spread: Standard deviation over seeds.
        runs: How many.
        diverged: Those of them that did.
        median, stable, ascent: As `run` returns them; the median is infinite where most probes have no limit.
    """

    loss: float
    spread: float
    runs: int
    diverged: int
    median: float
    stable: float
    ascent: float


def summarise(runs: list[Run]) -> dict[str, dict[float, Cell]]:
    """The cells of every mechanism, by rate."""
    cells: dict[str, dict[float, Cell]] = {}
    for mechanism, rate in sorted({(r["mechanism"], r["rate"]) for r in runs}, key=lambda key: key[::-1]):
        own = [r for r in runs if (r["mechanism"], r["rate"]) == (mechanism, rate)]
        lost = sum(map(diverged, own))
        losses = [math.inf if diverged(r) else r["loss"] for r in own]
        cells.setdefault(mechanism, {})[rate] = Cell(
            statistics.mean(losses),
            statistics.stdev(losses) if len(losses) > 1 and not lost else 0.0,
            len(own),
            lost,
            statistics.median(math.inf if r["median"] is None else r["median"] for r in own),
            statistics.mean(r["stable"] for r in own),
            statistics.mean(r["ascent"] for r in own),
        )
    return cells


def shown(cell: Cell) -> str:
    """Its loss, and over how many seeds it varies by how much."""
    if math.isinf(cell.loss):
        return "diverged"
    return f"{cell.loss:.3f} ± {cell.spread:.3f}" if cell.runs > 1 else f"{cell.loss:.3f}"


def best(cells: dict[float, Cell]) -> float:
    """The rate of the lowest loss."""
    return min(cells, key=lambda rate: cells[rate].loss)


def window(cells: dict[float, Cell]) -> float:
    """Factor between the lowest and the highest rate whose loss is near the best one."""
    good = [rate for rate, cell in cells.items() if cell.loss <= cells[best(cells)].loss + NEAR]
    return max(good) / min(good) if good else 1.0


def table(cells: dict[str, dict[float, Cell]]) -> str:
    """A row a mechanism, and a row a mechanism and rate."""
    lines = [
        f"| mechanism | best rate | loss there | rates within {NEAR} nats | loss at the highest rate | excess there |",
        "|---|---|---|---|---|---|",
    ]
    for mechanism, own in cells.items():
        rate, top = best(own), own[max(own)]
        excess = "–" if math.isinf(top.loss) else f"{top.loss - own[rate].loss:+.3f}"
        edge = " (the grid's edge)" if len(own) > 1 and rate in (min(own), max(own)) else ""
        lines.append(
            f"| {mechanism} | {rate:g}{edge} | {shown(own[rate])} | factor {window(own):.3g} | {shown(top)} "
            f"| {excess} |"
        )
    lines += [
        "",
        "| mechanism | rate | held-out loss | diverged | median largest stable rate | stable steps | steps uphill |",
        "|---|---|---|---|---|---|---|",
    ]
    for mechanism, own in cells.items():
        for rate, cell in own.items():
            limit = "no limit" if math.isinf(cell.median) else f"{cell.median:.2g}"
            lines.append(
                f"| {mechanism} | {rate:g} | {shown(cell)} | {cell.diverged} | {limit} | {cell.stable:.0%} "
                f"| {cell.ascent:.0%} |"
            )
    return "\n".join(lines) + "\n"


def claims(cells: dict[str, dict[float, Cell]]) -> list[str]:
    """Which of the study's qualitative claims these runs show, in sentences."""
    if not {"SA", "SC"} <= set(cells):
        return []
    excess = {name: own[max(own)].loss - own[best(own)].loss for name, own in cells.items()}
    wider = window(cells["SC"]) > window(cells["SA"])
    found = [
        f"*SC bears a wider range of rates than SA*: {'seen' if wider else 'not seen'} (factors "
        f"{window(cells['SC']):.3g} and {window(cells['SA']):.3g} within {NEAR} nats of the own best).",
        f"*SC loses less than SA at a rate that is too high*: {'seen' if excess['SC'] < excess['SA'] else 'not seen'} "
        f"({excess['SC']:+.3f} and {excess['SA']:+.3f} nats at {max(cells['SA']):g}).",
    ]
    if "MIX" in cells:
        gap = cells["MIX"][best(cells["MIX"])].loss - cells["SA"][best(cells["SA"])].loss
        noise = max(own[best(own)].spread for own in (cells["MIX"], cells["SA"]))
        matches = gap <= max(noise, 0.02)
        gentler = excess["MIX"] < excess["SA"]
        found += [
            f"*MIX matches SA at its best rate*: {'seen' if matches else 'not seen'} ({gap:+.3f} nats).",
            f"*MIX degrades more gently than SA*: {'seen' if gentler else 'not seen'} "
            f"({excess['MIX']:+.3f} and {excess['SA']:+.3f} nats).",
        ]
    return found


def page(runs: list[Run], arguments: Arguments, flags: str, frequencies: float) -> str:
    """The results page."""
    cells, setting = summarise(runs), arguments.setting()
    parameters = ", ".join(
        f"{name} {next(r['parameters'] for r in runs if r['mechanism'] == name):,}" for name in cells
    )
    counts = sorted({cell.runs for own in cells.values() for cell in own.values()})
    seeds = f"{counts[0]} seed{'s' if counts[0] > 1 else ''}"
    if len(counts) > 1:
        seeds = f"{counts[0]} to {counts[-1]} seeds a cell"
    known = {"text": "docstrings of Python's standard library", "dna": "a grammar of motifs"}
    data = known.get(setting["data"], code(setting["data"]))
    parts = [
        "# Learning rates that are too high",
        written_by("lr_robustness.py", flags),
        '**A small experiment.** "Stabilizing Transformer Training Through Consensus" reports, for models of 30 to 390 '
        "million parameters, that self-consensus (SC) bears higher learning rates than self-attention (SA) and "
        "attention to two neighbours a side (SW), and that a model whose first half attends and whose second half "
        "agrees (MIX) is as good as SA at its best rate and degrades more gently. Here the models are a thousand "
        f"times smaller ({parameters} parameters; {setting['num_hidden_layers']} layers, width "
        f"{setting['hidden_size']}), trained on {data} for {setting['steps']} steps of "
        f" {setting['batch_size']} × {setting['block_size']} tokens, {seeds}, AdamW with "
        "weight decay 0.01, clipping to norm 1, masks by `betalinear30`. The rate rises over a tenth of the steps and "
        "stays there.",
        "Largest stable rates are −2⟨g, u⟩ / ⟨u, H u⟩ of the optimizer's own next update, at every "
        f"{setting['probe_every']}th step after the warm-up; a step is stable while the rate is below. A run has "
        "diverged if its loss ended as no number, or no lower than it began. Knowing only how often each token occurs "
        f"costs {frequencies:.3f} nats a token: "
        + (
            "no model of these short runs got more than a hundredth below it, so that they say how fast and how surely "
            "the frequencies are learned, and nothing of what the mechanisms can learn beyond."
            if min(cell.loss for own in cells.values() for cell in own.values()) > frequencies - 0.01
            else "what is below that was learned from the context."
        ),
        table(cells).rstrip(),
    ]
    if found := claims(cells):
        caution = (
            "A mechanism that learns little at any rate has a wide range by this measure: read it beside the losses."
        )
        parts += ["## The study's claims, here", "\n".join(f"* {claim}" for claim in found), caution]
    if arguments.plot:
        parts.append(f"![Held-out loss and stable rates against the learning rate]({Path(arguments.plot).name})")
    return "\n\n".join(parts) + "\n"


def draw(cells: dict[str, dict[float, Cell]], path: Path) -> None:
    """Loss, largest stable rate and share of stable steps against the learning rate."""
    picture = Picture("Learning rates that are too high", 3, size=(4.2, 3.4))
    measures = {
        "held-out loss (nats a token)": lambda cell: cell.loss,
        "median largest stable rate": lambda cell: cell.median,
        "share of stable steps": lambda cell: cell.stable,
    }
    for axes, (label, measure) in zip(picture.panels, measures.items()):
        for (mechanism, own), colour in zip(cells.items(), COLOURS):
            points = [[rate, measure(cell)] for rate, cell in own.items() if math.isfinite(measure(cell))]
            if points:
                picture.curve(axes, mechanism, points, colour)
        axes.set_xscale("log")
        axes.set(xlabel="learning rate", ylabel=label)
    picture.save(path)


def as_csv(runs: list[Run]) -> str:
    """A row a run."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(runs[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(runs)
    return text.getvalue()


def main(argv: list[str] | None = None) -> dict[str, dict[float, Cell]]:
    """Run what is missing, print the tables and write what was asked for."""
    (arguments,) = HfArgumentParser(Arguments).parse_args_into_dataclasses(argv)  # type: ignore[arg-type]
    runs = compare(arguments)
    cells = summarise(runs)
    print("\n" + table(cells))
    if arguments.csv:
        write_text(arguments.csv, as_csv(runs))
    if arguments.plot:
        draw(cells, Path(arguments.plot))
    if arguments.markdown:
        frequencies = frequency_loss(make_data(arguments), arguments.batch_size)
        flags = " ".join(sys.argv[1:] if argv is None else argv)
        write_text(arguments.markdown, page(runs, arguments, flags, frequencies))
    return cells


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
