"""What a model consists of: its parameters by part, and a few lines that say what a configuration is."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

# What the parts of a layer, and of the model around the layers, count as; by the names of their modules.
LAYER_PARTS = {"mixer": "mixers", "mlp": "feed-forward"}
MODEL_PARTS = {"embed_tokens": "embeddings"}


class Part(NamedTuple):
    """The parameters of one part of a model.

    Attributes:
        name: "embeddings", "mixers: gla", "feed-forward", "norms", "residual", "head" or "other".
        parameters: Numbers it learns; what is shared counts once, where it is named first.
        active: Those that take part in computing one token: all but those of experts it is not sent to.
    """

    name: str
    parameters: int
    active: int


class Census(NamedTuple):
    """Parameters of a model by part; `str()` is a table.

    Attributes:
        parts: The parts that have any, in the order in which the model names them.
    """

    parts: tuple[Part, ...]

    @property
    def parameters(self) -> int:
        """All of them."""
        return sum(part.parameters for part in self.parts)

    @property
    def active(self) -> int:
        """Those that take part in computing one token."""
        return sum(part.active for part in self.parts)

    def __str__(self) -> str:
        total = Part("all", self.parameters, self.active)
        rows = [("part", "parameters", "active per token", "share")]
        for name, parameters, active in (*self.parts, total):
            share = parameters / total.parameters if total.parameters else 0.0
            rows.append((name, f"{parameters:,}", f"{active:,}", f"{share:.1%}"))
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
            for row in rows
        )


def parameter_census(model: nn.Module) -> Census:
    """Count what a model of this family learns, by part.

    Works without storage, on the meta device, as well. A module of which a token uses a part only says how much it
    leaves out in `idle_parameters`.

    Args:
        model: A model of this family, with or without a head.

    Raises:
        ValueError: A model of another family.
    """
    if getattr(getattr(model, "config", None), "model_type", "") != "frankenstein":
        raise ValueError(f"parameter_census takes a model of this family, got {type(model).__name__}.")
    counts: dict[str, int] = {}
    idle: dict[str, int] = {}
    for path, parameter in model.named_parameters():
        name = _part(model, path)
        counts[name] = counts.get(name, 0) + parameter.numel()
    for path, module in model.named_modules():
        if left_out := getattr(module, "idle_parameters", 0):
            name = _part(model, path)
            idle[name] = idle.get(name, 0) + left_out
    return Census(tuple(Part(name, count, count - idle.get(name, 0)) for name, count in counts.items()))


def _part(model: Any, path: str) -> str:
    """The part of the parameter or module at `path`, such as "model.layers.3.mixer.q_proj.weight"."""
    names = path.split(".")
    if names[0] == model.base_model_prefix and hasattr(model, names[0]):
        names = names[1:]
    elif model.base_model is not model:
        return "head"
    if names[0] != "layers":
        return MODEL_PARTS.get(names[0], "norms" if names[0].endswith("norm") else "other")
    index, name = int(names[1]), names[2]
    if name == "mixer":
        return f"mixers: {model.config.mixer_names[index]}"
    if name.endswith("connection"):
        return "residual"
    return LAYER_PARTS.get(name, "norms" if name.endswith("norm") else "other")


def describe(config: Any, length: int) -> str:
    """What `FrankensteinConfig.describe` returns."""
    from .modeling_frankenstein import FrankensteinForCausalLM, FrankensteinForMaskedLM

    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ValueError(f"length={length!r} must be a number of tokens, at least 1.")
    head = FrankensteinForCausalLM if config.is_causal else FrankensteinForMaskedLM
    with torch.device("meta"):
        census = parameter_census(head(config))
    parts = ", ".join(f"{part.name} {part.parameters:,}" for part in census.parts)
    task = "language" if config.is_causal else "masked-language"
    lines = [
        f"{'Causal' if config.is_causal else 'Bidirectional'} model of {config.num_hidden_layers} layers of width "
        f"{config.hidden_size}, vocabulary of {config.vocab_size:,}",
        *_layers(config),
        f"around them: {'; '.join(options(config))}",
        f"parameters: {census.parameters:,} with the {task}-model head, {census.active:,} active per token; {parts}",
    ]
    if config.is_causal:
        floats = decode_floats(config, length)
        width = (getattr(torch, str(config.dtype or "float32").removeprefix("torch."))).itemsize
        lines.append(
            f"decode state of one sequence after {length:,} tokens: {floats:,} floats, {floats * width:,} bytes"
        )
    return "\n".join(lines)


def decode_floats(config: Any, length: int) -> int:
    """Floats that all cache layers of a causal model hold after `length` tokens; rings count as full."""
    floats = 0
    for part in config.rounds:
        for layer_idx in part.layers:
            spec, params = config.mixer_spec_for(layer_idx), config.params_for(layer_idx)
            sizes = config.per_layer_config[layer_idx]
            floats += spec.state_size(params, sizes) + math.ceil(spec.token_size(params, sizes) * length)
    return floats


def _layers(config: Any) -> Iterator[str]:
    layers: dict[str, list[int]] = {}
    for index, name in enumerate(config.mixer_names):
        layers.setdefault(name, []).append(index)
    for name, indices in layers.items():
        yield f"{'layer' if len(indices) == 1 else 'layers'} {ranges(indices)}: {name}"
    if config.num_loops > 1:
        repeated = [index for part in config.rounds if part.looped for index in part.layers]
        yield f"layers {ranges(sorted(set(repeated)))} work {config.num_loops} times"


def ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0–2, 5"; the numbers are in order."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)


def options(config: Any) -> Iterator[str]:
    """The chosen component of every kind, by layers where they differ."""
    from ..configuration.registries import KINDS

    for kind, how in KINDS.items():
        own = how.per_layer and config.is_heterogeneous
        chosen: dict[str, list[int]] = {}
        for index, layer in enumerate(config.per_layer_config if own else [config]):
            chosen.setdefault(getattr(layer, how.field), []).append(index)
        names = [name if len(chosen) == 1 else f"{name} (layers {ranges(at)})" for name, at in chosen.items()]
        yield f"{kind.replace('_', '-')} {', '.join(names)}"
