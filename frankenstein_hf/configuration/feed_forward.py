"""Specs of feed-forward blocks."""

from dataclasses import dataclass

from .component import ComponentSpec, Params, param


@dataclass(frozen=True, kw_only=True)
class MaxoutParams(Params):
    """Parameters of `maxout`."""

    pieces: int = param(2, "Linear pieces of which each channel takes the largest.", minimum=1)


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
    ComponentSpec(
        name="maxout",
        family="feed_forward",
        summary="down(max over pieces of up(x)): the maximum of several linear maps is the activation.",
        reference="Maxout Networks, arXiv 1302.4389",
        params=MaxoutParams,
        implementation="feed_forward:MaxoutFeedForward",
    ),
)
