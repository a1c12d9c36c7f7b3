"""Specs of normalisation layers."""

from .component import ComponentSpec

NORM_SPECS = (
    ComponentSpec(
        name="rms_norm",
        family="norm",
        summary="Scale by the root mean square; learned gain.",
        reference="Root Mean Square Layer Normalization, arXiv 1910.07467",
        implementation="norms:RMSNorm",
    ),
    ComponentSpec(
        name="layer_norm",
        family="norm",
        summary="Subtract the mean, scale by the standard deviation; learned gain and bias.",
        reference="Layer Normalization, arXiv 1607.06450",
        implementation="norms:LayerNorm",
    ),
)
