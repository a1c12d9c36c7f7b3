"""Spec of `xsa`: attention without the part of its output that repeats the token's own value."""

from ...component import ATTENTION_PROJECTIONS, MixerSpec
from .standard import kv_floats

SPECS = (
    MixerSpec(
        name="xsa",
        family="dense",
        summary="Softmax attention whose output is projected off the token's own value.",
        reference="Exclusive Self Attention, arXiv 2603.09078",
        implementation="mixers.dense.xsa:ExclusiveSelfAttention",
        transfer=ATTENTION_PROJECTIONS,
        qk_norm=True,
        cache=frozenset({"kv"}),
        token_size=kv_floats,
        parameter_free=lambda params: True,
        native_mask=True,
        logits=("q_proj", "k_proj"),
    ),
)
