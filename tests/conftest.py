"""One thread per test process (they run side by side), offline, and repeatable; `--name` chooses one part's tests."""

import os
import re
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--name", help="Run only what looks at the mixer, optimizer or other part of this name.")


def pytest_configure(config: pytest.Config) -> None:
    if name := config.getoption("--name"):
        from frankenstein_hf.configuration.component import did_you_mean
        from frankenstein_hf.configuration.registries import KINDS, MIXERS
        from frankenstein_hf.optim.spec import OPTIMIZERS, STABILIZERS

        registries = [MIXERS, OPTIMIZERS, STABILIZERS, *(kind.registry for kind in KINDS.values())]
        if not any(name in registry for registry in registries):
            names = {name for registry in registries for name in registry.names()}
            raise pytest.UsageError(f"NAME={name!r} is no part" + did_you_mean(name, names))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if name := config.getoption("--name"):
        chosen = [item for item in items if looks_at(item, name)]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen


def looks_at(item: pytest.Item, name: str) -> bool:
    """Whether a test has the part called `name` among its parameters, or in its own or its file's name."""
    words = f"_{Path(item.path).stem}_{getattr(item, 'originalname', None) or item.name}_"
    if re.search(rf"_{name}_", words):
        return True
    return any(_names(value, name) for value in getattr(getattr(item, "callspec", None), "params", {}).values())


def _names(value: Any, name: str) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_names(element, name) for element in value)
    return (value if isinstance(value, str) else getattr(value, "name", None)) == name
