"""Other mixers in some layers of a host: which layers, with which parameters, and what they take over."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from ..configuration.component import Registry
from ..configuration.configuration_frankenstein import FrankensteinConfig
from ..configuration.keys import check_mixer_params, read_pattern
from ..configuration.registries import MIXERS
from ..configuration.values import shown


class Target(NamedTuple):
    """Where a tensor of an attention layer goes in the mixer that replaces it.

    Attributes:
        name: Of the new model's tensor.
        groups: How many heads the rows are, where each is repeated to fill the target; else 1.
    """

    name: str
    groups: int = 1

    def fill(self, target: Tensor, rows: Tensor) -> None:
        """Copy `rows` into `target`, every head as often as it has query heads."""
        if target.shape[0] != rows.shape[0]:
            times = target.shape[0] // rows.shape[0]
            rows = rows.unflatten(0, (self.groups, -1)).repeat_interleave(times, dim=0).flatten(0, 1)
        target.copy_(rows)


@dataclass
class Change:
    """What becomes of the layers a user has named.

    Attributes:
        layers: Their numbers.
        values: Keys of the new configuration that differ from the host's.
    """

    layers: list[int] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)


def read_change(own: FrankensteinConfig, layer_pattern: Any, mixer_params: Mapping[str, Any] | None) -> Change:
    """What `from_transformers` was asked to change, checked against the host's own configuration.

    Raises:
        ValueError: A pattern of another length, layers that do not exist or are named twice, an unknown mixer or
            parameter, parameters of a mixer that no changed layer has.
    """
    check_mixer_params("mixer_params", mixer_params)
    if layer_pattern is None:
        if mixer_params:
            raise ValueError(
                f"mixer_params={shown(mixer_params)} are for new mixers, but layer_pattern changes no layer; say which."
            )
        return Change()
    new = _new_mixers(own, layer_pattern)
    given = {name: dict(params) for name, params in (mixer_params or {}).items()}
    # a layer that is named as what it is stays what it is, unless it is given parameters
    new = {i: name for i, name in new.items() if name != own.mixer_names[i] or name in given}
    if strange := sorted(set(given) - set(new.values())):
        raise ValueError(
            f"mixer_params for {', '.join(strange)} have no effect: the changed layers are "
            f"{shown(dict(sorted(new.items())))}."
        )
    pattern = [new.get(i, name) for i, name in enumerate(own.mixer_names)]
    params = {name: dict(values) for name, values in (own.mixer_params or {}).items() if name in pattern}
    kept = {name for i, name in enumerate(own.mixer_names) if i not in new}
    apart = {}  # parameters of layers beside others of the host that have the same mixer with other parameters
    for i, name in sorted(new.items()):
        if name in kept and given.get(name, {}) != params.get(name, {}):
            apart[i] = {"mixer_params": {**params, name: given.get(name, {})}}
        else:
            params[name] = given.get(name, {})
    values: dict[str, Any] = {"layer_pattern": pattern, "mixer_params": {k: v for k, v in params.items() if v}}
    if apart:
        values["per_layer_config"] = apart
    if not any(MIXERS.get(name).qk_norm for name in pattern):  # what no layer could honour
        values |= {"qk_norm": "none", "qk_norm_params": None, "attention_scale": None}
    return Change(sorted(new), values)


def _new_mixers(own: FrankensteinConfig, layer_pattern: Any) -> dict[int, str]:
    """The mixer of every layer that `layer_pattern` names."""
    depth = own.num_hidden_layers
    if not isinstance(layer_pattern, Mapping):
        pattern = read_pattern(layer_pattern) or []
        if isinstance(layer_pattern, str) and len(pattern) == 1:
            pattern *= depth
        if len(pattern) != depth:
            raise ValueError(
                f"layer_pattern={shown(layer_pattern)} has {len(pattern)} entries, and the host {depth} layers: give "
                "one for every layer, one name for all, or a dict of those that change as {3: 'gla', '5-8': 'swa'}."
            )
        return dict(enumerate(pattern))
    new: dict[int, str] = {}
    for key, name in layer_pattern.items():
        _known(MIXERS, layer_pattern, name)
        for layer in _layers(key, layer_pattern, depth):
            if layer in new:
                raise ValueError(f"layer_pattern={shown(layer_pattern)} names layer {layer} twice.")
            new[layer] = name
    return new


def _known(registry: Registry[Any], layer_pattern: Any, name: Any) -> None:
    try:
        registry.get(name)
    except ValueError as error:
        raise ValueError(f"layer_pattern={shown(layer_pattern)}: {error}") from None


def _layers(key: Any, layer_pattern: Any, depth: int) -> range:
    """The layers that a key of the dict means: a number, or "5-8"."""
    parts = [key] if isinstance(key, int) and not isinstance(key, bool) else str(key).split("-")
    numbers = [int(part) for part in parts if str(part).strip().isascii() and str(part).strip().isdigit()]
    if len(numbers) != len(parts) or len(numbers) > 2 or not numbers[0] <= numbers[-1] < depth:
        raise ValueError(
            f"layer_pattern={shown(layer_pattern)}: {key!r} is no layer. Layers are whole numbers from 0 to "
            f"{depth - 1}, or ranges such as '0-{depth - 1}' with both ends included."
        )
    return range(numbers[0], numbers[-1] + 1)


def target_of(
    own: FrankensteinConfig, config: FrankensteinConfig, name: str, rows: int, shapes: Mapping[str, tuple[int, ...]]
) -> Target | None:
    """Where the tensor `name` of a layer's attention goes in the mixer that replaces it; None if it has no place.

    Args:
        own, config: Of the host as it is, and of the new model.
        name: Such as "model.layers.3.mixer.k_proj.weight".
        rows: Of the tensor.
        shapes: Of the new model's tensors.
    """
    parts = name.split(".")
    layer, module = int(parts[parts.index("layers") + 1]), parts[-2]
    spec = config.mixer_spec_for(layer)
    norms = ("q_norm", "k_norm", "qk_scale") if spec.qk_norm and config.qk_norm == own.qk_norm else ()
    if name not in shapes or module not in (*spec.transfer, *norms):
        return None
    wanted = shapes[name][0]
    if module == "o_proj" or wanted == rows or module in norms:
        return Target(name) if wanted == rows else None
    groups, width = own.num_key_value_heads or 1, own.head_dim or 1
    repeated = module in ("k_proj", "v_proj") and rows == groups * width and wanted % rows == 0
    return Target(name, groups) if repeated else None
