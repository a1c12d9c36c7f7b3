"""`granite`: a Llama with factors on embeddings, on attention scores, on what is added, and on logits."""

from typing import Any

from ...configuration.configuration_frankenstein import FrankensteinConfig
from ..host import LLAMA_MODULES, Host, decoder_heads


def read(config: Any) -> dict[str, Any]:
    """The factor on what is added belongs to the residual scheme."""
    params = {} if config.residual_multiplier == 1.0 else {"multiplier": config.residual_multiplier}
    return {"layer_pattern": ["standard"], "residual_params": params}


def write(config: FrankensteinConfig) -> dict[str, Any]:
    """Scores without a factor are those of a factor of 1/√W."""
    scale = config.attention_scale
    return {
        "residual_multiplier": (config.residual_params or {}).get("multiplier", 1.0),
        "attention_multiplier": config.head_dim**-0.5 if scale is None and config.head_dim else scale,
    }


HOSTS = (
    Host(
        model_type="granite",
        heads=decoder_heads("Granite", "CausalLM"),
        modules=LLAMA_MODULES,
        keys={
            "head_dim": "head_dim",  # not declared, but looked for
            "embedding_multiplier": "embedding_scale",
            "logits_scaling": "logits_scaling",
            "attention_multiplier": "attention_scale",
        },
        reads=frozenset({"residual_multiplier"}),
        read=read,
        write=write,
    ),
)
