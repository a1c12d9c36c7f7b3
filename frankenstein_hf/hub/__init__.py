"""The toolkit's part in saving: flattened code and model cards, installed into `modeling.hub_bundle` and `Trainer`."""

from ..modeling.hub_bundle import install_toolkit
from .bundle import bundle_sources
from .cards import render
from .trainer import after_import, keep_our_cards


def connect() -> None:
    """Make saving write bundles and cards; safe to repeat."""
    install_toolkit(bundle_sources, render)
    after_import("transformers.trainer", keep_our_cards)
