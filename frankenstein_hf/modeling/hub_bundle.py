"""What saving adds to a checkpoint: the flat copy of the code that loads it anywhere, and the model card.

How the code is flattened and what a card looks like is the toolkit's business; it installs both here when the package
is imported. Where no toolkit is installed, this module runs from a bundle: its folder *is* the flat copy to pass on,
and a card already there is left alone.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_relative_import_files

from ..configuration.component import ComponentSpec

CONFIG_CLASS = "configuration_frankenstein.FrankensteinConfig"

# Which class each of transformers' Auto classes gives for a checkpoint; the one list of heads.
HEADS = {
    "AutoModel": "modeling_frankenstein.FrankensteinModel",
    "AutoModelForCausalLM": "modeling_frankenstein.FrankensteinForCausalLM",
    "AutoModelForMaskedLM": "modeling_frankenstein.FrankensteinForMaskedLM",
    "AutoModelForSequenceClassification": "modeling_frankenstein_heads.FrankensteinForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_frankenstein_heads.FrankensteinForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_frankenstein_heads.FrankensteinForQuestionAnswering",
    "AutoModelForMultipleChoice": "modeling_frankenstein_heads.FrankensteinForMultipleChoice",
}

# The last line of every generated file; tells ours from the user's when an older bundle is cleared away.
MARK = "# Part of a Frankenstein checkpoint, written over by save_pretrained. Generated from "

# The toolkit's two functions; see `install_toolkit`.
_toolkit: dict[str, Callable[..., Any]] = {}


def install_toolkit(
    sources: Callable[[Sequence[ComponentSpec]], Mapping[str, str]], render: Callable[..., None]
) -> None:
    """Let the toolkit generate bundles and render cards.

    Args:
        sources: Components a checkpoint uses -> its bundle, source text by file name.
        render: Does what `render_card` promises.
    """
    _toolkit.update(sources=sources, render=render)


def auto_map() -> dict[str, str]:
    """What `config.json` tells transformers' Auto classes: "module.Class" in the bundle, for every head."""
    return {"AutoConfig": CONFIG_CLASS, **HEADS}


def entry_modules() -> list[str]:
    """Names of the modules transformers loads a checkpoint through."""
    return list(dict.fromkeys(reference.partition(".")[0] for reference in auto_map().values()))


def write_bundle(directory: str | os.PathLike, config: Any) -> None:
    """Write the code that loads a checkpoint of this `config` without the package; clear away an older bundle.

    Args:
        directory: The checkpoint's folder, made if absent.
        config: A `FrankensteinConfig`.

    Raises:
        ValueError: A mixer from outside this package cannot travel, or a file of the bundle's names was written by
            somebody else. Nothing has been written then.
    """
    directory, sources = Path(directory), bundle_for(config)
    refuse_foreign(directory, sources)
    _write(directory, sources)


def bundle_for(config: Any) -> Mapping[str, str]:
    """Source text by file name of the code that loads a checkpoint of this `config`; errors as in `write_bundle`."""
    components = config.reached_components()
    if "sources" in _toolkit:
        return _toolkit["sources"](components)
    return _own_sources()


def _own_sources() -> dict[str, str]:
    """The bundle this module belongs to."""
    folder = Path(__file__).parent
    paths = [folder / f"{name}.py" for name in entry_modules()]
    paths += [Path(needed) for path in paths for needed in get_relative_import_files(path)]
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


def _write(directory: Path, sources: Mapping[str, str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = {name: directory / f".{name}.{os.getpid()}.tmp" for name in sources}
    try:
        for name, path in unfinished.items():
            path.write_text(sources[name], encoding="utf-8", newline="\n")
        for name, path in unfinished.items():
            path.replace(directory / name)
    finally:
        for path in unfinished.values():
            path.unlink(missing_ok=True)
    for name in bundle_files(directory):
        if name not in sources:
            (directory / name).unlink()


def bundle_files(directory: str | os.PathLike) -> list[str]:
    """Names of the files in `directory` that `write_bundle` wrote, recognised by their name and last line."""
    return [
        path.name
        for path in sorted(Path(directory).glob("*.py"))
        if re.match("(configuration|modeling)_", path.name) and _is_generated(path)
    ]


def _is_generated(path: Path) -> bool:
    return path.is_file() and path.read_bytes().rstrip().rpartition(b"\n")[2].startswith(MARK.encode())


def refuse_foreign(directory: str | os.PathLike, names: Iterable[str]) -> None:
    """Raise `ValueError` if a file in `directory` with one of these `names` was not written by `write_bundle`."""
    paths = [Path(directory) / name for name in sorted(names)]
    if foreign := [path.name for path in paths if os.path.lexists(path) and not _is_generated(path)]:
        raise ValueError(
            f"{directory} has files that this package did not write and that saving would replace: "
            f"{', '.join(foreign)}. Move or rename them, save to another folder, or save without the code: "
            "save_pretrained(…, save_code=False) (under Trainer: set model.save_code = False)."
        )


def changed_since(timestamps: Mapping[str, float], directory: str | os.PathLike, config: Any) -> dict[str, float]:
    """`timestamps` without the bundle's files, so that transformers uploads them.

    It uploads what is newer than the timestamps it took when saving began; the code was written just before.
    """
    code = bundle_files(directory) if getattr(config, "auto_map", None) else []
    return {name: time for name, time in timestamps.items() if name not in code}


def read_card(directory: str | os.PathLike) -> str | None:
    """README.md in `directory` as it is, line ends and undecodable bytes included; None when there is none."""
    path = Path(directory) / "README.md"
    return path.read_bytes().decode("utf-8", "surrogateescape") if path.is_file() else None


def render_card(
    model: Any, directory: str | os.PathLike, repo_id: str | None = None, before: str | None = None
) -> None:
    """Write or refresh README.md in `directory`, unless someone wrote it by hand; without the toolkit, do nothing.

    Args:
        model: The model the card is about.
        directory: The checkpoint's folder.
        repo_id: Name on the Hub, if known, for the examples.
        before: The text that stood there before transformers wrote a card of its own; comes back if written by hand.
    """
    if "render" in _toolkit:
        _toolkit["render"](model, directory, repo_id, before)
