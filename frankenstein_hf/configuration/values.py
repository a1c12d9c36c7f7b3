"""One value of a configuration: its type, its range, and the words a message describes both with.

`param` declares a component's parameter and `setting` a key of a model's configuration; both are fields of a dataclass
whose metadata say what is allowed, and `problem` compares a value with them.
"""

import ast
import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# Without limits of their own, whole numbers fit 32 bits and other numbers fp32.
LARGEST_INT = 2**31 - 1
LARGEST_FLOAT = 3e38


def _plain(name: object) -> str:
    return re.sub(r"[\W_]", "", str(name).casefold())


def did_you_mean(name: object, allowed: Iterable[str], aliases: Mapping[str, str] | None = None) -> str:
    """The tail of an error message about `name`: the nearest valid name, if one is near, and all valid names.

    Args:
        name: What was given; spelling in capitals or with other separators is near.
        allowed: The valid names.
        aliases: What others call some of them: other name -> valid name.
    """
    allowed = sorted(allowed)
    plain = {_plain(other): valid for other, valid in (aliases or {}).items()} | {_plain(a): a for a in allowed}
    found = difflib.get_close_matches(str(name), allowed, 1) or difflib.get_close_matches(_plain(name), plain, 1)
    near = plain.get(_plain(name)) or (plain.get(found[0], found[0]) if found else "")
    return (f"; did you mean '{near}'?" if near else ".") + f" Allowed: {', '.join(allowed) or 'none'}."


def shown(value: object) -> str:
    """`value` as a message quotes it, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "…"


def _limits(**limits: Any) -> dict[str, Any]:
    return {name: limit for name, limit in limits.items() if limit is not None}


def param(
    default: Any,
    doc: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: tuple[Any, ...] | None = None,
) -> Any:
    """A field of a `Params` class: default, one doc line, and what is allowed.

    Args:
        default, doc: What they say.
        minimum, maximum: Allowed range, ends included; infinity is allowed where it is the default or the maximum.
        above, below: The same, ends excluded.
        choices: The allowed values.
    """
    maximum = math.inf if default == math.inf else maximum
    limits = _limits(minimum=minimum, maximum=maximum, above=above, below=below, choices=choices)
    return dataclasses.field(default=default, metadata={"doc": doc, **limits})


def setting(
    default: Any,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: tuple[Any, ...] | Callable[[], Iterable[str]] | None = None,
) -> Any:
    """A field of a model's configuration, whose docstring documents it: default and what is allowed.

    The limits are those of `param`; `choices` may also be a function that returns the names, such as that of a
    registry.
    """
    limits = _limits(minimum=minimum, maximum=maximum, above=above, below=below, choices=choices)
    return dataclasses.field(default=default, metadata=limits)


# ---------------------------------------------------------------------- types


def matches(value: object, annotation: Any) -> bool:
    """Whether `value` is of the annotated type; a bool is no number, a whole number is one."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        return any(matches(value, choice) for choice in arguments)
    if origin is tuple and Ellipsis not in arguments:
        if not isinstance(value, (list, tuple)) or len(value) != len(arguments):
            return False
        return all(matches(element, item) for element, item in zip(value, arguments))
    if origin in (list, tuple):
        return isinstance(value, (list, tuple)) and all(matches(element, arguments[0]) for element in value)
    if origin is typing.Literal:
        return any(type(value) is type(choice) and value == choice for choice in arguments)
    if origin is dict:
        return isinstance(value, dict)
    if annotation is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if annotation in (None, type(None)):
        return value is None
    return annotation is Any or isinstance(value, annotation)


_SIGNS = {"minimum": "≥", "above": ">", "maximum": "≤", "below": "<"}
_WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "a string", dict: "a dict"}
_PLURALS = {int: "whole numbers", float: "numbers", bool: "booleans", str: "strings"}


