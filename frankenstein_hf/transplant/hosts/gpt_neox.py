"""`gpt_neox`: mixer and feed-forward block side by side, one projection for the heads' queries, keys and values."""

from typing import Any

from ...configuration.configuration_frankenstein import FrankensteinConfig
from ..host import Fused, Host, decoder_heads

MODULES: dict[str, str | Fused] = {
    "embed_in": "embed_tokens",
    "final_layer_norm": "norm",
    "layers.*.input_layernorm": "layers.*.input_layernorm",
    "layers.*.post_attention_layernorm": "layers.*.post_mixer_layernorm",
    "layers.*.attention.query_key_value": Fused(tuple(f"layers.*.mixer.{x}_proj" for x in "qkv"), by_heads=True),
    "layers.*.attention.dense": "layers.*.mixer.o_proj",
    "layers.*.mlp.dense_h_to_4h": "layers.*.mlp.up_proj",
    "layers.*.mlp.dense_4h_to_h": "layers.*.mlp.down_proj",
}


def read(config: Any) -> dict[str, Any]:
    """Every layer attends to everything before it."""
    residual = "parallel" if config.use_parallel_residual else "standard"
    return {"layer_pattern": ["standard"], "residual": residual}


def write(config: FrankensteinConfig) -> dict[str, Any]:
    """Other residual schemes read back as one of these two, which shows."""
    return {"use_parallel_residual": config.residual == "parallel"}


HOSTS = (
    Host(
        model_type="gpt_neox",
        heads=decoder_heads("GPTNeoX", "CausalLM"),
        modules=MODULES,
        head_modules={"lm_head": "lm_head", "embed_out": "lm_head"},  # by its name in files
        keys={"layer_norm_eps": "rms_norm_eps"},
        always={"hidden_dropout": (0.0, 0)},  # the embeddings would have it too
        without_effect=frozenset({"classifier_dropout", "is_decoder"}),
        reads=frozenset({"use_parallel_residual"}),
        partial_rotary=True,
        fixed={"norm": "layer_norm", "feed_forward": "plain", "mlp_bias": True},
        read=read,
        write=write,
    ),
)
