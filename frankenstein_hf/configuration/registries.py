"""The registries of components, one per kind, and the fields of a configuration that choose from them."""

from collections.abc import Collection
from dataclasses import dataclass

from transformers.activations import ACT2FN

from .activations import ACTIVATION_SPECS
from .component import MixerSpec, Registry, backend_names
from .discovered import mixer_specs
from .feed_forward import FEED_FORWARD_SPECS
from .norms import NORM_SPECS
from .qk_norms import QK_NORM_SPECS
from .residuals import RESIDUAL_SPECS

MIXERS: Registry[MixerSpec] = Registry("mixer", mixer_specs, reserved=backend_names)
NORMS = Registry("norm", lambda: NORM_SPECS)
QK_NORMS = Registry("norm of queries and keys", lambda: QK_NORM_SPECS)
ACTIVATIONS = Registry("activation", lambda: ACTIVATION_SPECS)
FEED_FORWARDS = Registry("feed-forward", lambda: FEED_FORWARD_SPECS)
RESIDUALS = Registry("residual scheme", lambda: RESIDUAL_SPECS)


@dataclass(frozen=True)
class Kind:
    """How a configuration chooses a component of one kind.

    Attributes:
        registry: What there is to choose from.
        field: The field that names it.
        params_field: The field with its parameters.
        per_layer: Whether `per_layer_config` may choose another one for a layer.
        fallback: Further names, of things from elsewhere that have no spec and no parameters.
    """

    registry: Registry
    field: str
    params_field: str
    per_layer: bool = False
    fallback: Collection[str] = ()


# Every kind but mixers, which a pattern names layer by layer.
KINDS: dict[str, Kind] = {
    "norm": Kind(NORMS, "norm", "norm_params"),
    "qk_norm": Kind(QK_NORMS, "qk_norm", "qk_norm_params", per_layer=True),
    "activation": Kind(ACTIVATIONS, "hidden_act", "activation_params", per_layer=True, fallback=ACT2FN),
    "feed_forward": Kind(FEED_FORWARDS, "feed_forward", "feed_forward_params", per_layer=True),
    "residual": Kind(RESIDUALS, "residual", "residual_params"),
}
