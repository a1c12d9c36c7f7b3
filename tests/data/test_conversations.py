"""Conversations: only the assistant's words are learned, with any template, and packed ones stay apart."""

from itertools import chain

import pytest
import torch
from datasets import Dataset

from frankenstein_hf.data import CausalLMCollator, encode_conversation, pack_conversations, train_tokenizer
from frankenstein_hf.data.conversations import ROLE_TOKENS, TURNS, chat_template, check_conversations, is_conversations

# Without marks; the same text as TURNS.
PLAIN = TURNS.replace("{% generation %}", "").replace("{% endgeneration %}", "")
REWRITES = "{%- for message in messages %}{{- message['content'] if loop.last else '…' }}{%- endfor %}"


def conversation(number, turns=2):
    return [
        message
        for turn in range(turns)
        for message in (
            {"role": "user", "content": f"What is {number} plus {turn}?"},
            {"role": "assistant", "content": f"It is {number + turn}, <b>dear</b> friend."},
        )
    ]


@pytest.fixture(scope="module")
def tokenizer():
    texts = [message["content"] for number in range(50) for message in conversation(number)]
    return train_tokenizer(texts, 320, "clm", chat_template=TURNS, more_tokens=ROLE_TOKENS)


@pytest.fixture(params=[TURNS, PLAIN], ids=["marked", "plain"])
def talker(request, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", request.param)
    return tokenizer


def test_the_labels_are_exactly_what_the_assistant_says_and_its_end(talker):
    messages = [{"role": "system", "content": "Be kind."}, *conversation(3)]
    ids, labels = encode_conversation(talker, messages)
    assert talker.decode(ids) == talker.apply_chat_template(messages, tokenize=False)
    said = "".join(message["content"] + talker.eos_token for message in messages if message["role"] == "assistant")
    assert talker.decode([label for label in labels if label != -100]) == said
    assert all(label in (-100, token) for token, label in zip(ids, labels))


def test_a_template_that_rewrites_earlier_turns_is_refused_without_marks(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", REWRITES)
    with pytest.raises(ValueError, match=r"rewrites earlier turns.*endgeneration"):
        encode_conversation(tokenizer, conversation(1))


@pytest.mark.parametrize("packing", ["documents", "none"])
def test_rows_hold_whole_conversations_and_their_labels(packing, talker):
    rows = Dataset.from_dict({"messages": [conversation(number, 1 + number % 2) for number in range(9)]})
    assert is_conversations(rows.features["messages"])
    packed = pack_conversations(rows, talker, 120, packing)
    expected = [encode_conversation(talker, messages) for messages in rows["messages"]]
    assert list(chain(*packed["input_ids"])) == list(chain(*(ids for ids, _ in expected)))
    assert list(chain(*packed["labels"])) == list(chain(*(labels for _, labels in expected)))
    assert max(map(len, packed["input_ids"])) <= 120
    batch = CausalLMCollator(talker)([packed[0], packed[1]])
    if packing == "documents":
        starts = (batch["position_ids"] == 0).sum()
        assert starts == sum(sum(place == 0 for place in packed[row]["position_ids"]) for row in (0, 1)) > 2
    assert (batch["labels"] != -100).sum() == sum(label != -100 for row in (0, 1) for label in packed[row]["labels"])
    chosen = batch["labels"] != -100
    assert torch.equal(batch["labels"][chosen], batch["input_ids"][chosen])


def test_what_does_not_fit_is_cut_and_without_answers_left_out(talker):
    rows = Dataset.from_dict({"messages": [conversation(1), conversation(2)]})
    short = len(encode_conversation(talker, conversation(1)[:1])[0]) + 4
    packed = pack_conversations(rows, talker, short, "none")
    assert [len(ids) for ids in packed["input_ids"]] == [short, short]
    with pytest.raises(ValueError, match="No answer of the assistant begins within 5 tokens"):
        pack_conversations(rows, talker, 5, "none")
    with pytest.raises(ValueError, match="'documents' or 'none'"):
        pack_conversations(rows, talker, 64, "blocks")


def test_the_tokenizer_keeps_its_template_and_roles_are_one_token(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.chat_template == TURNS
    for token in ROLE_TOKENS:
        assert again.encode(token) == [again.convert_tokens_to_ids(token)] != [again.unk_token_id]
    text = again.apply_chat_template(conversation(1)[:1], tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|assistant|>\n")


def test_bad_conversations_and_templates_are_named(tmp_path):
    rows = [conversation(1), [{"role": "user", "content": "Hm."}]]
    with pytest.raises(ValueError, match="Row 1 of train: 'messages' has no turn of the assistant"):
        check_conversations({"train": Dataset.from_dict({"messages": rows})}, "messages")
    rows = [[{"role": "robot<|user|>", "content": "x"}, *conversation(1)]]
    with pytest.raises(ValueError, match="one of the roles system, user, assistant, got"):
        check_conversations({"train": Dataset.from_dict({"messages": rows})}, "messages")
    with pytest.raises(ValueError, match="none of turns"):
        chat_template("chatty")
    (tmp_path / "own.jinja").write_text(PLAIN)
    assert chat_template(str(tmp_path / "own.jinja")) == PLAIN
