"""The scripts in examples/ do what they say."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
def test_export_onnx(tmp_path, capsys):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    runpy.run_path(str(EXAMPLES / "export_onnx.py"))["main"](None, str(tmp_path / "encoder.onnx"))
    said = capsys.readouterr().out.strip().splitlines()[-1]
    assert "embeddings (3, 64)" in said and float(said.split()[-4]) < 1e-4
