"""Measure what a step of every optimizer costs and how much it keeps; docs/optimizers.md shows the numbers.

    python scripts/benchmark_optimizers.py                             # all of them
    python scripts/benchmark_optimizers.py --optimizers lion muon      # these; the others in the file stay

A model of 10 M parameters with gradients, fp32, one thread, process CPU time. Each optimizer alternates with torch's
foreach AdamW on the same parameters, and the ratio of the medians counts. The first step, which also makes the state
and the first projections or preconditioners, is timed by itself. Losses that a method evaluates itself cost nothing
here. Muon and its faster forms are also compared on the weight matrices alone.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from benchmark_mixers import interleaved
from torch import nn
from transformers import HfArgumentParser

import frankenstein_hf as fhf
from frankenstein_hf.data.atomic import write_json
from frankenstein_hf.optim.grouping import classify
from frankenstein_hf.optim.spec import OPTIMIZERS, load

COSTS = Path(__file__).resolve().parent.parent / "docs" / "optimizer_costs.json"


@dataclass
class Arguments:
    """What to measure."""

    optimizers: list[str] = field(default_factory=fhf.list_optimizers, metadata={"help": "optimizers to measure"})
    rounds: int = field(default=7, metadata={"help": "steps of every optimizer after its first two"})
    json: str = field(default=str(COSTS), metadata={"help": "where the results are kept"})

    def __post_init__(self) -> None:
        for name in self.optimizers:
            OPTIMIZERS.get(name)
        if self.rounds < 1:
            raise ValueError(f"--rounds must be at least 1, got {self.rounds}.")


def make_model() -> Any:
    """10.5 M parameters in 56 tensors."""
    config = fhf.FrankensteinConfig(
        vocab_size=2048, hidden_size=320, intermediate_size=1280, num_hidden_layers=6, num_attention_heads=5,
        layer_pattern="standard", tie_word_embeddings=True,
    )  # fmt: skip
    return fhf.FrankensteinForCausalLM(config)


def with_gradients(model: nn.Module) -> nn.Module:
    """Random gradients."""
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 0.01
    return model


def step_of(name: str, optimizer: Any) -> Callable[[], Any]:
    """A step, with a closure that costs nothing where the method needs one."""
    zero = torch.zeros((), requires_grad=True)
    return (lambda: optimizer.step(lambda: zero * 1.0)) if OPTIMIZERS.get(name).closure else optimizer.step


def seconds(step: Callable[[], Any]) -> float:
    """CPU seconds of one call."""
    start = time.process_time()
    step()
    return time.process_time() - start


def measure(name: str, rounds: int) -> dict[str, float]:
    """State bytes, and times of a typical and of the first step in units of torch's foreach AdamW."""
    ours, theirs = with_gradients(make_model()), with_gradients(make_model())
    optimizer = fhf.create_optimizer(ours, name)
    step = step_of(name, optimizer)
    first = seconds(step)
    for _ in range(1, optimizer.param_groups[0].get("precondition_frequency", 1)):
        step()  # the first steps of shampoo all make new preconditioners
    times = interleaved({"ours": step, "adamw": torch.optim.AdamW(theirs.parameters(), foreach=True).step}, rounds)
    return {
        "state_bytes": optimizer.state_bytes(),
        "step": round(times["ours"] / times["adamw"], 3),
        "first_step": round(first / times["adamw"], 3),
    }


def matrices(rounds: int) -> dict[str, float]:
    """muon beside torch's, and turbo_muon and dion3 (f = 0.25) beside muon, on the weight matrices alone."""

    def weights() -> list[nn.Parameter]:
        infos = classify(with_gradients(make_model()))
        return [info.parameter for info in infos if info.kind == "matrix"]

    def own(name: str, **values: Any) -> Callable[[], Any]:
        group = {"params": weights(), "kind": "matrix", "layout": "stack"}
        return load(OPTIMIZERS.get(name).implementation)([group], **values).step

    steps = {
        "torch.optim.Muon": torch.optim.Muon(weights(), lr=0.02, weight_decay=0.0).step,
        "muon": own("muon"),
        "muon, ns_bf16": own("muon", ns_bf16=True),
        "turbo_muon": own("turbo_muon"),
        "dion3": own("dion3", fraction=0.25),
    }
    times = interleaved(steps, rounds)
    return {
        "muon / torch.optim.Muon": round(times["muon"] / times["torch.optim.Muon"], 3),
        "muon, ns_bf16 / torch.optim.Muon": round(times["muon, ns_bf16"] / times["torch.optim.Muon"], 3),
        "turbo_muon / muon": round(times["turbo_muon"] / times["muon"], 3),
        "dion3 (f = 0.25) / muon": round(times["dion3"] / times["muon"], 3),
    }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure, print, and merge the results into the file; returns all that it then holds."""
    (arguments,) = HfArgumentParser(Arguments).parse_args_into_dataclasses(argv)  # type: ignore[arg-type]
    torch.manual_seed(0)
    path, model = Path(arguments.json), make_model()
    costs = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"matrices": {}, "optimizers": {}}
    costs |= {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tensors": len(list(model.parameters())),
        "torch": torch.__version__,
    }
    if "muon" in arguments.optimizers:
        costs["matrices"] = matrices(arguments.rounds)
        print(costs["matrices"], flush=True)
    for name in arguments.optimizers:
        costs["optimizers"][name] = measure(name, arguments.rounds)
        print(name, costs["optimizers"][name], flush=True)
        known = costs["optimizers"]
        costs["optimizers"] = {other: known[other] for other in fhf.list_optimizers() if other in known}
        write_json(path, costs)
    return costs


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main() is None)