def type_words(annotation: Any) -> str:
    """The annotated type in words, e.g. "a whole number or a string"; None is left out."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        left_out = {type(None), int} if float in arguments else {type(None)}
        arguments = tuple(argument for argument in arguments if argument not in left_out)
        return " or ".join(dict.fromkeys(type_words(argument) for argument in arguments))
    if origin is tuple and Ellipsis not in arguments:
        return f"a list of {len(arguments)} {_PLURALS.get(arguments[0], 'values')}"
    if origin in (list, tuple):
        return f"a list of {_PLURALS.get(arguments[0], 'values')}"
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(choice) for choice in arguments)
    return _WORDS.get(origin or annotation) or str(getattr(annotation, "__name__", annotation))


def _number(value: float) -> str:
    return f"{value:.0f}" if isinstance(value, int) or (abs(value) < 1e6 and value == int(value)) else f"{value:g}"


def range_words(limits: Mapping[str, Any]) -> str:
    """The allowed values in words, e.g. "≥ 1", "one of 'euler', 'zoh'" or "" when unrestricted."""
    if choices := choices_of(limits):
        return "one of " + ", ".join(repr(choice) for choice in choices)
    given = {key: limit for key in _SIGNS if (limit := limits.get(key)) not in (None, math.inf)}
    if set(given) == {"minimum", "maximum"}:
        return f"from {_number(given['minimum'])} to {_number(given['maximum'])}"
    return " and ".join(f"{_SIGNS[key]} {_number(limit)}" for key, limit in given.items())


def describe_range(field: dataclasses.Field) -> str:
    """`range_words` of a field made by `param` or `setting`."""
    return range_words(field.metadata)


def choices_of(limits: Mapping[str, Any]) -> tuple[Any, ...]:
    """The allowed values, where they are listed."""
    choices = limits.get("choices") or ()
    return tuple(choices() if callable(choices) else choices)


# ---------------------------------------------------------------------- checking


def _numbers(value: object) -> list[Any]:
    """The numbers of `value`, which may be one, or a list of them."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return [number for number in values if isinstance(number, (int, float)) and not isinstance(number, bool)]


def _largest(annotation: Any) -> float:
    """The implicit limit of the annotated type."""
    union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    choices = typing.get_args(annotation) if union else (annotation,)
    return LARGEST_FLOAT if any("float" in str(choice) for choice in choices) else LARGEST_INT


def _inside(number: float, limits: Mapping[str, Any], largest: float) -> bool:
    low, high = limits.get("minimum"), limits.get("maximum")
    above, below = limits.get("above"), limits.get("below")
    # written so that a NaN fails too
    inside = (low is None or number >= low) and (high is None or number <= high)
    inside = inside and (above is None or number > above) and (below is None or number < below)
    largest = min(largest, 2**62) if isinstance(number, int) else largest  # torch takes no longer whole numbers
    return inside and (abs(number) <= largest or (number == math.inf and high == math.inf))


def problem(value: object, annotation: Any, limits: Mapping[str, Any]) -> str:
    """What `value` would have to be, in words ("a whole number ≥ 1"), or "" if it is that."""
    choices = choices_of(limits)
    words = "" if choices else type_words(annotation)
    if matches(value, annotation) and (value is None or not choices or value in choices):
        numbers, largest = _numbers(value), _largest(annotation)
        if all(_inside(number, limits, largest) for number in numbers):
            return ""
        if not all(math.isfinite(number) for number in numbers if isinstance(number, float)):
            words = words.replace("a number", "a finite number")
        elif max(map(abs, numbers)) > largest and not ("maximum" in limits or "below" in limits):
            limits = {**limits, "maximum": largest}
    return f"{words} {range_words(limits)}".strip() + (" or None" if matches(None, annotation) else "")


def example(key: str, value: object, annotation: Any, limits: Mapping[str, Any], default: object) -> str:
    """A sentence that shows how the key is written: with the value a string spells, else with the default."""
    if isinstance(value, str):
        try:
            spelt = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            spelt = None
        if spelt is not None and not problem(spelt, annotation, limits):
            return f" Write {key}={spelt!r}."
    return "" if default is None else f" For example {key}={default!r}."


def checked(key: str, value: object, annotation: Any, limits: Mapping[str, Any], default: object = None) -> None:
    """Raise ValueError unless `value` is allowed for the config key `key`; the message names both and the range."""
    choices = choices_of(limits)
    if choices and isinstance(value, str) and value not in choices:
        raise ValueError(f"Unknown {key} {shown(value)}" + did_you_mean(value, map(str, choices)))
    if words := problem(value, annotation, limits):
        raise ValueError(
            f"{key}={shown(value)}: {key} must be {words}." + example(key, value, annotation, limits, default)
        )
