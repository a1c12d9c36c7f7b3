"""How models are computed."""

# Every model imports it in any case; if from within one of our own modules, that one would be registered unfinished.
import transformers.models.auto.modeling_auto  # noqa: F401
