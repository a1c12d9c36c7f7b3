"""Registering mixers whose files came with a checkpoint, where the package is installed."""

import hashlib
import importlib.util
import re
import sys
from pathlib import Path

from huggingface_hub import snapshot_download
from transformers.utils import HF_MODULES_CACHE

from ..components import register_mixer
from ..data.atomic import write_text
from .flat import PACKAGE, PARTS, ROOT, flat_name
from .own_mixers import FOLDER, PUBLIC


def load_mixers(checkpoint: str, *, revision: str | None = None, trust_remote_code: bool = False) -> list[str]:
    """Register the mixers whose files came with a checkpoint, so that it loads where this package is installed.

    Args:
        checkpoint: A folder, or a name of the Hub.
        revision: A branch, a tag or a commit of the Hub; pin one that you have read.
        trust_remote_code: Must be True: this runs the checkpoint's files.

    Returns:
        Names of the mixers.

    Raises:
        ValueError: trust_remote_code is not True, the name is taken by another mixer, or a file needs a module of this
            package that this version does not have.
    """
    prefix = "_".join(FOLDER)
    folder = Path(checkpoint)
    if not folder.is_dir():
        folder = Path(snapshot_download(checkpoint, revision=revision, allow_patterns=f"{prefix}_*.py"))
    files = sorted(folder.glob(f"{prefix}_*.py"))
    if files and trust_remote_code is not True:
        raise ValueError(
            f"{checkpoint} brings code: {', '.join(path.name for path in files)}. Read it, then pass "
            "trust_remote_code=True to run it."
        )
    return [name for path in files for name in _register(path, path.stem.removeprefix(f"{prefix}_"))]


def _register(path: Path, name: str) -> list[str]:
    """Import a file of a bundle as the file it was made from, and register what it declares."""
    text = path.read_text(encoding="utf-8")
    body, _, ending = text.partition(f"\nfrom .{flat_name(PUBLIC)} import carried")
    modules = (file.relative_to(ROOT).with_suffix("").parts for part in PARTS for file in (ROOT / part).rglob("*.py"))
    homes = {flat_name(module): ".".join((PACKAGE, *module)) for module in modules} | {flat_name(PUBLIC): PACKAGE}

    def absolute(line: re.Match[str]) -> str:
        if line[2] not in homes:
            raise ValueError(
                f"{path} imports {line[2]}, which this version of frankenstein_hf does not have. Register the mixer "
                "from its own file, or load the checkpoint where the package is not installed."
            )
        return f"{line[1]}{homes[line[2]]}{line[3]}"

    body = re.sub(r"^(\s*from\s+)\.(\w+)(\s+import\b)", absolute, body, flags=re.M)
    digest = hashlib.sha256(body.encode()).hexdigest()[:16]
    file = Path(HF_MODULES_CACHE) / "frankenstein_mixers" / digest / f"{name}.py"  # a file: it can travel again
    write_text(file, body.rstrip() + "\n")
    qualified = f"frankenstein_mixers_{digest}_{name}"
    if qualified not in sys.modules:
        found = importlib.util.spec_from_file_location(qualified, file)
        assert found is not None and found.loader is not None
        module = sys.modules[qualified] = importlib.util.module_from_spec(found)
        try:
            found.loader.exec_module(module)
        except BaseException:
            del sys.modules[qualified]
            raise
    module = sys.modules[qualified]
    registered = []
    for variable, cls in re.findall(r'carried\((\w+), "[\w.]+:(\w+)"\)', ending):
        spec = getattr(module, variable)
        register_mixer(spec, getattr(module, cls))
        registered.append(spec.name)
    return registered
