"""Reading a recipe strictly: what YAML guesses is refused or read as written, and every value knows where it stands."""

import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..hub.foreign import one_line
from ..training.failures import BadInput

LARGEST_FILE, DEEPEST, MOST_ALIASED = 1 << 20, 32, 1000

Key = tuple[Hashable, ...]  # the way to a value: ("model", "layer_pattern", 0)


class Place(NamedTuple):
    """Where something is written; line and column count from 1, and are 0 where there are none."""

    file: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


class BadRecipe(BadInput):
    """A recipe that cannot work; `problems` are all that was found, a line each."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = [one_line(problem) for problem in problems]
        super().__init__("\n".join(self.problems))


@dataclass
class Document:
    """The content of a file: a mapping, and the place of each of its values by the way there."""

    values: dict[str, Any]
    places: dict[Key, Place] = field(default_factory=dict)
    text: str = ""

    def place(self, key: Key) -> Place:
        """Where `key` is written, or what is nearest above it."""
        while key and key not in self.places:
            key = key[:-1]
        return self.places.get(key, Place("recipe"))


def dotted(key: Key) -> str:
    """ "model.layer_pattern[0]"."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in key)
    return "".join(parts).removeprefix(".")


# ---------------------------------------------------------------------- YAML


class _Loader(yaml.SafeLoader):
    """Scalars are what they look like to a reader: true, false, null, numbers; all else is text."""


