"""What decoding with a model keeps, layer by layer, beside standard attention."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .configuration.configuration_frankenstein import FrankensteinConfig
from .configuration.registries import MIXERS


class LayerCache(NamedTuple):
    """What one cache layer holds of a sequence; in looped depth a layer has one for each time it works.

    Attributes:
        layer: Number of the layer in the model.
        mixer: Its mixer.
        constant: Floats it keeps whatever the length; a ring counts as full.
        per_token: Floats every token adds.
        standard: Floats every token adds in `standard` with the same heads.
    """

    layer: int
    mixer: str
    constant: int
    per_token: float
    standard: int

    def total(self, length: int) -> int:
        """Floats kept after `length` tokens."""
        return self.constant + math.ceil(self.per_token * length)


@dataclass(frozen=True)
class CacheReport:
    """The cache of one sequence; `str()` is a table.

    Attributes:
        layers: What each cache layer holds.
        length: Tokens of the sequence.
        bytes_per_float: Of the dtype the model computes in.
    """

    layers: tuple[LayerCache, ...]
    length: int
    bytes_per_float: int

    @property
    def floats(self) -> int:
        """Floats of all layers after `length` tokens."""
        return sum(layer.total(self.length) for layer in self.layers)

    @property
    def standard_floats(self) -> int:
        """The same, were every layer `standard`."""
        return self.length * sum(layer.standard for layer in self.layers)

    @property
    def floats_per_token(self) -> float:
        """Floats every token adds to all layers."""
        return sum(layer.per_token for layer in self.layers)

    def _row(self, name: str, mixer: str, constant: int, per_token: float, total: int, standard: int) -> list[str]:
        width = self.bytes_per_float
        cells = [name, mixer, f"{constant:,}", f"{per_token:,.4g}", f"{per_token * width:,.4g}", f"{total:,}"]
        return [*cells, f"{total * width:,}", f"{total / standard:.3g}"]

    def __str__(self) -> str:
        head = ["layer", "mixer", "constant", "a token", "bytes a token", f"at {self.length:,}", "bytes", "/ standard"]
        rows = [head]
        for layer in self.layers:
            total = layer.total(self.length)
            standard = layer.standard * self.length
            rows.append(self._row(str(layer.layer), layer.mixer, layer.constant, layer.per_token, total, standard))
        constant = sum(layer.constant for layer in self.layers)
        rows.append(self._row("all", "", constant, self.floats_per_token, self.floats, self.standard_floats))
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = []
        for row in rows:
            names = [cell.ljust(width) for cell, width in zip(row[:2], widths)]
            lines.append("  ".join([*names, *(cell.rjust(width) for cell, width in zip(row[2:], widths[2:]))]))
        return "\n".join(line.rstrip() for line in lines)


def layer_caches(config: Any) -> tuple[LayerCache, ...]:
    """What each cache layer of a causal model with `config` holds."""
    standard, caches = MIXERS.get("standard"), []
    for part in config.rounds:
        for layer_idx in part.layers:
            spec, params = config.mixer_spec_for(layer_idx), config.params_for(layer_idx)
            sizes = config.per_layer_config[layer_idx]
            caches.append(
                LayerCache(
                    layer_idx,
                    spec.name,
                    spec.state_size(params, sizes),
                    spec.token_size(params, sizes),
                    int(standard.token_size(None, sizes)),
                )
            )
    return tuple(caches)


def cache_report(model: Any, length: int, quiet: bool = False) -> CacheReport:
    """Print, and return, what decoding keeps of one sequence: floats and bytes a token and in total, layer by layer.

    Rotated keys, latents, factors, slots, rings, states and tails all count; bookkeeping in integers does not. The last
    column sets the total beside that of `standard` with the model's own heads and key/value heads.

    Args:
        model: A causal model of this family, or its configuration.
        length: Tokens of the sequence, ≥ 1.
        quiet: Only return it.

    Raises:
        ValueError: A model of another family, one without a cache, or a length below 1.
    """
    config = getattr(model, "config", model)
    if not isinstance(config, FrankensteinConfig) and getattr(config, "model_type", "") != "frankenstein":
        raise ValueError(f"cache_report takes a model of this family or its configuration, got {type(model).__name__}.")
    if not isinstance(length, int) or length < 1:
        raise ValueError(f"length={length!r} must be a number of tokens, at least 1.")
    unable = [name for name in dict.fromkeys(config.mixer_names) if not MIXERS.get(name).causal]
    if unable or getattr(model, "is_causal", config.is_causal) is False:
        reason = f"{', '.join(unable)} cannot be causal" if unable else "it is bidirectional"
        raise ValueError(f"This model has no cache: {reason}. Only causal models decode token by token.")
    dtype = getattr(model, "dtype", None) or getattr(config, "dtype", None) or torch.float32
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    report = CacheReport(layer_caches(config), length, dtype.itemsize)
    if not quiet:
        print(report)
    return report
