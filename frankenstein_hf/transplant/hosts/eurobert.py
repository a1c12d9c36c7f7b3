"""`eurobert`: a Llama that looks both ways."""

from ..host import LLAMA_MODULES, Host
from .llama import read

HOSTS = (
    Host(
        model_type="eurobert",
        heads={
            "EuroBertModel": "FrankensteinModel",
            "EuroBertForMaskedLM": "FrankensteinForMaskedLM",
            "EuroBertForTokenClassification": "FrankensteinForTokenClassification",
        },
        modules=LLAMA_MODULES,
        head_modules={"lm_head": "lm_head", "classifier": "classifier"},
        keys={"mask_token_id": "mask_token_id"},
        always={"mlp_bias": (False,)},  # it would be the head's bias too
        without_effect=frozenset({"classifier_pooling"}),  # of a head with a layer more than ours
        causal=False,
        zeros=(),
        read=read,
        write=lambda config: {},
    ),
)
