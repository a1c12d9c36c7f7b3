"""The code that travels with a checkpoint: a flat copy of this package's modules that transformers can load."""

import os
from typing import Any


def auto_map() -> dict[str, str]:
    return {}


def write_bundle(directory: str | os.PathLike, config: Any) -> None:
    pass


def render_card(model: Any, directory: str | os.PathLike) -> None:
    pass
