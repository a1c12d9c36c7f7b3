"""The four ways to mix tokens that the study of consensus compares, as configurations.

Attention, attention in a window, consensus, and both: the first half of the layers attends, the second half agrees.
"""

from collections.abc import Callable
from typing import Any

from .configuration.component import did_you_mean
from .configuration.configuration_frankenstein import FrankensteinConfig

# two neighbours to either side, as the window of consensus has; an encoder's swa looks window_size / 2 either way
_SWA = {"window_size": 4, "num_sinks": 0}
_CONSENSUS = {"window_size": 2, "rank": 4, "edge_hidden_size": 256}
_PATTERNS: dict[str, Callable[[int], list[str]]] = {
    "SA": lambda depth: ["standard"],
    "SW": lambda depth: ["swa"],
    "SC": lambda depth: ["self_consensus"],
    "MIX": lambda depth: ["standard"] * (depth // 2) + ["self_consensus"] * (depth - depth // 2),
}


def list_mechanisms() -> list[str]:
    """Names that `mechanism_config` knows: SA, SW, SC and MIX."""
    return list(_PATTERNS)


def mechanism_config(name: str, **values: Any) -> FrankensteinConfig:
    """A configuration whose layers mix tokens as one of the four mechanisms of the study (section 5.1, appendix E).

    Args:
        name: "SA" (self-attention), "SW" (attention to two neighbours a side), "SC" (self-consensus: w = 2, r = 4,
            ξ = 256) or "MIX" (the first half of the layers SA, the rest SC).
        values: Anything `FrankensteinConfig` takes but `layer_pattern`. What `mixer_params` says of a mixer is added to
            the study's parameters and wins.

    Raises:
        ValueError: An unknown name, a `layer_pattern`, or MIX with one layer only.
    """
    key = name.upper() if isinstance(name, str) else name
    if key not in _PATTERNS:
        raise ValueError(f"Unknown mechanism {name!r}" + did_you_mean(str(name), _PATTERNS))
    if "layer_pattern" in values:
        raise ValueError(f"The mechanism {key!r} is a layer_pattern; leave yours out, or build a FrankensteinConfig.")
    depth = values.get("num_hidden_layers", FrankensteinConfig().num_hidden_layers)
    if key == "MIX" and depth < 2:
        raise ValueError(f"MIX has both mechanisms and needs at least 2 layers, got num_hidden_layers={depth!r}.")
    pattern = _PATTERNS[key](depth)
    given = values.pop("mixer_params", None) or {}
    params = {mixer: study for mixer, study in (("swa", _SWA), ("self_consensus", _CONSENSUS)) if mixer in pattern}
    params |= {mixer: {**params.get(mixer, {}), **said} for mixer, said in given.items()}
    return FrankensteinConfig(layer_pattern=pattern, mixer_params=params, **values)
