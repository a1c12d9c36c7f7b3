"""Spec of `gated_softmax`: softmax attention with a sigmoid gate on its output."""

from dataclasses import dataclass

from ...component import ATTENTION_PROJECTIONS, MixerSpec, Params, param
from ..dense.standard import kv_floats


@dataclass(frozen=True, kw_only=True)
class GatedSoftmaxParams(Params):
    """Parameters of `gated_softmax`."""

    gate: str = param("elementwise", "one gate a channel, or one a head", choices=("elementwise", "headwise"))


SPECS = (
    MixerSpec(
        name="gated_softmax",
        family="gated",
        summary="Softmax attention whose output is gated by a sigmoid of the token.",
        reference="Gated Attention for Large Language Models: Non-linearity, Sparsity, and Attention-Sink-Free, "
        "arXiv 2505.06708",
        params=GatedSoftmaxParams,
        implementation="mixers.gated.gated_softmax:GatedSoftmaxAttention",
        transfer=ATTENTION_PROJECTIONS,
        qk_norm=True,
        cache=frozenset({"kv"}),
        token_size=kv_floats,
        native_mask=True,
        logits=("q_proj", "k_proj"),
    ),
)
