"""What the documented examples write is ignored by git."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WRITES = re.compile(
    r'(?:--output_dir[ =]|save_pretrained\("|save_model\("|TrainingArguments\(\s*"|output_dir=")([\w./-]+)'
)


def folders():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "scripts").glob("*.py")]
    return sorted({place for page in pages for place in WRITES.findall(page.read_text(encoding="utf-8"))})


def test_folders_of_the_examples_are_ignored():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no repository")
    assert {"out", "out/mlm", "outputs/mlm"} <= set(folders())
    asked = "\n".join(f"{folder}/model.safetensors" for folder in folders() if not Path(folder).is_absolute())
    done = subprocess.run(["git", "check-ignore", "--stdin"], input=asked, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split("\n")[:-1] == asked.split("\n"), "add the others to .gitignore"
