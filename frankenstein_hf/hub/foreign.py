"""Text that came from outside, made harmless for the place it is shown in; the only place where that is done.

Names of files, folders, checkpoints, data sets, mixers and labels, strings in a config, rows of data: whatever they
contain, they stay text. Cards are rendered in `environment()`, which escapes every plain string that goes into a
template; what has been made safe is a `Markdown` and passes unchanged. Foreign text is never part of a template.
"""

import functools
import re
import unicodedata
from pathlib import Path
from typing import Any

# Ends of lines, controls, lone surrogates, and marks that turn the direction of the text after them.
_INVISIBLE = re.compile(r"[\u202a-\u202e\u2066-\u2069]")
_SPECIAL = re.compile(
    r"(?<![^\W_])_|_(?![^\W_])|[\\`*\[\]<>|~$&@]|(?<=www)\.|:(?=//)|^[#>+=-](?=[\s#>+=-]|$)|^\d+(?=[.)](\s|$))"
)


class Markdown(str):
    """Text that is Markdown already and safe to show."""


def one_line(text: Any) -> str:
    """`text` without ends of lines and control characters, which become spaces; for messages, titles and metadata."""
    shown = _INVISIBLE.sub("", str(text))
    return "".join(" " if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") else c for c in shown)


def markdown(text: Any) -> Markdown:
    """`text` as prose of one line that no reader of Markdown, HTML or mathematics finds a structure in."""
    if isinstance(text, Markdown):
        return text
    return Markdown(_SPECIAL.sub(lambda found: "".join(_escaped(c) for c in found[0]), one_line(text)))


def _escaped(character: str) -> str:
    return f"&#{ord(character)};" if character.isdigit() else f"\\{character}"


def code(text: Any) -> Markdown:
    """`text` as code within a line or a cell of a table."""
    shown = one_line(text)
    if (
        re.fullmatch(r"[\w.,:;=+/@%()\[\]{}^#!?'\"*<>–-]([\w .,:;=+/@%()\[\]{}^#!?'\"*<>–-]*\S)?", shown)
        and "|" not in shown
    ):
        return Markdown(f"`{shown}`")
    return Markdown(f"<code>{html_text(shown)}</code>")


def html_text(text: Any) -> Markdown:
    """`text` between two tags of HTML in a line or a cell: a reference to a character is never a structure."""
    return Markdown("".join(c if c.isalnum() or c in " ./,-" else f"&#{ord(c)};" for c in one_line(text)))


def python(text: str) -> Markdown:
    """`text` as a string literal of Python that stays on its line."""
    plain = text.isprintable() and not set(text) & {'"', "\\"}
    return Markdown(f'"{text}"' if plain else repr(text))


def fenced(text: Any, language: str = "") -> Markdown:
    """`text` of one or several lines as a block of code.

    All of it is indented by a space, which readers of Markdown take away again: no line of it looks like a heading.
    """
    lines = [one_line(line) for line in str(text).splitlines()]
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markdown("\n".join(f" {line}" for line in (fence + language, *lines, fence)))


@functools.cache
def environment(folder: Path) -> Any:
    """The Jinja environment of the templates in `folder`: every expression is escaped with `markdown`."""
    import jinja2  # transformers' own cards need it, torch brings it

    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=markdown,
    )
    made.filters |= {"code": code, "python": python}
    return made
