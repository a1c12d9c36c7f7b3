"""Specs of norms on queries and keys."""

from dataclasses import dataclass

from .component import ComponentSpec, Params, param


@dataclass(frozen=True, kw_only=True)
class QKNormParams(Params):
    """Parameters of the norms with learned gains."""

    eps: float = param(1e-6, "Added to the mean of squares.", minimum=0.0, maximum=1.0)
    over: str = param(
        "head",
        "Statistics and gains over a head (gains shared by the heads), or over all heads at once.",
        choices=("head", "all_heads"),
    )


@dataclass(frozen=True, kw_only=True)
class L2QKNormParams(Params):
    """Parameters of `l2_norm`."""

    eps: float = param(1e-6, "Added to the sum of squares.", minimum=0.0, maximum=1.0)
    scale: str = param(
        "sqrt_dim",
        "What the cosine is multiplied by: √W, a learned number a head, or 1/√W.",
        choices=("sqrt_dim", "learned", "inverse_sqrt_dim"),
    )


QK_NORM_SPECS = (
    ComponentSpec(
        name="none",
        family="qk_norm",
        summary="Queries and keys as they are projected.",
        reference="Attention Is All You Need, arXiv 1706.03762",
        implementation="qk_norms:NoQKNorm",
    ),
    ComponentSpec(
        name="rms_norm",
        family="qk_norm",
        summary="Scale queries and keys by their root mean square, before rotation; learned gain.",
        reference="Qwen3 Technical Report, arXiv 2505.09388; over all heads: 2 OLMo 2 Furious, arXiv 2501.00656",
        params=QKNormParams,
        implementation="qk_norms:RMSQKNorm",
        acts_on="qk_norm",
    ),
    ComponentSpec(
        name="layer_norm",
        family="qk_norm",
        summary="Layer normalisation of queries and keys, before rotation; learned gain and bias.",
        reference="Scaling Vision Transformers to 22 Billion Parameters, arXiv 2302.05442",
        params=QKNormParams,
        implementation="qk_norms:LayerQKNorm",
        acts_on="qk_norm",
    ),
    ComponentSpec(
        name="l2_norm",
        family="qk_norm",
        summary="Queries and keys of length one: logits are scaled cosines.",
        reference="Query-Key Normalization for Transformers, arXiv 2010.04245",
        params=L2QKNormParams,
        implementation="qk_norms:L2QKNorm",
        acts_on="qk_norm",
    ),
)
