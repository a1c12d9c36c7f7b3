"""The programs as modules, a small text, and flags that make them cheap."""

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
TINY = {
    "config_overrides": "hidden_size=16,num_hidden_layers=2,num_attention_heads=2",
    "layer_pattern": "gated_deltanet,standard",
    "vocab_size": 300,
    "block_size": 16,
    "per_device_train_batch_size": 2,
    "max_steps": 4,
    "save_steps": 2,
    "disable_tqdm": True,
}


@pytest.fixture(autouse=True)
def _own_caches(tmp_path_factory, monkeypatch):
    import datasets

    cache = tmp_path_factory.getbasetemp() / "datasets"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setenv("HF_HOME", str(tmp_path_factory.getbasetemp() / "hf"))
    monkeypatch.syspath_prepend(str(SCRIPTS))


@pytest.fixture(params=["run_mlm", "run_clm"])
def program(request):
    """One of the two training programs."""
    __import__(request.param)
    return sys.modules[request.param]


@pytest.fixture
def interrupted_run(monkeypatch):
    """`(program, number)` -> its calls of `run`, of which that number is interrupted from the keyboard."""

    def prepare(program, number):
        calls, run = [], program.run

        def interrupted(*arguments):
            calls.append(arguments)
            if len(calls) == number:
                raise KeyboardInterrupt
            return run(*arguments)

        monkeypatch.setattr(program, "run", interrupted)
        return calls

    return prepare


@pytest.fixture
def text(tmp_path):
    """A file of forty paragraphs."""
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(f"Paragraph {i} says that {i * 7919 % 1000} foxes\njump over it." for i in range(40)))
    return path


@pytest.fixture
def flags(text, tmp_path):
    """Makes a command line from `TINY`, changed; None leaves a flag out."""

    def make(output="out", **changes):
        values = {"output_dir": tmp_path / output, "train_file": text, **TINY, **changes}
        line = []
        for name, value in values.items():
            if value is not None:
                line += [f"--{name}", str(value)]
        return line

    return make
