"""Feed-forward blocks."""

from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN


class PlainFeedForward(nn.Module):
    """down(act(up(x)))."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[…, D] -> […, D]."""
        return self.down_proj(self.act_fn(self.up_proj(hidden_states)))


class GatedFeedForward(PlainFeedForward):
    """down(act(gate(x)) · up(x))."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[…, D] -> […, D]."""
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))
