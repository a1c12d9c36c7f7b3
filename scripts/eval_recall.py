"""Associative recall in miniature: one layer must give back the value that was stored with a key.

    python scripts/eval_recall.py --mixers standard gated_deltanet gla --pairs 4 8 64
    python scripts/eval_recall.py --json recall.json --markdown docs/recall.md --plot docs/recall.png

A sequence is n stacked pairs [k_i; v_i] of random directions with 16 channels each, then every key again in another
order. The layer (norm, mixer with 4 heads of 16 channels, residual, norm, projection) answers each with a vector; it
is right when that is nearest to the value of the right pair among the n. Trained for 250 steps of 4096 questions by
cross-entropy over the n candidates; for each mixer and n, the best learning rate of a sweep is chosen on its first
seed, and the mean accuracy over all seeds is reported, on sequences never seen. A pair is one token, its neighbours
have nothing to do with it and all of its value is asked for, so what a mixer lets be is switched off: short
convolutions, gates on its output, and the storing of a value under the key before it. With keys of 16 channels a
state of fixed size cannot hold 64 pairs exactly; softmax attention can. Windows (swa, titan) of 256 tokens hold all
of such a sequence and are softmax attention here.
"""

import dataclasses
import json
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from comparing import written_by
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import HfArgumentParser

import frankenstein_hf as fhf
from frankenstein_hf.configuration.registries import MIXERS
from frankenstein_hf.data.atomic import write_json, write_text
from frankenstein_hf.training.pictures import Picture

WIDTH = 16  # channels of keys and of values
HEADS = 4
HIDDEN = HEADS * WIDTH
SWITCHED_OFF = ("use_short_conv", "short_conv", "shifted", "gate")  # parameters that do not serve the task
TEMPERATURE = 0.1

Results = dict[str, dict[str, dict[str, Any]]]  # by mixer and number of pairs (text, as in JSON)


@dataclass
class Arguments:
    """What to evaluate."""

    mixers: list[str] = field(
        default_factory=lambda: sorted(s.name for s in MIXERS if s.causal and not s.needs_input_ids),
        metadata={"help": "mixers to compare"},
    )
    pairs: list[int] = field(default_factory=lambda: [4, 8, 16, 32, 64], metadata={"help": "numbers of stored pairs"})
    learning_rates: list[float] = field(default_factory=lambda: [5e-3, 1e-2], metadata={"help": "the sweep"})
    seeds: int = field(default=2, metadata={"help": "runs at the best learning rate"})
    steps: int = field(default=250, metadata={"help": "training steps"})
    questions: int = field(default=4096, metadata={"help": "questions a step: sequences times pairs"})
    json: str | None = field(default=None, metadata={"help": "where to keep results; those it has are not run again"})
    markdown: str | None = field(default=None, metadata={"help": "where to write the table as a page"})
    only_render: bool = field(default=False, metadata={"help": "train nothing: write what --json has"})
    plot: str | None = field(
        default=None, metadata={"help": "where to draw a heat map of the accuracy (needs 'plots')"}
    )

    def __post_init__(self) -> None:
        for name in self.mixers:
            spec = MIXERS.get(name)
            if not spec.causal or spec.needs_input_ids:
                raise ValueError(f"{name!r} cannot be evaluated: the task is causal and has no token ids.")
        for name in ("seeds", "steps", "questions", *(f"pairs[{i}]" for i in range(len(self.pairs)))):
            value = self.pairs[int(name[6:-1])] if name.startswith("pairs[") else getattr(self, name)
            if value < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}.")


class NoFeedForward(nn.Module):
    """The identity in the place of a feed-forward block."""

    def forward(self, hidden_states: Tensor, context: Any) -> tuple[Tensor, None]:
        return hidden_states, None


