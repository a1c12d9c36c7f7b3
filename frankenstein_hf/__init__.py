"""Any sequence mixer in a Hugging Face model, chosen per layer by name.

Importing the package registers the model family with transformers' Auto classes.
"""

from .attention_interface import register_attention_implementations
from .auto import register
from .components import list_mixers, mixer_spec, register_mixer
from .configuration.configuration_frankenstein import FRANKENSTEIN_VERSION as __version__
from .configuration.configuration_frankenstein import FrankensteinConfig
from .hub import connect
from .modeling.modeling_frankenstein import (
    FrankensteinForCausalLM,
    FrankensteinForMaskedLM,
    FrankensteinModel,
    FrankensteinPreTrainedModel,
)

register()
connect()
register_attention_implementations()

__all__ = [
    "FrankensteinConfig",
    "FrankensteinForCausalLM",
    "FrankensteinForMaskedLM",
    "FrankensteinModel",
    "FrankensteinPreTrainedModel",
    "__version__",
    "list_mixers",
    "mixer_spec",
    "register_mixer",
]
