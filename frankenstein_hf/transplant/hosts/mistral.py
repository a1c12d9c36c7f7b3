"""`mistral`: a Llama whose layers all have one window, or none."""

from typing import Any

from ...configuration.configuration_frankenstein import FrankensteinConfig
from ..host import LLAMA_MODULES, Host, decoder_heads, window_of, windows


def read(config: Any) -> dict[str, Any]:
    """The window is a model's, not a layer's."""
    return windows(config, [config.sliding_window is not None] * config.num_hidden_layers)


def write(config: FrankensteinConfig) -> dict[str, Any]:
    """A window that some layers do not have cannot be said; reading it back shows that."""
    return {"sliding_window": window_of(config)}


HOSTS = (
    Host(
        model_type="mistral",
        heads=decoder_heads("Mistral"),
        modules=LLAMA_MODULES,
        reads=frozenset({"sliding_window"}),
        read=read,
        write=write,
    ),
)
