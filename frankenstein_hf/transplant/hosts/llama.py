"""`llama`: the shape most decoders have."""

from typing import Any

from ..host import LLAMA_MODULES, Host, decoder_heads


def read(config: Any) -> dict[str, Any]:
    """Every layer attends to everything before it."""
    return {"layer_pattern": ["standard"]}


HOSTS = (
    Host(
        model_type="llama",
        heads=decoder_heads("Llama"),
        modules=LLAMA_MODULES,
        read=read,
        write=lambda config: {},
    ),
)
