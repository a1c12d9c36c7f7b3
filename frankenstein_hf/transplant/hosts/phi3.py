"""`phi3`: one projection for queries, keys and values, one for gate and up; heads of which a part is rotated."""

from typing import Any

from ..host import LLAMA_MODULES, Fused, Host, Obstacle, decoder_heads
from .mistral import read as read_windows
from .mistral import write

MODULES: dict[str, str | Fused] = {key: value for key, value in LLAMA_MODULES.items() if "_proj" not in key}
MODULES |= {
    "layers.*.self_attn.qkv_proj": Fused(tuple(f"layers.*.mixer.{x}_proj" for x in "qkv")),
    "layers.*.self_attn.o_proj": "layers.*.mixer.o_proj",
    "layers.*.mlp.gate_up_proj": Fused(("layers.*.mlp.gate_proj", "layers.*.mlp.up_proj")),
    "layers.*.mlp.down_proj": "layers.*.mlp.down_proj",
}


def read(config: Any) -> dict[str, Any]:
    """Beyond a length `generate` of the host begins anew with other angles, which a cache of ours does not."""
    if config.rope_parameters["rope_type"] == "longrope":
        raise Obstacle("rope_parameters", "this family drops its cache where the factors change from short to long")
    return read_windows(config)


HOSTS = (
    Host(
        model_type="phi3",
        heads=decoder_heads("Phi3"),
        modules=MODULES,
        keys={"head_dim": "head_dim", "resid_pdrop": "hidden_dropout"},
        always={"embd_pdrop": (0.0, 0)},
        without_effect=frozenset({"original_max_position_embeddings"}),  # of longrope
        reads=frozenset({"sliding_window"}),
        partial_rotary=True,
        read=read,
        write=write,
    ),
)
