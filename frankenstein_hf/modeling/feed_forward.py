"""Feed-forward blocks: `forward(hidden_states […, D], context) -> ([…, D], LayerExtras | None)`."""

from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN

from .extras import LayerExtras


class PlainFeedForward(nn.Module):
    """down(act(up(x))).

    Args:
        config: A `FrankensteinConfig`.
        layer_idx: The layer, which `per_layer_config` may give sizes and an activation of its own.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        layer = config.per_layer_config[layer_idx]
        self.up_proj = nn.Linear(layer.hidden_size, layer.intermediate_size, bias=layer.mlp_bias)
        self.down_proj = nn.Linear(layer.intermediate_size, layer.hidden_size, bias=layer.mlp_bias)
        self.act_fn = ACT2FN[layer.hidden_act]

    def inner(self, hidden_states: Tensor) -> Tensor:
        """[…, D] -> […, F], what the down projection reads."""
        return self.act_fn(self.up_proj(hidden_states))

    def forward(self, hidden_states: Tensor, context: Any = None) -> tuple[Tensor, LayerExtras | None]:
        """See the module's first line."""
        return self.down_proj(self.inner(hidden_states)), None


class GatedFeedForward(PlainFeedForward):
    """down(act(gate(x)) · up(x))."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        layer = config.per_layer_config[layer_idx]
        self.gate_proj = nn.Linear(layer.hidden_size, layer.intermediate_size, bias=layer.mlp_bias)

    def inner(self, hidden_states: Tensor) -> Tensor:
        return self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states)
