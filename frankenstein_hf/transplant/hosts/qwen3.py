"""`qwen3`: norms of queries and keys, head by head."""

from typing import Any

from ..host import LLAMA_MODULES, QK_NORM_MODULES, Host, decoder_heads
from .qwen2 import WINDOW_KEYS, read_windows, write_windows


def read(config: Any) -> dict[str, Any]:
    """The norms have the model's epsilon."""
    return read_windows(config) | {"qk_norm": "rms_norm", "qk_norm_params": {"eps": config.rms_norm_eps}}


HOSTS = (
    Host(
        model_type="qwen3",
        heads=decoder_heads("Qwen3"),
        modules=LLAMA_MODULES | QK_NORM_MODULES,
        without_effect=frozenset({"max_window_layers"}),
        reads=WINDOW_KEYS,
        read=read,
        write=write_windows,
    ),
)
