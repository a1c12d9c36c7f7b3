"""A package with a mixer, installed as others' packages are: listed, validated, in the schema, trained."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from frankenstein_hf.recipes.plugins import load_plugins

ROOT = Path(__file__).parents[2]
RECURRENCE = """    hs = []
    for t in range(x.shape[1]):
        h = decay * h + x[:, t]
        hs.append(h)
    return torch.stack(hs, 1), h
"""


@pytest.fixture
def site(tmp_path):
    """A folder with the package that `frankenstein new plugin` makes, as if pip had installed it."""
    from frankenstein_hf.commands.app import status_of

    assert status_of(["new", "plugin", "my_part", "--in", str(tmp_path / "source")]) == 0
    folder, source = tmp_path / "site", tmp_path / "source" / "my_part"
    folder.mkdir()
    (source / "my_part").rename(folder / "my_part")
    mixer = folder / "my_part" / "my_part_mixer.py"
    text = mixer.read_text().replace("from torch import Tensor", "import torch\nfrom torch import Tensor")
    begin = text.index("    raise NotImplementedError")
    mixer.write_text(text[:begin] + RECURRENCE + text[text.index("\n", begin) + 1 :])
    info = folder / "my_part-0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_part\nVersion: 0.3\n")
    project = (source / "pyproject.toml").read_text()
    assert '"frankenstein_hf.plugins"' in project and 'my_part = "my_part:register"' in project
    (info / "entry_points.txt").write_text("[frankenstein_hf.plugins]\nmy_part = my_part:register\n")
    return folder


def command(site, *argv):
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}
    call = [sys.executable, "-m", "frankenstein_hf.commands", *map(str, argv)]
    return subprocess.run(call, capture_output=True, text=True, env=environment, check=False)


def test_a_plugin_is_listed_validated_in_the_schema_and_trained(site, tmp_path):
    assert json.loads(command(site, "list", "plugins", "--json").stdout) == {
        "my_part": {"summary": "my_part:register of my_part"}
    }
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Paragraph {i} says that {i * 7919 % 1000} foxes jump." for i in range(40)))
    file = tmp_path / "r.yaml"
    recipe = """plugins: ["my_part>=0.2"]
task: causal_lm
model:
  {layer_pattern: [my_part, swa], hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2,
   mixer_params: {my_part: {DECAY: 0.5}}}
tokenizer: {train: {vocab_size: 300}}
data: {train_file: FILE, block_size: 16}
training: {max_steps: 1, output_dir: OUT}
""".replace("FILE", str(text)).replace("OUT", str(tmp_path / "out"))
    file.write_text(recipe.replace("DECAY", "decey"))
    done = command(site, "validate", file)
    assert done.returncode == 2 and "unknown key model.mixer_params.my_part.decey; did you mean 'decay'?" in done.stderr
    file.write_text(recipe.replace("DECAY", "decay").replace(">=0.2", ">=0.4"))
    done = command(site, "validate", file)
    assert done.returncode == 2 and "my_part is 0.3 here, and >=0.4 is asked for" in done.stderr
    file.write_text(recipe.replace("DECAY", "decay"))
    done = command(site, "train", file, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"]["layers"] == ["my_part", "swa"]
    resolved = (tmp_path / "out" / "recipe.resolved.yaml").read_text()
    assert "my_part>=0.2" in resolved and "decay: 0.5" in resolved


@pytest.mark.parametrize(
    "text, message",
    [
        ("os; import sys", "is no requirement"),
        ("a @ https://x.y/z.whl", "may have a name and versions only"),
        ("no-such-package-here", "is not installed: pip install"),
        ("pytest", "has no plugin for frankenstein_hf"),
        ("pytest<1", "and <1 is asked for"),
    ],
)
def test_what_is_no_installed_plugin_is_refused_and_not_imported(text, message):
    with pytest.raises(ValueError, match=message):
        load_plugins([text])
