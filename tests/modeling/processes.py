"""A few steps of the stock `Trainer`, as test_processes.py runs them in one process and in two.

Arguments, when run by `accelerate launch`: a folder for the result, TrainingArguments as JSON (and "sharded"), and the
pattern of mixers.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.modeling.test_training import Examples, trainer
from tests.tiny import tiny_model, tokens


def run(folder: Path, rows: int, arguments: dict[str, Any], pattern: list[str]) -> dict[str, Any]:
    """Train on eight sequences with unequal numbers of labels; returns losses and weights."""
    x = tokens(8, 12)
    labels = x.clone()
    for row in range(8):
        labels[row, : row % 5] = -100
    model = tiny_model(pattern, tie_word_embeddings=False).train()
    values = {"per_device_train_batch_size": rows, "max_steps": 3, "optim": "sgd", **arguments}
    training = trainer(model, Examples({"input_ids": x, "labels": labels}), folder, **values)
    training.train()
    return {
        "losses": [entry["loss"] for entry in training.state.log_history if "loss" in entry],
        "state": training.accelerator.get_state_dict(training.model_wrapped),
        "processes": training.accelerator.num_processes,
        "wrapper": type(training.model_wrapped).__name__,
        "first": training.is_world_process_zero(),
    }


def run_sharded(pattern: list[str], processes: int) -> dict[str, Any]:
    """The same by hand under FSDP2, each of the model's indivisible modules sharded; plainly with one process."""
    x, rank = tokens(4, 12), 0
    model = tiny_model(pattern, tie_word_embeddings=False).double().train()
    if processes > 1:
        distributed.init_process_group("gloo")
        rank, mesh = distributed.get_rank(), init_device_mesh("cpu", (processes,))
        for module in [m for m in model.modules() if type(m).__name__ in model._no_split_modules] + [model]:
            fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses, rows = [], x.chunk(processes)[rank]
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    total = torch.stack(losses)
    if processes > 1:
        distributed.all_reduce(total)
    state = {key: p.full_tensor() if processes > 1 else p for key, p in model.state_dict().items()}
    losses = (total / processes).tolist()
    return {
        "losses": losses,
        "state": state,
        "processes": processes,
        "first": rank == 0,
        "wrapper": type(model).__name__,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, arguments, pattern = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]
    result = run_sharded(pattern, 2) if arguments.pop("sharded", False) else run(folder, 2, arguments, pattern)
    if result["first"]:
        torch.save(result, folder / "result.pt")
