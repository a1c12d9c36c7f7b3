"""What ends a program from outside, as one line for the user instead of a traceback."""

import errno
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..hub.foreign import one_line

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# torch and safetensors write in their own code and report the system's words, or only that writing failed
NO_ROOM_WORDS = re.compile(r"No space left|[Qq]uota exceeded|File too large|os error (28|122|27)\b")
WRITE_FAILED_WORDS = re.compile(r"PytorchStreamWriter failed|file write failed|unexpected pos|I/O error")
LITTLE = 4 << 20  # bytes


class BadInput(ValueError):
    """Something the user gave cannot work; found before anything was computed or written."""


class RunFailed(RuntimeError):
    """Something outside the program stopped it; the message says what is safe and what to do."""


class Terminated(KeyboardInterrupt):
    """The program was told to end by SIGTERM, and has written a checkpoint."""


def no_room(error: BaseException, folder: str | os.PathLike) -> bool:
    """Whether an error means that what was written into `folder` did not fit on its disk, or into a quota."""
    for found in _chain(error):
        if isinstance(found, OSError) and found.errno in NO_ROOM:
            return True
        if NO_ROOM_WORDS.search(str(found)):
            return True
        if WRITE_FAILED_WORDS.search(str(found)):
            existing = next((path for path in (Path(folder), *Path(folder).parents) if path.exists()), Path())
            if shutil.disk_usage(existing).free < LITTLE:
                return True
    return False


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def good(make: Callable[[], Any]) -> Any:
    """`make()`, its ValueErrors as `BadInput`."""
    try:
        return make()
    except ValueError as error:
        raise error if isinstance(error, BadInput) else BadInput(str(error)) from error


def readable(name: str | None, read: Callable[[], Any], flag: str = "model_name_or_path") -> Any:
    """`read()`, its errors as `BadInput` about the checkpoint called `name`, which was given as --`flag`."""
    try:
        return read()
    except BadInput:
        raise
    except Exception as error:  # tokenizers and safetensors raise kinds of their own for damaged files
        if no_room(error, ""):
            raise
        reason = " ".join(str(error).split())
        raise BadInput(f"Cannot read --{flag} {name}: {reason}") from error


def run_main(main: Callable[[], Any]) -> None:
    """Run a program. What the user can do something about becomes one line on stderr.

    The exit status is 2 for bad input, 1 for a failure from outside, 130 for Ctrl-C and 143 for SIGTERM.
    """
    name = Path(sys.argv[0]).name
    try:
        main()
    except (BadInput, RunFailed) as error:
        print(f"{name}: error: {one_line(error)}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, BadInput) else 1) from None
    except KeyboardInterrupt as error:
        print("Interrupted.", file=sys.stderr)
        raise SystemExit(143 if isinstance(error, Terminated) else 130) from None
    except Exception as error:
        if not no_room(error, ""):
            raise
        print(f"{name}: error: The disk (or the quota) is full: {one_line(error)}", file=sys.stderr)
        raise SystemExit(1) from None
