"""One layer: read, norm, mixer, write; read, norm, feed-forward, write."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..configuration.norms import NORM_PLACEMENTS
from .context import SequenceContext
from .extras import LayerExtras
from .implementations import component_class
from .norms import make_norm
from .residuals import Stream


class FrankensteinLayer(GradientCheckpointingLayer):
    """The mixer that `config.layer_pattern` names for this layer and a feed-forward block, joined to the stream."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        connection = component_class(config, "residual").connection
        before, behind = NORM_PLACEMENTS[config.norm_placement]
        self.mixer_connection = connection(config, layer_idx, "mixer")
        self.input_layernorm = make_norm(config) if before else nn.Identity()
        self.mixer = component_class(config, "mixer", layer_idx)(config, layer_idx)
        self.mixer_output_layernorm = make_norm(config) if behind else nn.Identity()
        self.mlp_connection = connection(config, layer_idx, "mlp")
        self.post_mixer_layernorm = make_norm(config) if before else nn.Identity()
        self.mlp = component_class(config, "feed_forward", layer_idx)(config, layer_idx)
        self.mlp_output_layernorm = make_norm(config) if behind else nn.Identity()
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.mixer.join(self)

    def forward(
        self,
        stream: Stream,
        context: SequenceContext,
        cache: Any = None,
        loop: int = 0,
        carried: Mapping[str, Tensor] | None = None,
    ) -> tuple[Stream, LayerExtras]:
        """The stream after this layer, and what the layer returns beside it.

        `loop` counts rounds of looped depth; `carried` is what layers below have left for those above.
        """
        given = {name: x for name, x in (carried or {}).items() if name in self.mixer.takes}
        x, carry = self.mixer_connection.read(stream, loop)
        change, mixed = self.mixer(self.mixer.input_norm(x), context, cache, **given)
        change = self.dropout(self.mixer_output_layernorm(change))
        stream = self.mixer_connection.write(stream, carry, change, loop)
        x, carry = self.mlp_connection.read(stream, loop)
        change, fed = self.mlp(self.post_mixer_layernorm(x), context)
        change = self.dropout(self.mlp_output_layernorm(change))
        stream = self.mlp_connection.write(stream, carry, change, loop)
        return stream, LayerExtras.merged([mixed, fed])
