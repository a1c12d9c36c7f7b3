"""Specs of feed-forward blocks."""

from .component import ComponentSpec

FEED_FORWARD_SPECS = (
    ComponentSpec(
        name="gated",
        family="feed_forward",
        summary="down(act(gate(x)) · up(x)); SwiGLU with the default activation.",
        reference="GLU Variants Improve Transformer, arXiv 2002.05202",
        implementation="feed_forward:GatedFeedForward",
    ),
    ComponentSpec(
        name="plain",
        family="feed_forward",
        summary="down(act(up(x))).",
        reference="Attention Is All You Need, arXiv 1706.03762",
        implementation="feed_forward:PlainFeedForward",
    ),
)
