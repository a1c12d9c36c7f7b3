"""Training rows from conversations: what the assistant said is learned, what others said is only read."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .tokenization import Packing, fill_rows, map_to_rows

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, str]

ROLES = ("system", "user", "assistant")
ROLE_TOKENS = tuple(f"<|{role}|>" for role in ROLES)

# A role's token, what it said, and the end token, which is also where generation stops.
TURNS = (
    "{%- for message in messages %}"
    "{{- '<|' + message['role'] + '|>\\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{% generation %}{{- message['content'] + eos_token }}{% endgeneration %}"
    "{%- else %}{{- message['content'] + eos_token }}{%- endif %}"
    "{{- '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"
)
TEMPLATES = {"turns": TURNS}


def chat_template(name: str) -> str:
    """A template of `TEMPLATES`, or the text of a file.

    Raises:
        ValueError: It is neither.
    """
    if name in TEMPLATES:
        return TEMPLATES[name]
    if not Path(name).is_file():
        raise ValueError(f"{name!r} is no file with a chat template, and none of {', '.join(TEMPLATES)}.")
    return Path(name).read_text(encoding="utf-8")


def is_conversations(feature: Any) -> bool:
    """Whether a column of a dataset holds lists of messages with "role" and "content"."""
    inner = getattr(feature, "feature", None)
    return isinstance(inner, Mapping) and {"role", "content"} <= set(inner)


def encode_conversation(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]
) -> tuple[list[int], list[int]]:
    """Token ids of a conversation, and labels: the ids where the assistant speaks, its end token included, else −100.

    A template that marks the assistant's words with `{% generation %}` is taken at its word. With any other, they are
    what a conversation has more than the same without the answer, as far as the template writes from left to right.

    Raises:
        ValueError: The template rewrites earlier turns, so that the assistant's words cannot be told from it.
    """
    template: Any = tokenizer.chat_template
    turns = [dict(message) for message in messages]
    if re.search(r"{%-?\s*generation\b", str(template)):
        encoded: Any = tokenizer.apply_chat_template(
            turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, marks = encoded["input_ids"], encoded["assistant_masks"]
        return list(ids), [token if mark else -100 for token, mark in zip(ids, marks)]
    whole: Any = tokenizer.apply_chat_template(turns, tokenize=False)
    spans = []
    for place, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        before: Any = tokenizer.apply_chat_template(turns[:place], tokenize=False, add_generation_prompt=True)
        after: Any = tokenizer.apply_chat_template(turns[: place + 1], tokenize=False)
        if not (after.startswith(before) and whole.startswith(after)):
            raise ValueError(
                "The chat template rewrites earlier turns, so the assistant's words cannot be found; put them between "
                "{% generation %} and {% endgeneration %} in it."
            )
        last = after.rfind(str(tokenizer.eos_token), len(before))  # what follows the end is no answer any more
        spans.append((len(before), last + len(str(tokenizer.eos_token)) if last >= 0 else len(after)))
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    inside = [any(start <= first < end for start, end in spans) for first, _ in encoded["offset_mapping"]]
    return encoded["input_ids"], [token if mark else -100 for token, mark in zip(encoded["input_ids"], inside)]


def check_conversations(splits: Mapping[str, "Dataset"], column: str) -> None:
    """Raise `ValueError` for a row that is no conversation with an answer."""
    rows = ((split, row) for split in splits for row in enumerate(splits[split][column]))
    for split, (number, messages) in rows:
        roles = [message["role"] for message in messages or ()]
        if "assistant" not in roles:
            raise ValueError(f"Row {number} of {split}: {column!r} has no turn of the assistant to learn from.")
        for message in messages:
            if message["role"] not in ROLES or message["content"] is None:
                raise ValueError(
                    f"Row {number} of {split}: a message needs content and one of the roles {', '.join(ROLES)}, got "
                    f"{message!r}."
                )


def texts(dataset: "Dataset", column: str) -> Iterable[str]:
    """What was said, for training a tokenizer."""
    for batch in dataset.iter(1000):
        yield from (message["content"] for messages in batch[column] for message in messages)


def pack_conversations(
    dataset: "Dataset",
    tokenizer: "PreTrainedTokenizerBase",
    block_size: int,
    packing: Packing | str = "documents",
    column: str = "messages",
    num_proc: int | None = None,
    description: str = "Tokenizing",
) -> "Dataset":
    """Encode conversations into rows of at most `block_size` tokens whose labels are the assistant's words.

    Args:
        dataset: With a column of conversations. What does not fit into a row is cut off at the end; conversations whose
            answers are all cut off are left out.
        tokenizer: With a chat template.
        block_size: Most tokens of a row.
        packing: "documents" fills rows with whole conversations, kept apart by `position_ids`; "none" makes a row of
            each; "blocks" is refused, as it would cut conversations in two.
        column: Name of the column.
        num_proc: Processes to use.
        description: What the progress bar says.

    Returns:
        A dataset with `input_ids`, `labels`, and `position_ids` for "documents".

    Raises:
        ValueError: An unknown packing, or no answer that fits.
    """
    if packing not in ("documents", "none"):
        raise ValueError(f"packing={packing!r} must be 'documents' or 'none' for conversations.")

    def encode(batch: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
        pieces = []
        for messages in batch[column]:
            ids, labels = (part[:block_size] for part in encode_conversation(tokenizer, messages))
            if any(label != -100 for label in labels[1:]):
                pieces.append((ids, [-100, *labels[1:]]))  # nothing comes before the first token
        columns = {"input_ids": [ids for ids, _ in pieces], "labels": [labels for _, labels in pieces]}
        return columns if packing == "none" else fill_rows(columns, block_size)

    nothing = f"No answer of the assistant begins within {block_size} tokens; give a longer block_size."
    return map_to_rows(dataset, encode, nothing, num_proc, description)
