"""Feed-forward blocks: `forward(hidden_states […, D], context) -> ([…, D], LayerExtras | None)`."""

from typing import Any

from torch import Tensor, nn
from transformers import initialization as init

from .activations import SELU, make_activation
from .extras import LayerExtras


class PlainFeedForward(nn.Module):
    """down(act(up(x))).

    Args:
        config: A `FrankensteinConfig`.
        layer_idx: The layer, which `per_layer_config` may give sizes and an activation of its own.
    """

    pieces = 1  # how many outputs of up_proj make one channel

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        layer = config.per_layer_config[layer_idx]
        F = layer.intermediate_size
        self.up_proj = nn.Linear(layer.hidden_size, self.pieces * F, bias=layer.mlp_bias)
        self.down_proj = nn.Linear(F, layer.hidden_size, bias=layer.mlp_bias)
        self.act_fn = make_activation(config, layer_idx, F)
        keeps_moments = isinstance(self.act_fn, SELU)
        self.dropout = (nn.AlphaDropout if keeps_moments else nn.Dropout)(config.activation_dropout)
        self.first_std = layer.hidden_size**-0.5 if keeps_moments else None

    def init_parameters(self) -> None:
        """selu keeps mean 0 and variance 1 only from weights of variance 1/fan-in."""
        if self.first_std is not None:
            init.normal_(self.up_proj.weight, std=self.first_std)

    def inner(self, hidden_states: Tensor) -> Tensor:
        """[…, D] -> […, F], what the down projection reads."""
        return self.act_fn(self.up_proj(hidden_states))

    def forward(self, hidden_states: Tensor, context: Any = None) -> tuple[Tensor, LayerExtras | None]:
        """See the module's first line."""
        return self.down_proj(self.dropout(self.inner(hidden_states))), None


class GatedFeedForward(PlainFeedForward):
    """down(act(gate(x)) · up(x))."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        layer = config.per_layer_config[layer_idx]
        self.gate_proj = nn.Linear(layer.hidden_size, layer.intermediate_size, bias=layer.mlp_bias)

    def inner(self, hidden_states: Tensor) -> Tensor:
        return self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states)


class MaxoutFeedForward(PlainFeedForward):
    """down(act(max over pieces of up(x))); with `hidden_act="maxout"` the activation is the identity."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        self.__dict__["pieces"] = config.component("feed_forward", layer_idx).params.pieces
        super().__init__(config, layer_idx)

    def inner(self, hidden_states: Tensor) -> Tensor:
        return self.act_fn(self.up_proj(hidden_states).unflatten(-1, (self.pieces, -1)).amax(-2))
