"""Registration with transformers' Auto classes and the tables `pipeline()` consults; runs on import of the package."""

from importlib import import_module

import transformers
from transformers import AutoConfig

from .configuration.configuration_frankenstein import FrankensteinConfig
from .modeling.hub_bundle import HEADS


def head_class(reference: str) -> type:
    """The installed class behind an entry of `HEADS`, "module.Class"."""
    module, _, name = reference.partition(".")
    return getattr(import_module(f".modeling.{module}", __package__), name)


def register() -> None:
    """Make `AutoModelFor….from_pretrained` and `pipeline()` know the family; safe to repeat."""
    AutoConfig.register(FrankensteinConfig.model_type, FrankensteinConfig, exist_ok=True)
    for auto_name, reference in HEADS.items():
        auto_class = getattr(transformers, auto_name)
        model_class = head_class(reference)
        auto_class.register(FrankensteinConfig, model_class, exist_ok=True)
        # the MODEL_FOR_…_MAPPING_NAMES of transformers.models.auto.modeling_auto
        names = auto_class._model_mapping._model_mapping
        names[FrankensteinConfig.model_type] = model_class.__name__