_Loader.yaml_implicit_resolvers = {}
for tag, pattern, first in (
    ("null", r"~|null|", ["~", "n", ""]),
    ("bool", r"true|false", list("tf")),
    ("int", r"[-+]?\d+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.inf)|\.nan",
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"), first)


def read_text(text: str, name: str) -> Document:
    """The mapping in a YAML (or JSON) text.

    Args:
        text: The content.
        name: What messages call it.

    Raises:
        BadRecipe: It is no mapping, repeats a key, has tags, or is too long, too deep or blown up by aliases.
    """
    if len(text.encode("utf-8", "surrogatepass")) > LARGEST_FILE:
        raise BadRecipe([f"{name}: a recipe has at most {LARGEST_FILE >> 20} MB."])
    try:
        _check_depth(text, name)
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(name, mark.line + 1, mark.column + 1) if mark else Place(name)
        raise BadRecipe([f"{place}: this is no YAML: {error.problem or error.context}."]) from None
    except BadRecipe:
        raise
    except (yaml.YAMLError, ValueError) as error:
        raise BadRecipe([f"{name}: this is no YAML: {error}"]) from None
    if node is None:
        return Document({}, {(): Place(name, 1, 1)}, text)
    if not isinstance(node, yaml.MappingNode):
        raise BadRecipe([f"{_place(node, name)}: a recipe consists of sections, such as 'model:' and 'training:'."])
    reader = _Reader(name)
    values = reader.read(node, ())
    if reader.problems:
        raise BadRecipe(reader.problems)
    return Document(values, reader.places, text)


def read_file(path: Path) -> Document:
    """`read_text` of a file."""
    if not path.is_file():
        raise BadRecipe([f"{path}: there is no such file."])
    if path.stat().st_size > LARGEST_FILE:
        raise BadRecipe([f"{path}: a recipe has at most {LARGEST_FILE >> 20} MB."])
    try:
        return read_text(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise BadRecipe([f"{path}: this is no text in UTF-8: {error.reason} at byte {error.start}."]) from None


def read_value(text: str, name: str) -> Any:
    """A value as it stands behind a colon in a recipe."""
    return read_text(f"value: {text}" if "\n" not in text else f"value:\n  {text}", name).values.get("value")


def _check_depth(text: str, name: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            mark = event.start_mark
            place = Place(name, mark.line + 1, mark.column + 1)
            raise BadRecipe([f"{place}: nested more than {DEEPEST} deep."])


def _place(node: yaml.Node, name: str) -> Place:
    return Place(name, node.start_mark.line + 1, node.start_mark.column + 1)


class _Reader:
    """Turns nodes into values, noting where they stand and what is wrong."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.places: dict[Key, Place] = {}
        self.problems: list[str] = []
        self._known: set[int] = set()  # nodes that were read before: met again, they are aliases
        self._open: set[int] = set()
        self._aliased = 0

    def read(self, node: yaml.Node, key: Key, aliased: bool = False) -> Any:
        aliased = aliased or id(node) in self._known
        self._aliased += aliased
        if id(node) in self._open or self._aliased > MOST_ALIASED:
            self._say(node, "aliases make it endless, or longer than a recipe may be.")
            raise BadRecipe(self.problems)
        self.places[key] = _place(node, self.name)
        self._known.add(id(node))
        self._open.add(id(node))
        try:
            return self._content(node, key, aliased)
        finally:
            self._open.discard(id(node))

    def _content(self, node: yaml.Node, key: Key, aliased: bool) -> Any:
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            return [self.read(item, (*key, place), aliased) for place, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return self._mapping(node, key, aliased)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        self._say(node, f"the tag {node.tag!r} is not read: a recipe is data, nothing is made from it.")
        return None

    def _mapping(self, node: yaml.MappingNode, key: Key, aliased: bool) -> dict[Any, Any]:
        values: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            name = self._scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(name, (str, int)) or isinstance(name, bool):
                self._say(key_node, "a key must be a word or a whole number.")
                continue
            name = str(name)
            if name in values:
                self._say(key_node, f"{dotted((*key, name))} is given twice.")
            values[name] = self.read(value_node, (*key, name), aliased)
            self.places[(*key, name)] = _place(key_node, self.name)
        return values

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        kind, text = node.tag.removeprefix("tag:yaml.org,2002:"), node.value
        if kind == "null":
            return None
        if kind == "bool":
            return text == "true"
        try:
            if kind == "int":
                return int(text)
            if kind == "float":
                return float(text.replace(".inf", "inf").replace(".nan", "nan"))
        except ValueError:  # more digits than Python reads
            self._say(node, "this number is too long.")
            return None
        if kind != "str":
            self._say(node, f"the tag {node.tag!r} is not read: a recipe is data, nothing is made from it.")
        return text

    def _say(self, node: yaml.Node, words: str) -> None:
        self.problems.append(f"{_place(node, self.name)}: {words}")


# ---------------------------------------------------------------------- merging


class Replaced(dict):
    """A mapping that takes the place of what stood there, instead of being merged into it."""


def merged(base: Any, over: Any) -> Any:
    """`over` on top of `base`: mappings merge, all else is replaced; None stands for the default until the end.

    The law is associative: a None, or another value that is no mapping, between two mappings cuts them apart.
    """
    if not isinstance(over, Mapping) or isinstance(over, Replaced):
        return over
    if not isinstance(base, Mapping):
        return Replaced(over)
    result = {**base, **{key: merged(base[key], value) if key in base else value for key, value in over.items()}}
    return Replaced(result) if isinstance(base, Replaced) else result


def merged_documents(base: Document, over: Document) -> Document:
    """`merged`, with the places."""
    values = merged(base.values, over.values)
    return Document(values, {**base.places, **over.places}, over.text)


def without_nulls(values: Any) -> Any:
    """`values` without the keys whose value is None: those have their defaults."""
    if isinstance(values, Mapping):
        return {key: without_nulls(value) for key, value in values.items() if value is not None}
    return [without_nulls(value) for value in values] if isinstance(values, list) else values


# ---------------------------------------------------------------------- writing


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers
_Dumper.add_representer(
    float,
    lambda dumper, value: dumper.represent_scalar("tag:yaml.org,2002:float", _float(value)),
)


def _float(value: float) -> str:
    if not math.isfinite(value):
        return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}[str(value)]
    return repr(value)


def written(values: Mapping[str, Any]) -> str:
    """The YAML of `values`, which `read_text` reads back as they are."""
    plain = dict(values)
    return yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None)


def leaves(values: Any, key: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Every value that is no mapping, with the way there."""
    if isinstance(values, Mapping) and values:
        for name, value in values.items():
            yield from leaves(value, (*key, name))
    else:
        yield key, values