class Recaller(nn.Module):
    """One mixer whose heads have keys and values of 16 channels."""

    def __init__(self, name: str) -> None:
        super().__init__()
        options = {field.name for field in dataclasses.fields(MIXERS.get(name).params)}
        params = {option: False for option in SWITCHED_OFF if option in options}
        config = fhf.FrankensteinConfig(
            vocab_size=2, hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=HEADS, head_dim=WIDTH,
            intermediate_size=1,
            mixer_params={name: params}, layer_pattern=name, initializer_range=HIDDEN**-0.5, tie_word_embeddings=False,
        )  # fmt: skip
        self.embed = nn.Linear(2 * WIDTH + 1, HIDDEN)
        self.stack = fhf.FrankensteinModel(config, is_causal=True)
        self.stack.layers[0].mlp = NoFeedForward()  # the mixer alone has to remember
        self.answer = nn.Linear(HIDDEN, WIDTH)

    def forward(self, pairs: Tensor) -> Tensor:
        """[B, 2n, 33] -> answers [B, n, 16] to the second half."""
        hidden = self.stack(inputs_embeds=self.embed(pairs), use_cache=False).last_hidden_state
        return self.answer(hidden[:, pairs.shape[1] // 2 :])


def batch(size: int, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences [B, 2n, 33] (the last channel marks questions), the values [B, n, 16], the right pairs [B, n]."""
    keys, values = (F.normalize(torch.randn(size, n, WIDTH, generator=generator), dim=-1) for _ in range(2))
    asked = torch.rand(size, n, generator=generator).argsort(dim=1)
    again = keys.gather(1, asked[..., None].expand(-1, -1, WIDTH))
    stored = torch.cat([keys, values, torch.zeros(size, n, 1)], dim=-1)
    questions = torch.cat([again, torch.zeros(size, n, WIDTH), torch.ones(size, n, 1)], dim=-1)
    return torch.cat([stored, questions], dim=1) * WIDTH**0.5, values, asked


def scores(model: Recaller, inputs: Tensor, values: Tensor) -> Tensor:
    """Similarity of the answers to each stored value, [B, n, n]."""
    return F.normalize(model(inputs), dim=-1) @ values.mT / TEMPERATURE


def accuracy(name: str, n: int, learning_rate: float, seed: int, arguments: Arguments) -> float:
    """Train one model and measure it on 512 new sequences."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(1000 + seed)
    model = Recaller(name).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, arguments.steps, pct_start=0.1)
    for _ in range(arguments.steps):
        inputs, values, asked = batch(max(1, arguments.questions // n), n, generator)
        optimizer.zero_grad()
        F.cross_entropy(scores(model, inputs, values).flatten(0, 1), asked.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        inputs, values, asked = batch(512, n, torch.Generator().manual_seed(7))
        return (scores(model, inputs, values).argmax(-1) == asked).double().mean().item()


def evaluate(name: str, n: int, arguments: Arguments) -> dict[str, Any]:
    """Sweep the learning rate on the first seed, repeat the best one on the others."""
    sweep = {rate: accuracy(name, n, rate, 0, arguments) for rate in arguments.learning_rates}
    best = max(sweep, key=lambda rate: sweep[rate])
    runs = [sweep[best], *(accuracy(name, n, best, seed, arguments) for seed in range(1, arguments.seeds))]
    by_rate = {str(rate): value for rate, value in sweep.items()}
    return {"accuracy": statistics.mean(runs), "runs": runs, "learning_rate": best, "sweep": by_rate}


def draw(results: Results, path: Path) -> None:
    """A heat map of accuracies: a row a mixer, a column a number of pairs."""
    counts = sorted({int(n) for row in results.values() for n in row})
    picture = Picture("Associative recall: accuracy", size=(2.6 + 0.7 * len(counts), 1.0 + 0.2 * len(results)))
    cells = {
        name: [row[str(n)]["accuracy"] if str(n) in row else None for n in counts] for name, row in results.items()
    }
    picture.heat_map(picture.panels[0], cells, [str(n) for n in counts], "stored pairs")
    picture.save(path)


def page(results: Results, arguments: Arguments) -> str:
    """The table, in Markdown."""
    lines = [
        f"| mixer | {' | '.join(f'{n} pairs' for n in arguments.pairs)} |",
        "|---" * (len(arguments.pairs) + 1) + "|",
    ]
    for name in arguments.mixers:
        cells = []
        for cell in (results[name].get(str(n)) for n in arguments.pairs):
            if cell is None:
                cells.append("not run")
                continue
            runs = " ".join(f"{run:.1%}" for run in cell["runs"])
            cells.append(f"{cell['accuracy']:.1%} ({runs}; lr {cell['learning_rate']:g})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def load(path: Path, settings: dict[str, Any]) -> Results:
    """Results an earlier run left at `path`; raises ValueError where they were made with other settings."""
    if not path.exists():
        return {}
    saved = json.loads(path.read_text(encoding="utf-8"))
    if saved["settings"] != settings:
        raise ValueError(f"{path} holds results of other settings ({saved['settings']}); choose another --json.")
    return saved["results"]


def main(argv: list[str] | None = None) -> Results:
    """Evaluate and print a Markdown table; returns accuracies by mixer and number of pairs."""
    (arguments,) = HfArgumentParser(Arguments).parse_args_into_dataclasses(argv)  # type: ignore[arg-type]
    settings = {name: getattr(arguments, name) for name in ("learning_rates", "seeds", "steps", "questions")}
    results = load(Path(arguments.json), settings) if arguments.json else {}
    for name, n in ((name, n) for n in arguments.pairs for name in arguments.mixers):
        row = results.setdefault(name, {})
        if str(n) not in row and not arguments.only_render:
            row[str(n)] = evaluate(name, n, arguments)
            print(f"{name}, {n} pairs: {row[str(n)]}", flush=True)
            if arguments.json:
                write_json(arguments.json, {"settings": settings, "results": results})
    results = {name: results[name] for name in arguments.mixers}  # in the order asked for
    text = page(results, arguments)
    print(f"\n{text}")
    if arguments.markdown:
        flags = " ".join(sys.argv[1:] if argv is None else argv)
        about = (__doc__ or "").split("\n\n", 2)
        head = f"# {about[0]}\n\n{about[2]}\nIn brackets the accuracy of every seed, and the learning rate.\n"
        command = written_by("eval_recall.py", flags) + "\n"
        picture = (
            f"\n![accuracy by mixer and number of stored pairs]({Path(arguments.plot).name})\n"
            if arguments.plot
            else ""
        )
        write_text(arguments.markdown, "\n".join([head, command, text]) + picture)
    if arguments.plot:
        draw(results, Path(arguments.plot))
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
