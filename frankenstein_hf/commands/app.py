"""The command `frankenstein`: its subcommands, and what ends it.

Results go to stdout, everything else to stderr. The exit status is 0; 1 for a fault of ours or of the machine; 2 for
bad input, a line each; 3 where something would be lost or a check did not hold; 130 after Ctrl-C.
"""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import click
import typer

from ..hub.foreign import one_line
from ..training.failures import BadInput, RunFailed, Terminated

RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A file, presets joined by '+', a run's folder or hub:owner/name.")
]
SettingsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Settings that win over the recipe.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
RecipesOption = Annotated[list[Path] | None, typer.Option("--recipes", help="Folder with presets of your own.")]

app = typer.Typer(
    name="frankenstein",
    help="Train, evaluate, compare and use models whose sequence mixers are chosen layer by layer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class CheckFailed(Exception):
    """Something would be lost, or a check did not hold; exit status 3."""


class Interrupted(Exception):
    """Ctrl-C or SIGTERM, kept from typer, which would make the same status of both."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; ends the process."""
    raise SystemExit(status_of(argv))


def status_of(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    try:
        result = app(args=None if argv is None else list(argv), standalone_mode=False)
        return result if isinstance(result, int) else 0
    except BadInput as error:
        return _say(str(error).splitlines(), 2)
    except CheckFailed as error:
        return _say(str(error).splitlines(), 3)
    except RunFailed as error:
        return _say([str(error)], 1)
    except Interrupted as error:
        return _say(["interrupted."], 143 if isinstance(error.__cause__, Terminated) else 130)
    except (KeyboardInterrupt, click.Abort):
        return _say(["interrupted."], 130)
    except Exception as error:
        # typer brings a click of its own, so its errors are known by what they can do
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
            return 2
        return _say([error.format_message(), "--help shows what can be asked."], 2)


def _say(lines: Sequence[str], status: int) -> int:
    for line in lines:
        print(f"frankenstein: {one_line(line)}", file=sys.stderr)
    return status


@contextlib.contextmanager
def talk_on_stderr() -> Iterator[None]:
    """What is printed meanwhile is no result; all long work is done inside."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except KeyboardInterrupt as error:
        raise Interrupted from error


def show(value: Any, as_json: bool, text: str) -> None:
    """Print a result: `value` as JSON, or `text`."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str) if as_json else text, flush=True)


for module in ("listing", "making", "training", "using"):  # they add their subcommands
    import_module(f".{module}", __package__)
