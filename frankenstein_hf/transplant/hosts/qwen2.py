"""`qwen2`: biases on queries, keys and values, and windows in the upper layers if asked for."""

from typing import Any

from ...configuration.configuration_frankenstein import FrankensteinConfig
from ..host import LLAMA_MODULES, Host, decoder_heads, layer_types, slides_by_type, window_of, windows

WINDOW_KEYS = frozenset({"use_sliding_window", "sliding_window", "layer_types"})


def read_windows(config: Any) -> dict[str, Any]:
    """`layer_types` says what is built; `max_window_layers` has only been its default."""
    return windows(config, slides_by_type(config))


def write_windows(config: FrankensteinConfig) -> dict[str, Any]:
    """Windows and which layers have them."""
    window = window_of(config)
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": layer_types(config),
    }


HOSTS = (
    Host(
        model_type="qwen2",
        heads=decoder_heads("Qwen2"),
        modules=LLAMA_MODULES,
        keys={"head_dim": "head_dim"},  # not declared, but looked for
        fixed={"attention_bias": True, "attention_output_bias": False},
        without_effect=frozenset({"max_window_layers"}),
        reads=WINDOW_KEYS,
        read=read_windows,
        write=write_windows,
    ),
)
