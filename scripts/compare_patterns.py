"""One pretrained model under several attention implementations: time, memory and difference of its output by length.

    python scripts/compare_patterns.py --markdown docs/patterns.md --plot docs/patterns.png
    python scripts/compare_patterns.py --model path/or/name --lengths 1024 4096

Without --model a small byte-level Llama is trained first, for --steps steps on the sources of the standard library; any
causal model of transformers will do. Time is process CPU seconds of a forward pass on one thread, the median of
interleaved runs; memory the peak above what the process held before, in a forked child; difference the relative root
mean square of the last hidden states from those under sdpa. Only ratios within one run mean anything.
"""

import sys
import sysconfig
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmark_mixers import interleaved, peak_bytes, table
from comparing import written_by
from transformers import AutoModelForCausalLM, HfArgumentParser, LlamaConfig, LlamaForCausalLM

import frankenstein_hf as fhf
from frankenstein_hf.data.atomic import write_json, write_text
from frankenstein_hf.hub.foreign import code
from frankenstein_hf.training.pictures import COLOURS, Picture, lengths_below

PREAMBLE = """The same weights under sdpa and four attention implementations of ours, without further training: a
byte-level Llama of {layers} layers and width {width}, trained for {steps} steps of {batch} × {length} bytes on the
sources of Python's standard library (loss {loss:.2f} nats a byte). Time and memory are those of one forward pass over
one sequence, fp32, one thread, in units of sdpa; the difference is the relative root mean square of the last hidden
states from sdpa's.

Each row is a name that `fhf.attention_implementation(...)` returned and that was passed to
`from_pretrained(..., attn_implementation=name)`. Windows cost what they show, so that their time in units of sdpa falls
with the length; what they leave out shows in the difference, which training with the pattern would reduce.
"""


@dataclass
class Arguments:
    """What to compare."""

    model: str | None = field(default=None, metadata={"help": "a causal model; none: train a small one"})
    steps: int = field(default=150, metadata={"help": "training steps of the small model"})
    lengths: list[int] = field(default_factory=lambda: [512, 1024, 2048, 4096])
    rounds: int = field(default=3, metadata={"help": "interleaved runs of every case"})
    json: str | None = field(default=None, metadata={"help": "where to write the results"})
    markdown: str | None = field(default=None, metadata={"help": "where to write the page"})
    plot: str | None = field(default=None, metadata={"help": "where to draw the plot (needs 'plots')"})


BATCH, LENGTH = 8, 256
IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "swa": {"window_size": 256},
    "longformer": {"window_size": 256},
    "bigbird": {"window_size": 128},
    "sparge": {"threshold": 0.02},
}


def library_bytes(count: int) -> torch.Tensor:
    """Bytes of the standard library's sources."""
    text = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= count:
            break
    return torch.frombuffer(bytearray(text[:count]), dtype=torch.uint8).long()


def train_small(folder: str, steps: int) -> dict[str, Any]:
    """A byte-level Llama, saved to `folder`; returns what the page says of it."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=32768, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model, data = LlamaForCausalLM(config), library_bytes(2_000_000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loss = torch.zeros(())
    for step in range(steps):
        start = torch.randint(0, len(data) - LENGTH, (BATCH,))
        batch = torch.stack([data[s : s + LENGTH] for s in start])
        loss = model(batch, labels=batch).loss
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return {"layers": 4, "width": 128, "steps": steps, "batch": BATCH, "length": LENGTH, "loss": loss.item()}


@torch.no_grad()
def compare(path: str, arguments: Arguments) -> dict[str, dict[str, float]]:
    """Time, memory and difference of every implementation at every length."""
    names = {"sdpa": "sdpa"} | {
        f"{name} ({', '.join(f'{k} {v}' for k, v in params.items())})": fhf.attention_implementation(name, **params)
        for name, params in IMPLEMENTATIONS.items()
    }
    models = {
        shown: AutoModelForCausalLM.from_pretrained(path, attn_implementation=name).eval()
        for shown, name in names.items()
    }
    text = library_bytes(4_000_000)[-max(arguments.lengths) :]
    results: dict[str, dict[str, float]] = {name: {} for name in models if name != "sdpa"}
    for T in arguments.lengths:
        ids = text[None, :T]
        steps = {name: partial(model.model, ids, use_cache=False) for name, model in models.items()}
        seconds = interleaved(steps, arguments.rounds)
        peaks = {name: peak_bytes(step) for name, step in steps.items()}
        hidden = {name: step().last_hidden_state for name, step in steps.items()}
        for name, row in results.items():
            row[f"time at {T}"] = seconds[name] / seconds["sdpa"]
            row[f"memory at {T}"] = peaks[name] / max(1, peaks["sdpa"])
            difference = (hidden[name] - hidden["sdpa"]).square().mean() / hidden["sdpa"].square().mean()
            row[f"difference at {T}"] = difference.sqrt().item()
    return results


def draw(results: dict[str, dict[str, float]], lengths: list[int], path: Path) -> None:
    """Three panels against length, a line an implementation."""
    picture = Picture("Attention patterns in a pretrained model, one forward pass", 3, size=(4.2, 3.4))
    units = {"time": "time / sdpa", "memory": "memory / sdpa", "difference": "difference from sdpa (relative RMS)"}
    for axes, (what, label) in zip(picture.panels, units.items()):
        for (name, row), colour in zip(results.items(), COLOURS):
            short = name.partition(" (")[0]  # the page's table has the parameters
            picture.curve(axes, short, [[T, row[f"{what} at {T}"]] for T in lengths], colour)
        if what != "difference":
            picture.level(axes, "sdpa", 1.0)
        lengths_below(axes, lengths, "tokens")
        axes.set_ylabel(label)
    picture.save(path)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train if need be, compare, write."""
    (arguments,) = HfArgumentParser(Arguments).parse_args_into_dataclasses(argv)  # type: ignore[arg-type]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        about = None if arguments.model else train_small(folder, arguments.steps)
        results = compare(arguments.model or folder, arguments)
    text = table("results", results)
    print(text)
    if arguments.json:
        write_json(arguments.json, {"arguments": vars(arguments), "results": results})
    if arguments.plot:
        draw(results, arguments.lengths, Path(arguments.plot))
    if arguments.markdown:
        flags = " ".join(sys.argv[1:] if argv is None else argv)
        head = f"# Sparse patterns in a pretrained model\n\n{written_by('compare_patterns.py', flags)}\n\n"
        body = PREAMBLE.format(**about) if about else f"The model is {code(arguments.model)}.\n"
        image = f"\n![time, memory and difference]({Path(arguments.plot).name})\n" if arguments.plot else ""
        write_text(arguments.markdown, head + body + "\n" + text + image)
    return results


if __name__ == "__main__":
    main()
