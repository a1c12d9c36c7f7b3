"""Two small tokenizers and some text."""

import pytest

from frankenstein_hf.data import train_tokenizer

TEXTS = [
    f"Document number {i}: the quick brown fox jumps over {'the lazy dog, ' * (i % 4)}{i * 7919 % 1000} times."
    for i in range(60)
]


@pytest.fixture(scope="session")
def texts():
    return TEXTS


@pytest.fixture(scope="session")
def mlm_tokenizer():
    return train_tokenizer(TEXTS, 320, "mlm")


@pytest.fixture(scope="session")
def clm_tokenizer():
    return train_tokenizer(TEXTS, 320, "clm")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path_factory.getbasetemp() / "hf"))
