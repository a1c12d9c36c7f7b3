"""One layer: norm, mixer, residual, norm, feed-forward, residual."""

from typing import Any

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..configuration.registries import FEED_FORWARDS, NORMS
from .context import SequenceContext
from .implementations import implementation
from .mixers.base import MixerExtras


class FrankensteinLayer(GradientCheckpointingLayer):
    """A pre-norm layer around the mixer that `config.layer_pattern` names for it."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        spec, norm = config.mixer_spec_for(layer_idx), implementation(NORMS.get(config.norm))
        layer_config = config.per_layer_config[layer_idx]
        self.takes_residual = spec.takes_residual
        self.input_layernorm = norm(config.hidden_size, config.rms_norm_eps)
        self.mixer = implementation(spec)(config, layer_idx)
        self.post_mixer_layernorm = norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = implementation(FEED_FORWARDS.get(config.feed_forward))(layer_config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self, hidden_states: Tensor, context: SequenceContext, cache: Any = None
    ) -> tuple[Tensor, MixerExtras | None]:
        """[B, T, D] -> [B, T, D] and what the mixer returned beside its output."""
        if self.takes_residual:
            mixed, extras = self.mixer(hidden_states, context, cache, norm=self.input_layernorm)
        else:
            mixed, extras = self.mixer(self.input_layernorm(hidden_states), context, cache)
        hidden_states = hidden_states + self.dropout(mixed)
        return hidden_states + self.dropout(self.mlp(self.post_mixer_layernorm(hidden_states))), extras
