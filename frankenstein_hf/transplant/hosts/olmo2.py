"""`olmo2` and `olmo3`: norms behind the blocks, and norms of queries and keys over all heads; the third has windows."""

from typing import Any

from ...configuration.configuration_frankenstein import FrankensteinConfig
from ..host import (
    LLAMA_MODULES,
    QK_NORM_MODULES,
    Fused,
    Host,
    Obstacle,
    decoder_heads,
    layer_types,
    slides_by_type,
    window_of,
    windows,
)

MODULES: dict[str, str | Fused] = LLAMA_MODULES | QK_NORM_MODULES
MODULES |= {
    "layers.*.post_attention_layernorm": "layers.*.mixer_output_layernorm",
    "layers.*.post_feedforward_layernorm": "layers.*.mlp_output_layernorm",
}
del MODULES["layers.*.input_layernorm"]
TYPES = ("full_attention", "sliding_attention")


def read(config: Any) -> dict[str, Any]:
    """The norms of queries and keys have the model's epsilon."""
    qk_norm = {"qk_norm": "rms_norm", "qk_norm_params": {"eps": config.rms_norm_eps, "over": "all_heads"}}
    return {"layer_pattern": ["standard"], "norm_placement": "post", **qk_norm}


def read_third(config: Any) -> dict[str, Any]:
    """As `read`, with the windows of layers; what is rotated must be one for all layers there are."""
    rotary = [config.rope_parameters[kind] for kind in TYPES if kind in config.layer_types]
    if any(other != rotary[0] for other in rotary):
        raise Obstacle("rope_parameters", "only one set of rotary parameters for all layers can be expressed")
    return read(config) | windows(config, slides_by_type(config)) | {"rope_parameters": rotary[0]}


def write_third(config: FrankensteinConfig) -> dict[str, Any]:
    """Windows, and the same rotation for layers of both types."""
    rotary = {kind: dict(config.rope_parameters or {}) for kind in TYPES}
    window = {} if window_of(config) is None else {"sliding_window": window_of(config)}
    return {"layer_types": layer_types(config), "rope_parameters": rotary, **window}


HOSTS = (
    Host(
        model_type="olmo2",
        heads=decoder_heads("Olmo2"),
        modules=MODULES,
        keys={"head_dim": "head_dim"},  # not declared, but looked for
        read=read,
        write=lambda config: {},
    ),
    Host(
        model_type="olmo3",
        heads=decoder_heads("Olmo3"),
        modules=MODULES,
        keys={"head_dim": "head_dim"},
        reads=frozenset({"sliding_window", "layer_types", "rope_parameters"}),
        read=read_third,
        write=write_third,
    ),
)
