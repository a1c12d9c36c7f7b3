"""What a run would take: exact counts from a model without weights, estimates from one layer of each kind."""

import copy
import math
import statistics
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from ..configuration.configuration_frankenstein import FrankensteinConfig
from ..optim.grouping import classify
from ..optim.spec import OPTIMIZERS
from ..optim.trainer import PREFIX, _handler
from ..training.programs import Run

SECONDS = 10.0  # at most for measuring
ROUNDS = 3


@dataclass
class Estimate:
    """What a run would take; `str()` is a table."""

    values: dict[str, Any]

    def __str__(self) -> str:
        lines = []
        for key, value in self.values.items():
            if isinstance(value, dict):
                lines.append(f"{key}:")
                lines += [f"  {name:<24} {_number(own):>18}" for name, own in value.items()]
            else:
                lines.append(f"{key:<26} {_number(value):>18}")
        return "\n".join(lines)


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if isinstance(value, float) else str(value)


def estimate(run: Run, measure: bool = True) -> Estimate:
    """Count, and measure for some seconds; nothing is written but what the data loading keeps in its cache.

    Args:
        run: A run of which nothing has begun.
        measure: Time a step of one layer of each kind.
    """
    tokenizer, train, held_out = run.prepare_data()
    args = run.args
    if run.model_args.model_name_or_path:
        config = run.pretrained_config
        vocab_size = config.vocab_size
    else:
        vocab_size = len(tokenizer)
        config = run._config(vocab_size)
    with torch.device("meta"):
        model = run.auto_class.from_config(config)
    infos = classify(model)
    by_role: dict[str, int] = {}
    for info in infos:
        by_role[info.role] = by_role.get(info.role, 0) + info.parameter.numel()
    weights = sum(info.parameter.numel() * info.parameter.element_size() for info in infos)
    state = _optimizer_bytes(run, infos)
    rows, batch = len(train), args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    steps = args.max_steps if args.max_steps > 0 else _steps(run, rows)
    found: dict[str, Any] = {
        "parameters": {"all": sum(by_role.values()), **by_role},
        "bytes": {"weights": weights, "gradients": weights, "optimizer": state, "a checkpoint": weights + state},
        "steps": steps,
        "rows": {"to train on": rows, "held out": len(held_out), "a step": batch},
        "tokens at most": steps * batch * run.data_args.block_size,
        "epochs": steps * batch / rows,
        "vocab_size": vocab_size,
    }
    if measure and isinstance(config, FrankensteinConfig):
        seconds, activations = _measured(run, config)
        found["estimates"] = {
            "seconds a step": seconds * args.gradient_accumulation_steps,
            "seconds of training": seconds * args.gradient_accumulation_steps * steps,
            "bytes of activations": activations,
        }
    return Estimate(found)


def _steps(run: Run, rows: int) -> int:
    args = run.args
    batches = math.ceil(rows / (args.per_device_train_batch_size * args.world_size))
    return math.ceil(args.num_train_epochs * max(1, -(-batches // args.gradient_accumulation_steps)))


def _optimizer_bytes(run: Run, infos: list[Any]) -> int:
    name = str(getattr(run.args.optim, "value", run.args.optim))
    if not name.startswith(PREFIX):
        return 8 * sum(info.parameter.numel() for info in infos)  # two moments in fp32
    pairs = [pair.partition("=") for pair in (run.args.optim_args or "").replace(" ", "").split(",") if pair]
    context = SimpleNamespace(args=run.args, optim_args={key: value for key, _, value in pairs}, model=None)
    settings = _handler(context)[1]  # as Trainer asks for them
    spec = OPTIMIZERS.get(settings["name"])
    params = spec.params.from_dict({key: settings[key] for key in spec.params.types() if key in settings}, spec.name)
    shapes = [(tuple(info.parameter.shape), info.kind) for info in infos]
    return sum(spec.state_bytes(params, *shape) for shape in shapes) + spec.shared_state_bytes(params, shapes)


# ---------------------------------------------------------------------- measuring


def _measured(run: Run, config: FrankensteinConfig) -> tuple[float, int]:
    """Seconds and saved bytes of one forward and backward pass at the run's shape."""
    kinds = list(dict.fromkeys(config.mixer_names))
    costs = {kind: (_pass(run, config, [kind]), _pass(run, config, [kind, kind])) for kind in kinds}
    seconds, saved = 0.0, 0
    ends = [(2 * one[0] - two[0], 2 * one[1] - two[1]) for one, two in costs.values()]
    for kind in config.mixer_names:
        one, two = costs[kind]
        seconds += max(two[0] - one[0], 0.0) * config.num_loops
        saved += max(two[1] - one[1], 0) * config.num_loops
    seconds += max(statistics.median(end[0] for end in ends), 0.0)
    saved += max(int(statistics.median(end[1] for end in ends)), 0)
    return seconds, saved


def _pass(run: Run, config: FrankensteinConfig, pattern: list[str]) -> tuple[float, int]:
    values = {**config.to_dict(), "layer_pattern": pattern, "num_hidden_layers": len(pattern)}
    values |= {"num_loops": 1, "loop_begin_layers": 0, "loop_end_layers": 0}
    for key in ("layer_types", "per_layer_config"):
        values.pop(key, None)
    small = FrankensteinConfig.from_dict(copy.deepcopy(values))
    with torch.random.fork_rng():
        model = run.auto_class.from_config(small).to(run.args.device).train()
        shape = (run.args.per_device_train_batch_size, run.data_args.block_size)
        ids = torch.randint(0, config.vocab_size, shape, device=run.args.device)
        inputs: dict[str, Any] = {"input_ids": ids}
        if run.objective in ("mlm", "clm"):
            labels = ids.clone()
            if run.objective == "mlm":
                labels[torch.rand(shape, device=ids.device) > 0.15] = -100
            inputs["labels"] = labels
        saved: dict[int, int] = {}
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def note(x: torch.Tensor) -> torch.Tensor:
            storage = x.untyped_storage()
            if storage.data_ptr() not in own:
                saved[storage.data_ptr()] = storage.nbytes()
            return x

        times, start = [], time.monotonic()
        for turn in range(ROUNDS + 1):
            began = time.monotonic()
            with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x) if turn == 0 else torch.enable_grad():
                output = model(**inputs)
            loss = output.loss if "labels" in inputs else output[0].float().mean()
            loss.backward()
            model.zero_grad()
            if turn:
                times.append(time.monotonic() - began)
            if times and time.monotonic() - start > SECONDS / 8:
                break
    return statistics.median(times), sum(saved.values())
