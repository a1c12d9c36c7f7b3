"""The registries of components, one per kind."""

from .component import MixerSpec, Registry
from .discovered import mixer_specs
from .feed_forward import FEED_FORWARD_SPECS
from .norms import NORM_SPECS

MIXERS: Registry[MixerSpec] = Registry("mixer", mixer_specs)
NORMS = Registry("norm", lambda: NORM_SPECS)
FEED_FORWARDS = Registry("feed-forward", lambda: FEED_FORWARD_SPECS)
