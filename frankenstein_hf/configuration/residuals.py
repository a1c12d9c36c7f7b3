"""Specs of residual schemes: how layers are joined in depth."""

from .component import ComponentSpec

RESIDUAL_SPECS = (
    ComponentSpec(
        name="standard",
        family="residual",
        summary="x + F(norm(x)).",
        reference="Deep Residual Learning for Image Recognition, arXiv 1512.03385",
        implementation="residuals:ResidualStream",
    ),
    ComponentSpec(
        name="none",
        family="residual",
        summary="F(norm(x)): no skips, to see what they are worth.",
        reference="Attention Is Not All You Need, arXiv 2103.03404",
        implementation="residuals:NoResidual",
    ),
)
