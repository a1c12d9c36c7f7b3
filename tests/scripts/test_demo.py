"""The demo in small: it trains, shows, and knows on the next call that it is finished."""

import json
import subprocess

import pytest

from frankenstein_hf.data import corpus


@pytest.fixture
def demo(monkeypatch):
    import demo

    monkeypatch.setattr(corpus, "MODULES", ("argparse", "heapq", "textwrap", "threading"))
    for settings in demo.SETTINGS.values():
        monkeypatch.setitem(settings, "vocab_size", 400)
        monkeypatch.setitem(settings, "block_size", 64)
        monkeypatch.setitem(settings, "per_device_train_batch_size", 2)
        monkeypatch.setitem(settings, "config_overrides", {"hidden_size": 32, "num_hidden_layers": 4})
    # the "fresh process" of the real demo costs an import; its command line is run here instead
    monkeypatch.setattr(subprocess, "run", lambda command, check: demo.main(command[2:]))
    return demo


def test_the_demo_shows_both_models_and_runs_again_as_told(demo, tmp_path, capsys):
    command = ["--output_dir", str(tmp_path / "demo"), "--steps", "2"]
    demo.main(command)
    output = capsys.readouterr().out
    for sentence in demo.MASKED_SENTENCES + demo.PROMPTS:
        assert sentence in output
    assert "tokens read" in output and str(tmp_path / "demo") in output and "arning" not in output
    assert output.index("How large this was") < output.rindex(demo.MASKED_SENTENCES[0])  # it ends with what they say
    results = [tmp_path / "demo" / kind / "model" / "metrics.json" for kind in demo.SETTINGS]
    stamps = [path.stat().st_mtime_ns for path in results]

    demo.main(command)
    assert "Trained already" in capsys.readouterr().out
    assert [path.stat().st_mtime_ns for path in results] == stamps

    demo.main([*command, "--restart"])
    assert all(path.stat().st_mtime_ns > stamp for path, stamp in zip(results, stamps))
    demo.main([*command[:-1], "1"])
    assert "other settings" in capsys.readouterr().out
    assert json.loads(results[0].read_text())["train"]["steps"] == 1

    results[0].write_text("{")  # damaged: taken up from its checkpoint
    demo.main([*command[:-1], "1"])
    assert json.loads(results[0].read_text())["train"]["steps"] == 1


def test_the_demo_deletes_nothing_but_its_own(demo, tmp_path):
    own = tmp_path / "masked" / "thesis.txt"
    own.parent.mkdir()
    own.write_text("precious")
    with pytest.raises(SystemExit, match="not from this demo"):
        demo.main(["--output_dir", str(tmp_path), "--restart"])
    assert own.read_text() == "precious"
