"""Any sequence mixer in a Hugging Face model, chosen per layer by name.

Importing the package registers the model family with transformers' Auto classes and the optimizers with its `Trainer`,
as soon as these are imported. What it offers is imported when it is first used, torch and transformers included.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .auto import register

if TYPE_CHECKING:
    from .attention_interface import attention_implementation
    from .cache_sizes import cache_report
    from .calibration import calibrate_fasa
    from .components import list_mixers, mixer_spec, register_mixer
    from .configuration.component import MixerSpec, Params, param
    from .configuration.configuration_frankenstein import FrankensteinConfig
    from .configuration.stack import FRANKENSTEIN_VERSION as __version__
    from .export import DecodingStep, cache_tensors, decoding_cache, export_decoding_step, export_onnx, onnx_session
    from .hub.load_mixers import load_mixers
    from .mechanisms import list_mechanisms, mechanism_config
    from .modeling.census import parameter_census
    from .modeling.context import SequenceContext
    from .modeling.extras import LayerExtras
    from .modeling.mixers.base import Mixer, RecurrentMixer, RowMixer
    from .modeling.modeling_frankenstein import FrankensteinForCausalLM, FrankensteinForMaskedLM, FrankensteinModel
    from .modeling.modeling_frankenstein_heads import (
        FrankensteinForMultipleChoice,
        FrankensteinForQuestionAnswering,
        FrankensteinForSequenceClassification,
        FrankensteinForTokenClassification,
    )
    from .modeling.pretrained import FrankensteinPreTrainedModel
    from .optim import (
        create_optimizer,
        describe_groups,
        list_optimizers,
        list_stabilizers,
        optimizer_spec,
        stabilizer_spec,
        trainer_callbacks,
        trainer_optimizer,
    )
    from .transplant.exporting import to_transformers
    from .transplant.importing import from_transformers
    from .transplant.report import transfer_report

# Where each public name is defined.
_MODULES = {
    "attention_interface": ("attention_implementation",),
    "calibration": ("calibrate_fasa",),
    "cache_sizes": ("cache_report",),
    "components": ("list_mixers", "mixer_spec", "register_mixer"),
    "configuration.component": ("MixerSpec", "Params", "param"),
    "configuration.configuration_frankenstein": ("FrankensteinConfig",),
    "export": (
        "DecodingStep",
        "cache_tensors",
        "decoding_cache",
        "export_decoding_step",
        "export_onnx",
        "onnx_session",
    ),
    "hub.load_mixers": ("load_mixers",),
    "mechanisms": ("list_mechanisms", "mechanism_config"),
    "modeling.census": ("parameter_census",),
    "modeling.context": ("SequenceContext",),
    "modeling.extras": ("LayerExtras",),
    "modeling.mixers.base": ("Mixer", "RecurrentMixer", "RowMixer"),
    "modeling.modeling_frankenstein": (
        "FrankensteinForCausalLM",
        "FrankensteinForMaskedLM",
        "FrankensteinModel",
    ),
    "modeling.modeling_frankenstein_heads": (
        "FrankensteinForMultipleChoice",
        "FrankensteinForQuestionAnswering",
        "FrankensteinForSequenceClassification",
        "FrankensteinForTokenClassification",
    ),
    "modeling.pretrained": ("FrankensteinPreTrainedModel",),
    "optim": (
        "create_optimizer",
        "describe_groups",
        "list_optimizers",
        "list_stabilizers",
        "optimizer_spec",
        "stabilizer_spec",
        "trainer_callbacks",
        "trainer_optimizer",
    ),
    "transplant.exporting": ("to_transformers",),
    "transplant.importing": ("from_transformers",),
    "transplant.report": ("transfer_report",),
}
_PACKAGES = ("diagnostics",)  # offered as they are
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "DecodingStep",
    "FrankensteinConfig",
    "FrankensteinForCausalLM",
    "FrankensteinForMaskedLM",
    "FrankensteinForMultipleChoice",
    "FrankensteinForQuestionAnswering",
    "FrankensteinForSequenceClassification",
    "FrankensteinForTokenClassification",
    "FrankensteinModel",
    "FrankensteinPreTrainedModel",
    "LayerExtras",
    "Mixer",
    "MixerSpec",
    "Params",
    "RecurrentMixer",
    "RowMixer",
    "SequenceContext",
    "__version__",
    "attention_implementation",
    "cache_report",
    "cache_tensors",
    "calibrate_fasa",
    "create_optimizer",
    "decoding_cache",
    "describe_groups",
    "export_decoding_step",
    "export_onnx",
    "from_transformers",
    "list_mechanisms",
    "list_mixers",
    "list_optimizers",
    "list_stabilizers",
    "load_mixers",
    "mechanism_config",
    "mixer_spec",
    "onnx_session",
    "optimizer_spec",
    "param",
    "parameter_census",
    "register_mixer",
    "stabilizer_spec",
    "to_transformers",
    "trainer_callbacks",
    "trainer_optimizer",
    "transfer_report",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module(".configuration.stack", __name__).FRANKENSTEIN_VERSION
    if name in _PACKAGES:
        return import_module(f".{name}", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_HOME[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register()
