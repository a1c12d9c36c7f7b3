"""One run at a time in an output folder: a file that says which process writes there."""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import psutil

from ..data.atomic import write_json
from ..hub.foreign import one_line
from .arguments import BadInput

LOCK = ".run.lock"


class RunLock:
    """Held while a run writes into a folder.

    The file holds the process id and when that process began, so that a lock left by one that was killed is recognised
    even where another process has its number by now. `with RunLock(folder):` holds it.

    Raises:
        BadInput: Another process that is alive holds it, on this machine or on one that cannot be asked.
    """

    def __init__(self, folder: str | os.PathLike) -> None:
        self.path = Path(folder) / LOCK
        self.left: str | None = None  # what a killed run left behind, in words

    def check(self) -> None:
        """Raise `BadInput` if another process holds the lock; writes nothing."""
        holder = _load(self.path)
        if holder is not None and not _is_gone(holder):
            raise BadInput(
                f"{self.path.parent} is being written by another run: {_words(holder)}. Wait for it or choose another "
                f"--output_dir; if it ended long ago, on a machine that cannot be asked, delete {self.path}."
            )

    def __enter__(self) -> "RunLock":
        self.check()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        stale = _load(self.path)
        if stale is not None:
            self._clear(stale)
        own = self.path.with_name(f"{LOCK}.{os.getpid()}")
        write_json(own, _own())
        try:
            _create(own, self.path)
        except FileExistsError:  # somebody was faster
            self.check()
            raise BadInput(f"{self.path.parent} is being written by another run that has just begun.") from None
        finally:
            own.unlink(missing_ok=True)
        return self

    def __exit__(self, *error: Any) -> None:
        holder = _load(self.path)
        if holder is not None and _same(holder, _own()):
            self.path.unlink(missing_ok=True)

    def _clear(self, stale: dict[str, Any]) -> None:
        """Take away the lock of a process that is gone; two runs may try at once, and one may hold it by then."""
        aside = self.path.with_name(f"{LOCK}.stale.{os.getpid()}")
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return
        if _load(aside) != stale:
            os.replace(aside, self.path)
            self.check()
        aside.unlink(missing_ok=True)
        self.left = _words(stale)


def _load(path: Path) -> dict[str, Any] | None:
    """What a lock says; nothing if it is damaged, None if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _create(own: Path, path: Path) -> None:
    """Make `path` with the content of `own`, whole from the first moment, unless it exists."""
    try:
        os.link(own, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        with open(path, "xb") as file:
            file.write(own.read_bytes())


def _own() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "began": psutil.Process().create_time(),
        "host": socket.gethostname(),
        "program": Path(sys.argv[0]).name,
    }


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one.get(key) == other[key] for key in ("pid", "host"))


def _is_gone(holder: dict[str, Any]) -> bool:
    """Whether the process that wrote the lock has ended, as far as this machine can tell."""
    pid, began = holder.get("pid"), holder.get("began")
    if not isinstance(pid, int) or not isinstance(began, int | float):
        return True  # nothing of ours
    if holder.get("host") != socket.gethostname():
        return False
    try:
        process = psutil.Process(pid)
        return process.status() == psutil.STATUS_ZOMBIE or abs(process.create_time() - began) > 2
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False


def _words(holder: dict[str, Any]) -> str:
    return one_line(
        f"process {holder.get('pid', '?')} ({holder.get('program', 'unknown program')}) on {holder.get('host', '?')}"
    )
