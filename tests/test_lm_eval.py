"""lm-evaluation-harness on a saved model, offline: the README's line, and the likelihoods it reports."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from frankenstein_hf.data import train_tokenizer

from .tiny import tiny_model

FOLDER = Path(__file__).parent / "fixtures" / "lm_eval"


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("lm_eval") is None, reason='lm-evaluation-harness is not installed: pip install ".[eval]"'
)
def test_the_harness_reports_the_likelihoods_of_a_saved_model(tmp_path):
    tokenizer = train_tokenizer(["the quick brown fox jumps over the lazy dog"] * 9, 300, "clm")
    model = tiny_model(["gated_deltanet", "swa"], vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "out")
    tokenizer.save_pretrained(tmp_path / "out")
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--tasks", "tiny_words"]
    command += ["--model_args", f"pretrained={tmp_path / 'out'},trust_remote_code=True"]
    command += ["--include_path", str(FOLDER), "--device", "cpu", "--batch_size", "3"]
    command += ["--output_path", str(tmp_path / "results"), "--log_samples"]
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    (samples,) = tmp_path.glob("results/**/samples_tiny_words_*.jsonl")
    samples = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(samples) == 4
    hits = []
    for sample in samples:
        question, choices = sample["doc"]["question"], sample["doc"]["choices"]
        expected = [log_likelihood(model, tokenizer, question, f" {choice}") for choice in choices]
        reported = [float(answer[0][0]) for answer in sample["resps"]]
        assert reported == pytest.approx(expected, rel=1e-4, abs=1e-4)
        hits.append(expected.index(max(expected)) == sample["doc"]["answer"])
    (results,) = tmp_path.glob("results/**/results_*.json")
    assert json.loads(results.read_text())["results"]["tiny_words"]["acc,none"] == pytest.approx(sum(hits) / 4)


def log_likelihood(model, tokenizer, context: str, continuation: str) -> float:
    """Σ log p(token | all before it) over the tokens of the continuation."""
    before, whole = tokenizer(context).input_ids, tokenizer(context + continuation).input_ids
    with torch.no_grad():
        logits = model(torch.tensor([whole])).logits[0]
    scores = logits.log_softmax(-1)
    return sum(scores[t - 1, whole[t]].item() for t in range(len(before), len(whole)))
