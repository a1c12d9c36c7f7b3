"""The README tells the truth: its code runs, and its generated parts are up to date."""

import importlib.util
import re
from pathlib import Path

import yaml
from transformers import pipeline

import frankenstein_hf

ROOT = Path(__file__).resolve().parent.parent


def test_generated_documentation_is_up_to_date():
    spec = importlib.util.spec_from_file_location("write_docs", ROOT / "scripts" / "write_docs.py")
    write_docs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(write_docs)
    assert write_docs.main(["--check"]) == 0, "run scripts/write_docs.py"


def test_every_python_block_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 6
    exec(compile("\n".join(blocks), "README.md", "exec"), {})
    assert (tmp_path / "out" / "model.safetensors").exists() and (tmp_path / "out" / "README.md").exists()
    # the evaluation command below it wants "a folder with model and tokenizer"
    assert pipeline("text-generation", str(tmp_path / "out"))("Return the", max_new_tokens=2)


def test_version_and_changes_agree():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert str(citation["version"]) == frankenstein_hf.__version__ and citation["license"] == "Apache-2.0"
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {frankenstein_hf.__version__}\n" in changes or "\n## Unreleased\n" in changes
