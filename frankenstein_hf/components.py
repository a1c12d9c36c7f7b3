"""Looking components up, and adding one's own."""

import sys
from pathlib import Path

from .configuration.component import MixerSpec
from .configuration.registries import MIXERS
from .modeling.implementations import implementation, register_implementation
from .modeling.mixers.base import Mixer

# Files of registered mixers by module, as they were: one that is edited while a model trains must not replace its code.
SOURCES: dict[str, bytes] = {}


def list_mixers(family: str | None = None) -> list[str]:
    """Sorted names of the mixers a `layer_pattern` can use, of one family if given.

    Raises:
        ValueError: Unknown family; the message lists the known ones.
    """
    return MIXERS.names(family)


def mixer_spec(name: str) -> MixerSpec:
    """What the mixer called `name` is and can do.

    Raises:
        ValueError: Unknown name; the message gives the nearest one.
    """
    return MIXERS.get(name)


def register_mixer(spec: MixerSpec, cls: type[Mixer]) -> None:
    """Add a mixer from outside this package; afterwards `layer_pattern` accepts `spec.name`.

    `save_pretrained` takes the file that defines it along, if that is self-contained: class and spec stand in it at the
    top level, and it imports only the standard library, torch, transformers and public names of this package. Others
    are saved without code (`save_pretrained(..., save_code=False)`, or `model.save_code = False` for the saves of
    `Trainer`), and whoever loads them has to register the mixer first.

    Args:
        spec: Name, parameters and capabilities.
        cls: A subclass of `Mixer`, called as `cls(config, layer_idx)`.

    Raises:
        ValueError: The name is taken by another mixer.
        TypeError: `cls` is no `Mixer`.
    """
    if not (isinstance(cls, type) and issubclass(cls, Mixer)):
        raise TypeError(f"register_mixer needs a subclass of frankenstein_hf's Mixer, got {cls!r}.")
    if spec.name in MIXERS and implementation(MIXERS.get(spec.name)) is not cls:
        raise ValueError(f"A mixer named {spec.name!r} is registered already; choose another name.")
    MIXERS.register(spec)
    register_implementation(spec, cls)
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if file is not None and cls.__module__ not in SOURCES and Path(file).is_file():
        SOURCES[cls.__module__] = Path(file).read_bytes()
