"""Any sequence mixer in a Hugging Face model, chosen per layer by name.

Importing the package registers the model family with transformers' Auto classes and the optimizers with its `Trainer`.
"""

from .adapters import connect_peft
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
from .modeling.modeling_frankenstein_heads import (
    FrankensteinForMultipleChoice,
    FrankensteinForQuestionAnswering,
    FrankensteinForSequenceClassification,
    FrankensteinForTokenClassification,
)
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
from .optim.trainer import register_with_trainer

register()
connect()
register_attention_implementations()
register_with_trainer()
connect_peft()

__all__ = [
    "FrankensteinConfig",
    "FrankensteinForCausalLM",
    "FrankensteinForMaskedLM",
    "FrankensteinForMultipleChoice",
    "FrankensteinForQuestionAnswering",
    "FrankensteinForSequenceClassification",
    "FrankensteinForTokenClassification",
    "FrankensteinModel",
    "FrankensteinPreTrainedModel",
    "__version__",
    "create_optimizer",
    "describe_groups",
    "list_mixers",
    "list_optimizers",
    "list_stabilizers",
    "mixer_spec",
    "optimizer_spec",
    "register_mixer",
    "stabilizer_spec",
    "trainer_callbacks",
    "trainer_optimizer",
]
