"""Training a small byte-level BPE tokenizer and turning text into training rows."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

Objective = Literal["mlm", "clm"]
Packing = Literal["blocks", "documents", "none"]

BYTES = 256
MLM_TOKENS = {
    "pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"
}  # fmt: skip
CLM_TOKENS = {"pad_token": "<|pad|>", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int = 4096,
    objective: Objective = "mlm",
    model_max_length: int = 2048,
    show_progress: bool = False,
    add_prefix_space: bool = False,
    chat_template: str | None = None,
    more_tokens: Sequence[str] = (),
) -> "PreTrainedTokenizerFast":
    """Train a byte-level BPE tokenizer that transformers' pipelines can use.

    Any text can be encoded and decoded without loss. For "mlm" a sequence is `[CLS] … [SEP]`, and `[MASK]` takes the
    space before it along, so that `a [MASK] b` asks for a word with its space; for "clm" nothing is added, and
    `<|endoftext|>` ends a document.

    Args:
        texts: What to train on.
        vocab_size: Most tokens, specials and the 256 bytes included; a small text may yield fewer.
        objective: "mlm" or "clm".
        model_max_length: Longest sequence of the model it is for.
        show_progress: Whether to show progress bars.
        add_prefix_space: Whether a text gets a space before its first word, so that words given one by one are
            encoded as they are inside a text.
        chat_template: Template of conversations that the tokenizer carries.
        more_tokens: Further special tokens, such as those of the template.

    Raises:
        ValueError: An unknown objective, a vocabulary smaller than the bytes and specials, or no text.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    if objective not in ("mlm", "clm"):
        raise ValueError(f"objective={objective!r} must be 'mlm' or 'clm'.")
    names = MLM_TOKENS if objective == "mlm" else CLM_TOKENS
    specials = list(dict.fromkeys((*names.values(), *more_tokens)))
    if vocab_size < BYTES + len(specials):
        raise ValueError(f"vocab_size={vocab_size} must be at least {BYTES + len(specials)}: all bytes and specials.")
    tokenizer = Tokenizer(models.BPE(unk_token=names.get("unk_token")))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, lstrip=token == "[MASK]") for token in specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=show_progress,
    )
    empty = True

    def counted() -> Iterable[str]:
        nonlocal empty
        for text in texts:
            empty = empty and not text
            yield text

    tokenizer.train_from_iterator(counted(), trainer)
    if empty:
        raise ValueError("There is no text to train a tokenizer on.")
    if objective == "mlm":
        ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=ends
        )
    else:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    # the objects themselves: a plain "[MASK]" would replace the one that takes its space along
    objects = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    added = {name: objects[token] for name, token in names.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=model_max_length,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        **({"chat_template": chat_template} if chat_template else {}),
        **({"extra_special_tokens": [objects[token] for token in more_tokens]} if more_tokens else {}),
        **added,
    )


def words_begin_with_a_space(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Have a byte-level tokenizer encode words given one by one as it does inside a text; others are left alone."""
    from tokenizers import pre_tokenizers

    splitter = getattr(getattr(tokenizer, "backend_tokenizer", None), "pre_tokenizer", None)
    if isinstance(splitter, pre_tokenizers.ByteLevel):
        splitter.add_prefix_space = True  # the tokenizer's own, not a copy


def pack(
    dataset: "Dataset",
    tokenizer: "PreTrainedTokenizerBase",
    block_size: int,
    packing: Packing | str = "blocks",
    text_column: str = "text",
    num_proc: int | None = None,
    description: str = "Tokenizing",
) -> "Dataset":
    """Encode a column of text into rows of at most `block_size` tokens.

    Args:
        dataset: With a column of text, a document each. Empty documents are left out.
        tokenizer: Its own special tokens surround each document; one that adds none (a GPT's) gets its end token
            behind each document.
        block_size: Most tokens of a row.
        packing: "blocks" joins all documents and cuts the stream into rows of exactly `block_size` (what is left at the
            end of a thousand documents is dropped); "documents" fills rows with whole documents, longer ones cut, and
            `position_ids` that restart at each, which the models of this package keep apart exactly; "none" makes one
            row of each document or piece of one.
        text_column: Name of the column.
        num_proc: Processes to use.
        description: What the progress bar says.

    Returns:
        A dataset with `input_ids`, and `position_ids` for "documents".

    Raises:
        ValueError: An unknown packing, a block too short for the special tokens, or text shorter than one block.
    """
    if packing not in ("blocks", "documents", "none"):
        raise ValueError(f"packing={packing!r} must be 'blocks', 'documents' or 'none'.")
    added = tokenizer.num_special_tokens_to_add()
    if block_size <= added + 1:
        raise ValueError(f"block_size={block_size} is too short; at least {added + 2} tokens are needed.")
    end = [tokenizer.eos_token_id] if added == 0 and tokenizer.eos_token_id is not None else []

    def encode(batch: dict[str, list[str | None]]) -> dict[str, list[list[int]]]:
        texts = [text for text in batch[text_column] if text]
        if not texts:
            return {"input_ids": [], "position_ids": []} if packing == "documents" else {"input_ids": []}
        if packing == "blocks":
            stream = [token for ids in tokenizer(texts, verbose=False)["input_ids"] for token in ids + end]
            return {"input_ids": [stream[i : i + block_size] for i in _starts(len(stream), block_size)]}
        if end:
            documents = [ids + end for ids in tokenizer(texts, verbose=False)["input_ids"]]
            pieces = [ids[i : i + block_size] for ids in documents for i in range(0, len(ids), block_size)]
        else:  # every piece gets its own special tokens
            cut = {"truncation": True, "max_length": block_size, "return_overflowing_tokens": True}
            pieces = tokenizer(texts, **cut)["input_ids"]
        return {"input_ids": pieces} if packing == "none" else fill_rows({"input_ids": pieces}, block_size)

    nothing = f"The text is shorter than one block of {block_size} tokens; give more or a smaller block."
    return map_to_rows(dataset, encode, nothing, num_proc, description)


def map_to_rows(
    dataset: "Dataset",
    encode: Callable[[dict[str, list[Any]]], dict[str, list[list[int]]]],
    nothing: str,
    num_proc: int | None,
    description: str,
) -> "Dataset":
    """The rows that `encode` makes of batches. Raises ValueError with the words `nothing` where there are none."""
    rows = dataset.map(encode, batched=True, remove_columns=dataset.column_names, num_proc=num_proc, desc=description)
    if len(rows) == 0:
        raise ValueError(nothing)
    return rows


def _starts(length: int, block_size: int) -> range:
    return range(0, length - length % block_size, block_size)


def rows_of_pieces(lengths: Sequence[int], block_size: int) -> list[list[int]]:
    """Rows of consecutive pieces, as many as fit: for each row the numbers of its pieces."""
    rows: list[list[int]] = []
    room = 0
    for piece, length in enumerate(lengths):
        if not rows or length > room:
            rows.append([])
            room = block_size
        rows[-1].append(piece)
        room -= length
    return rows


def fill_rows(columns: dict[str, list[list[int]]], block_size: int) -> dict[str, list[list[int]]]:
    """Rows of at most `block_size` tokens that hold whole pieces, and `position_ids` that begin anew at each.

    Args:
        columns: "input_ids" and others beside them, a list a piece.
    """
    pieces = columns["input_ids"]
    rows = rows_of_pieces([len(piece) for piece in pieces], block_size)
    filled = {
        name: [[value for piece in row for value in values[piece]] for row in rows] for name, values in columns.items()
    }
    return {
        **filled,
        "position_ids": [[place for piece in row for place in range(len(pieces[piece]))] for row in rows],
    }
