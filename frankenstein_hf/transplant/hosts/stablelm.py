"""`stablelm`: layer norms, biases on queries, keys and values if asked for, heads of which a part is rotated."""

from typing import Any

from ...configuration.configuration_frankenstein import FrankensteinConfig
from ..host import LLAMA_MODULES, Host, decoder_heads


def read(config: Any) -> dict[str, Any]:
    """Every layer attends to everything before it."""
    return {"layer_pattern": ["standard"], "attention_bias": config.use_qkv_bias}


def write(config: FrankensteinConfig) -> dict[str, Any]:
    """Biases on queries, keys and values."""
    return {"use_qkv_bias": config.attention_bias}


HOSTS = (
    Host(
        model_type="stablelm",
        heads=decoder_heads("StableLm"),
        modules=LLAMA_MODULES,
        keys={"layer_norm_eps": "rms_norm_eps"},
        always={"use_parallel_residual": (False,), "qk_layernorm": (False,), "hidden_dropout": (0.0, 0)},
        reads=frozenset({"use_qkv_bias"}),
        partial_rotary=True,
        fixed={"norm": "layer_norm", "attention_output_bias": False},
        read=read,
        write=write,
    ),
)
