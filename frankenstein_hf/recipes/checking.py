"""The first pass over a recipe: names, types and ranges, compared with the schema that comes with the package.

It reads the part of JSON Schema that `schema.py` writes, and answers without torch. What it lets through is judged by
building the objects.
"""

import json
import math
from collections.abc import Hashable, Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

from ..configuration.values import did_you_mean, shown
from .reading import Document, Key, dotted

FILE = "frankenstein.schema.json"
MANY = 30  # names; longer lists are not written out in messages
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "boolean": (bool,), "integer": (int,),
    "number": (int, float),
}  # fmt: skip
_WORDS = {
    "object": "keys and values", "array": "a list", "string": "a word", "boolean": "true or false",
    "integer": "a whole number", "number": "a number",
}  # fmt: skip
_LIMITS = {
    "minimum": ("≥", lambda x, y: x >= y),
    "maximum": ("≤", lambda x, y: x <= y),
    "exclusiveMinimum": (">", lambda x, y: x > y),
    "exclusiveMaximum": ("<", lambda x, y: x < y),
}


@cache
def installed_schema() -> dict[str, Any]:
    """The schema that comes with the package, of its own parts."""
    return json.loads((resources.files(__package__) / FILE).read_text(encoding="utf-8"))


def problems(document: Document) -> list[str]:
    """Everything the schema finds wrong, a line each, with file, line and column.

    Plugins that the recipe names register their parts first, and the schema is made anew with these.

    Raises:
        BadInput: A plugin cannot be used.
    """
    schema, plugins = installed_schema(), document.values.get("plugins")
    if isinstance(plugins, list) and all(isinstance(name, str) for name in plugins) and plugins:
        from .plugins import load_plugins
        from .schema import schema as made

        load_plugins(plugins)
        schema = made()
    checker = _Checker(document, schema)
    return list(checker.check(document.values, checker.schema, ()))


class _Checker:
    def __init__(self, document: Document, schema: dict[str, Any]) -> None:
        self.document, self.schema = document, schema

    def check(self, value: Any, schema: Mapping[str, Any], key: Key) -> Iterator[str]:
        schema = self._resolved(schema)
        if value is None:  # the default
            return
        if "anyOf" in schema:
            options = [self._resolved(option) for option in schema["anyOf"]]
            found = [list(self.check(value, option, key)) for option in options]
            if all(found):
                near = [list_ for list_, option in zip(found, options) if _of_type(value, option)]
                yield from near[0] if near else [self._say(key, value, "must be " + " or ".join(map(words, options)))]
            return
        if not _of_type(value, schema):
            yield self._say(key, value, f"must be {words(schema)}")
        elif "enum" in schema or "const" in schema:
            choices = schema.get("enum", [schema.get("const")])
            if not any(type(choice) is type(value) and choice == value for choice in choices):
                tail = did_you_mean(value, map(str, choices))
                yield self._say(key, value, "is unknown" + (tail if len(choices) <= MANY else _near(tail)), end="")
        elif isinstance(value, dict):
            yield from self._mapping(value, schema, key)
        elif isinstance(value, list):
            yield from self._list(value, schema, key)
        elif not isinstance(value, (str, bool)) and not _inside(value, schema):
            yield self._say(key, value, f"must be {words(schema)}")

    def _resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        while "$ref" in schema:
            schema = self.schema["$defs"][schema["$ref"].rpartition("/")[2]]
        return schema

    def _list(self, value: list[Any], schema: Mapping[str, Any], key: Key) -> Iterator[str]:
        low, high = schema.get("minItems", 0), schema.get("maxItems", math.inf)
        if not low <= len(value) <= high:
            many = f"{low}" if low == high else f"at least {low}"
            yield self._say(key, value, f"must be a list of {many}")
        for place, item in enumerate(value):
            yield from self.check(item, schema.get("items", {}), (*key, place))

    def _mapping(self, value: dict[str, Any], schema: Mapping[str, Any], key: Key) -> Iterator[str]:
        own, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        cases = [case["then"] for case in schema.get("allOf", ()) if self._holds(case["if"], value)]
        allowed = set(own).union(*(case.get("properties", {}) for case in cases))
        for case in cases:
            if "propertyNames" in case:
                allowed &= set(case["propertyNames"]["enum"])
        for name, item in value.items():
            if name in allowed:
                found = list(self.check(item, own[name], (*key, name))) if name in own else []
                for case in cases:
                    found += self.check(item, case.get("properties", {}).get(name, {}), (*key, name))
                yield from dict.fromkeys(found)
            elif others is False:
                yield self._unknown(name, item, allowed, key)
            elif others is not True:
                yield from self.check(item, others, (*key, name))
        for name in schema.get("required", ()):
            if value.get(name) is None:
                yield f"{self.document.place(key)}: {dotted((*key, name))} is missing."

    def _holds(self, condition: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
        ((name, expected),) = condition["properties"].items()
        if value.get(name) is None:
            return name not in condition.get("required", ())
        return value[name] == expected["const"]

    # ------------------------------------------------------------------ words

    def _say(self, key: Key, value: Any, what: str, end: str = ".") -> str:
        return f"{self.document.place(key)}: {dotted(key)}={shown(value)} {what}{end}"

    def _unknown(self, name: Hashable, value: Any, allowed: set[str], key: Key) -> str:
        place, full = self.document.place((*key, name)), dotted((*key, name))
        section, decided, elsewhere = key[:1], self.schema["x-decided"], self.schema["x-elsewhere"]
        if name in elsewhere and section:
            return f"{place}: {full}: say it with {elsewhere[name]}."
        if name in decided and section == ("model",):
            return f"{place}: {full} cannot be given: it is decided by {decided[name]}."
        aliases = self.schema["x-aliases"] if section == ("model",) else {}
        tail = did_you_mean(name, allowed, {a: to for a, to in aliases.items() if to in allowed})
        if section and (homes := self._homes(str(name))):
            return f"{place}: unknown key {full}: it belongs to {' or '.join(homes)}."
        return f"{place}: unknown key {full}" + (tail if len(allowed) <= MANY else _near(tail))

    def _homes(self, name: str) -> list[str]:
        """Sections that have a key of this name, as "section.key"."""
        homes = []
        cases = [case["then"] for case in self.schema["allOf"] if self._holds(case["if"], self.document.values)]
        for section, own in self.schema["properties"].items():
            places = [own, *(case["properties"].get(section, {}) for case in cases)]
            if any(name in self._resolved(place).get("properties", {}) for place in places):
                homes.append(f"{section}.{name}")
        return homes


def _near(tail: str) -> str:
    """The tail of a message without the long list of what is allowed."""
    return tail.partition(" Allowed:")[0]


def _of_type(value: Any, schema: Mapping[str, Any]) -> bool:
    if "type" not in schema:
        return True
    if isinstance(value, bool):
        return schema["type"] == "boolean"
    return isinstance(value, _TYPES[schema["type"]])


def _inside(value: float, schema: Mapping[str, Any]) -> bool:
    return all(holds(value, schema[name]) for name, (_, holds) in _LIMITS.items() if name in schema)


def words(schema: Mapping[str, Any]) -> str:
    """What a value has to be, such as "a whole number ≥ 1"."""
    if "enum" in schema:
        return "one of " + ", ".join(map(str, schema["enum"]))
    limits = " and ".join(f"{sign} {schema[name]:g}" for name, (sign, _) in _LIMITS.items() if name in schema)
    return " ".join(filter(None, (_WORDS.get(schema.get("type", ""), "a value"), limits)))
