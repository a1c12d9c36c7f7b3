"""Tokenizers and packing: nothing is lost, documents stay apart."""

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from frankenstein_hf.data import pack, train_tokenizer


@pytest.mark.parametrize("objective", ["mlm", "clm"])
def test_any_text_survives_and_a_saved_tokenizer_is_the_same(objective, request, tmp_path):
    tokenizer = request.getfixturevalue(f"{objective}_tokenizer")
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("def f(x):\n    return 'ß→🐍'  # two  spaces", " [leading", ""):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert loaded(text)["input_ids"] == ids
    assert loaded("the [MASK] fox")["input_ids"] == tokenizer("the [MASK] fox")["input_ids"]
    assert set(tokenizer("fox")) == {"input_ids", "attention_mask"}


def test_special_tokens_are_those_of_the_objective(mlm_tokenizer, clm_tokenizer):
    tokens = mlm_tokenizer.convert_ids_to_tokens(mlm_tokenizer("the [MASK] fox")["input_ids"])
    assert (tokens[0], tokens[-1]) == ("[CLS]", "[SEP]")
    assert tokens[tokens.index("[MASK]") + 1].startswith("Ġ")  # the mask stands for the word and the space before it
    assert tokens[tokens.index("[MASK]") - 1] != "Ġ"
    assert clm_tokenizer.eos_token == "<|endoftext|>" and clm_tokenizer.mask_token is None
    assert clm_tokenizer.eos_token_id not in clm_tokenizer("fox")["input_ids"]


def test_bad_requests_for_a_tokenizer_are_refused():
    with pytest.raises(ValueError, match="261"):
        train_tokenizer(["text"], 100)
    with pytest.raises(ValueError, match="no text"):
        train_tokenizer(["", ""], 300)
    with pytest.raises(ValueError, match="objective"):
        train_tokenizer(["text"], 300, "mlmm")  # type: ignore[arg-type]


def test_blocks_are_the_stream_cut_up(mlm_tokenizer, texts):
    rows = pack(Dataset.from_dict({"text": [*texts, ""]}), mlm_tokenizer, 32)["input_ids"]
    stream = [token for text in texts for token in mlm_tokenizer(text)["input_ids"]]
    assert {len(row) for row in rows} == {32}
    assert [token for row in rows for token in row] == stream[: len(stream) // 32 * 32]


@pytest.mark.parametrize("objective", ["mlm", "clm"])
def test_packed_documents_are_whole_and_positions_restart_at_each(objective, request, texts):
    tokenizer = request.getfixturevalue(f"{objective}_tokenizer")
    end = [tokenizer.eos_token_id] if objective == "clm" else []
    dataset = pack(Dataset.from_dict({"text": texts}), tokenizer, 96, "documents")
    documents = []
    for row in dataset:
        assert len(row["input_ids"]) == len(row["position_ids"]) <= 96
        for token, position in zip(row["input_ids"], row["position_ids"]):
            if position == 0:
                documents.append([])
            assert position == len(documents[-1])
            documents[-1].append(token)
    assert documents == [tokenizer(text)["input_ids"] + end for text in texts]
    assert len(dataset) < len(texts)


def test_a_long_document_is_cut_and_every_piece_has_its_special_tokens(mlm_tokenizer, clm_tokenizer, texts):
    long = Dataset.from_dict({"text": [" ".join(texts[:5])]})
    for row in pack(long, mlm_tokenizer, 20, "none")["input_ids"]:
        assert len(row) <= 20 and row[0] == mlm_tokenizer.cls_token_id and row[-1] == mlm_tokenizer.sep_token_id
    pieces = pack(long, clm_tokenizer, 20, "none")["input_ids"]
    assert clm_tokenizer.decode([t for piece in pieces for t in piece]) == long[0]["text"] + "<|endoftext|>"


def test_packing_refuses_what_cannot_be(mlm_tokenizer):
    short = Dataset.from_dict({"text": ["a few words"]})
    with pytest.raises(ValueError, match="shorter than one block"):
        pack(short, mlm_tokenizer, 512)
    with pytest.raises(ValueError, match="too short"):
        pack(short, mlm_tokenizer, 2)
    with pytest.raises(ValueError, match="packing"):
        pack(short, mlm_tokenizer, 8, "tightly")
