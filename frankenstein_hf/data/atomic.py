"""Writing so that a reader sees the old file or the new one, never half of one."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_bytes(path: str | os.PathLike, content: bytes) -> Path:
    """Write `content` to a temporary file beside `path` and rename it; folders are made as needed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp makes files only their owner can read
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def write_text(path: str | os.PathLike, text: str) -> Path:
    """`write_bytes` of `text` in UTF-8; bytes of file names that are none become escapes, which JSON can read."""
    return write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_json(path: str | os.PathLike, value: Any) -> Path:
    """`write_text` of `value` as indented JSON."""
    return write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
