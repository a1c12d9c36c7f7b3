"""From what a user names (files, presets, a finished run, settings on the command line) to one recipe."""

import difflib
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from .reading import (
    BadRecipe,
    Document,
    Key,
    Place,
    dotted,
    leaves,
    merged_documents,
    read_file,
    read_text,
    read_value,
    without_nulls,
    written,
)

RESOLVED, WRITTEN = "recipe.resolved.yaml", "recipe.yaml"
MOST_LEVELS = 5
ENDINGS = (".yaml", ".yml", ".json")
# The output folder of runs that are built to look at them; nothing is ever written there.
NOWHERE = str(Path(tempfile.gettempdir()) / "frankenstein_hf-writes-nothing-here")


@dataclass
class Recipe:
    """A recipe: what was written, with all it builds on.

    Attributes:
        name: Short, for messages and folders.
        document: The values, and where each is written.
        text: What the user wrote, as YAML.
    """

    name: str
    document: Document
    text: str

    @property
    def values(self) -> dict[str, Any]:
        """The values, without the keys that were given back to their defaults."""
        return without_nulls(self.document.values)

    def with_settings(self, values: dict[str, Any], why: str) -> "Recipe":
        """This recipe with `values` on top; `why` is where messages say they come from."""
        over = Document(values, {key: Place(why) for key, _ in leaves(values)})
        return Recipe(self.name, merged_documents(self.document, over), self.text)


def load(what: str | Path, settings: Iterable[str] = (), folders: Sequence[Path] = ()) -> Recipe:
    """Read a recipe.

    Args:
        what: A file; presets, joined by "+"; the folder of a run; or "hub:owner/name".
        settings: "section.key=value", which win over all else.
        folders: Where presets are looked for first.

    Raises:
        BadRecipe: It cannot be read, or builds on something that is not there.
    """
    what = str(what)
    reader = _Reader(list(folders))
    if what.endswith(ENDINGS):
        name, document = Path(what).stem, reader.file(Path(what), ())
        text = document.text
    elif what.startswith("hub:") or (Path(what) / RESOLVED).is_file():
        name = Path(what.removeprefix("hub:")).name
        document = reader.parent(what, Path(), ())
        text = document.text
    else:
        name = what.replace("/", "-")
        document = reader.extended(Document({"extends": what.split("+")}), Path(), ())
        text = written({"extends": what.split("+")})
    given = [read_setting(setting) for setting in settings]
    for setting in given:
        document = merged_documents(document, setting)
    if given:
        text += "".join(f"# {setting}\n" for setting in map(_one_line, settings))
    return Recipe(name, document, text)


def read_setting(text: str) -> Document:
    """ "section.key=value" as a document; the value is read as in a file."""
    way, equals, value = text.partition("=")
    names = way.strip().split(".")
    if not equals or not all(names):
        raise BadRecipe([f"{text!a} is no setting; write section.key=value, such as training.max_steps=100."])
    found = read_value(value, f"{way}=")
    place = Place(f"command line, {way.strip()}")
    places: dict[Key, Place] = {tuple(names[:length]): place for length in range(1, len(names) + 1)}
    for name in reversed(names):
        found = {name: found}
    return Document(found, places)


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


# ---------------------------------------------------------------------- presets


def preset_folders(folders: Iterable[Path] = ()) -> list[Path]:
    """Where presets are, the user's own folders first."""
    return [*map(Path, folders), Path(str(resources.files(__package__) / "presets"))]


def presets(folders: Iterable[Path] = ()) -> dict[str, Path]:
    """The presets there are, by name."""
    found: dict[str, Path] = {}
    for folder in preset_folders(folders):
        for path in sorted(folder.rglob("*.yaml")):
            found.setdefault(path.relative_to(folder).with_suffix("").as_posix(), path)
    return dict(sorted(found.items()))


class _Reader:
    """Reads files and what they extend; `chain` is the way to where it is."""

    def __init__(self, folders: list[Path]) -> None:
        self.folders = folders

    def file(self, path: Path, chain: tuple[str, ...]) -> Document:
        return self.extended(read_file(path), path.parent, (*chain, str(path)))

    def extended(self, document: Document, folder: Path, chain: tuple[str, ...]) -> Document:
        """The document on top of what it extends."""
        values = dict(document.values)
        parents = values.pop("extends", None) or []
        reason = values.pop("unavailable", None)
        if reason is not None:
            raise BadRecipe([f"{' → '.join(chain)} is not available: {reason}"])
        if isinstance(parents, str):
            parents = [parents]
        if not isinstance(parents, list) or not all(isinstance(name, str) for name in parents):
            raise BadRecipe([f"{document.place(('extends',))}: extends must be a name or a list of names."])
        base = Document({})
        for name in parents:
            parent = self.parent(name, folder, chain, str(document.place(("extends",))))
            parent.values.pop("about", None)  # of that one
            base = merged_documents(base, parent)
        merged = merged_documents(base, Document(values, document.places, document.text))
        return Document(merged.values, merged.places, document.text)

    def parent(self, name: str, folder: Path, chain: tuple[str, ...], place: str = "") -> Document:
        """What is called `name`: a file beside the one that names it, a preset, a run, a repository of the Hub."""
        begin = f"{place}: " if place and place != "recipe" else ""
        if len(chain) > MOST_LEVELS:
            raise BadRecipe(
                [f"{begin}recipes extend each other {MOST_LEVELS} levels deep at most: {_way(chain, name)}."]
            )
        if name.startswith("hub:"):
            return self._of_hub(name, chain)
        if name.endswith(ENDINGS) or (folder / name / RESOLVED).is_file():
            path = folder / name if name.endswith(ENDINGS) else folder / name / RESOLVED
            if not path.is_file():
                raise BadRecipe([f"{begin}{path}: there is no such file ({_way(chain, name)})."])
            if str(path) in chain or any(Path(link).resolve() == path.resolve() for link in chain):
                raise BadRecipe([f"{begin}recipes extend each other in a circle: {_way(chain, str(path))}."])
            return self.file(path, chain)
        there = presets(self.folders)
        if name not in there:
            near = difflib.get_close_matches(name, there, 1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise BadRecipe(
                [f"{begin}there is no preset or file called {name!r}{hint} `frankenstein list presets` lists them."]
            )
        if str(there[name]) in chain:
            raise BadRecipe([f"{begin}recipes extend each other in a circle: {_way(chain, name)}."])
        return self.file(there[name], chain)

    def _of_hub(self, name: str, chain: tuple[str, ...]) -> Document:
        repo = name.removeprefix("hub:")
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
            raise BadRecipe([f"{name!r} must be hub:owner/name."])
        from huggingface_hub import hf_hub_download

        try:
            path = Path(hf_hub_download(repo, RESOLVED))
        except Exception as error:  # whatever the network does
            raise BadRecipe([f"Cannot read {RESOLVED} of {repo}: {' '.join(str(error).split())}"]) from error
        return self.extended(read_text(path.read_text(encoding="utf-8"), name), path.parent, (*chain, name))


def _way(chain: tuple[str, ...], name: str) -> str:
    return " → ".join((*chain, name))


__all__ = ["RESOLVED", "WRITTEN", "Recipe", "dotted", "load", "preset_folders", "presets", "read_setting"]
