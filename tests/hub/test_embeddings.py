"""The stack in sentence-transformers: encoding, saving, reloading, with this package and without."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

from ..heads import head_model
from ..tiny import tiny_tokenizer
from .test_pipelines import silence

sentence_transformers = pytest.importorskip(
    "sentence_transformers", reason="sentence-transformers is absent; pip install 'frankenstein_hf[embeddings]'"
)

PATTERN = ["gated_deltanet", "swa", "standard"]
TEXTS = ["t5 t6 t7 t8", "t9", "t10 t11 t5"]

ELSEWHERE = """
import importlib.abc, sys
class NotInstalled(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname.partition(".")[0] == "frankenstein_hf":
            raise ModuleNotFoundError(fullname, name=fullname)
sys.meta_path.insert(0, NotInstalled())
import numpy, torch
from sentence_transformers import SentenceTransformer
torch.set_num_threads(1)
model = SentenceTransformer(sys.argv[1], trust_remote_code=True, device="cpu")
assert type(model[0].auto_model).__module__.startswith("transformers_modules.")
model.save(sys.argv[2])
model = SentenceTransformer(sys.argv[2], trust_remote_code=True, device="cpu")
numpy.save(sys.argv[3], model.encode(sys.argv[4:]))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A masked language model with its tokenizer: what embedding models are made of."""
    folder = tmp_path_factory.mktemp("masked")
    head_model("AutoModelForMaskedLM", PATTERN, is_causal=False, pad_token_id=0).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def embedder(checkpoint: Path, pooling: str):
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    transformer = Transformer(str(checkpoint), max_seq_length=32)
    pool = Pooling(transformer.get_embedding_dimension(), pooling_mode=pooling)
    return sentence_transformers.SentenceTransformer(modules=[transformer, pool], device="cpu")


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
def test_encoding_pools_the_stacks_states_and_survives_saving(pooling, checkpoint, tmp_path):
    with silence():
        model = embedder(checkpoint, pooling)
        vectors = model.encode(TEXTS)  # one batch with pads
        model.save(str(tmp_path))
        loaded = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")
    assert np.array_equal(loaded.encode(TEXTS), vectors)
    stack, tokenizer = AutoModel.from_pretrained(checkpoint), tiny_tokenizer()
    for text, vector in zip(TEXTS, vectors):
        with torch.no_grad():
            states = stack(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy()
        expected = {"mean": states.mean(0), "cls": states[0], "lasttoken": states[-1]}[pooling]
        np.testing.assert_allclose(vector, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow  # importing sentence-transformers once more
def test_an_embedding_model_loads_saves_and_encodes_without_the_package(checkpoint, tmp_path):
    model = embedder(checkpoint, "mean")
    model.save(str(tmp_path / "saved"))
    run = subprocess.run(
        [sys.executable, "-I", "-c", ELSEWHERE, tmp_path / "saved", tmp_path / "again", tmp_path / "found.npy", *TEXTS],
        env=os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert np.array_equal(np.load(tmp_path / "found.npy"), model.encode(TEXTS))


def test_a_cross_encoder_scores_pairs_with_the_sequence_head(tmp_path):
    head_model("AutoModelForSequenceClassification", PATTERN, num_labels=1, pad_token_id=0).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with silence():
        model = sentence_transformers.CrossEncoder(str(tmp_path), device="cpu")
        scores = model.predict([("t5 t6", "t7"), ("t5", "t8 t9 t10")])
    assert scores.shape == (2,) and scores[0] == pytest.approx(model.predict([("t5 t6", "t7")])[0], rel=1e-5)
