"""Registration with transformers' Auto classes and the tables `pipeline()` consults; runs on import of the package."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.models.auto import modeling_auto

from .configuration.configuration_frankenstein import FrankensteinConfig
from .modeling.modeling_frankenstein import FrankensteinForCausalLM, FrankensteinForMaskedLM, FrankensteinModel

AUTO_CLASSES = (
    (AutoModel, FrankensteinModel, modeling_auto.MODEL_MAPPING_NAMES),
    (AutoModelForCausalLM, FrankensteinForCausalLM, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    (AutoModelForMaskedLM, FrankensteinForMaskedLM, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
)


def register() -> None:
    """Make `AutoModelFor….from_pretrained` and `pipeline()` know the family; safe to repeat."""
    AutoConfig.register(FrankensteinConfig.model_type, FrankensteinConfig, exist_ok=True)
    for auto_class, model_class, names in AUTO_CLASSES:
        auto_class.register(FrankensteinConfig, model_class, exist_ok=True)
        names[FrankensteinConfig.model_type] = model_class.__name__
