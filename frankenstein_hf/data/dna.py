"""Nucleotide sequences: a tokenizer of single letters, and the FASTA format."""

import gzip
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .tokenization import MLM_TOKENS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# IUPAC's codes: the bases, then codes for sets of them (R is A or G, …, N is any); U is RNA's T, - a gap
BASES = "ACGT"
IUPAC = BASES + "URYSWKMBDHVN-"


def dna_tokenizer(model_max_length: int = 2048) -> "PreTrainedTokenizerFast":
    """A tokenizer whose tokens are the IUPAC codes of nucleotides, for masked models.

    Lower case, by which FASTA files mark repeats, is read as upper case. A sequence becomes `[CLS] … [SEP]`; letters
    that are no code become `[UNK]`, and decoding joins letters without spaces.

    Args:
        model_max_length: Longest sequence of the model it is for.

    Returns:
        A fast tokenizer of transformers: `save_pretrained` writes a plain `tokenizer.json` that needs nothing from
        this package. For example `dna_tokenizer()("acgN").input_ids`.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate([*MLM_TOKENS.values(), *IUPAC])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=MLM_TOKENS["unk_token"]))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace(letter.lower(), letter) for letter in IUPAC if letter.isalpha()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=model_max_length,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        **MLM_TOKENS,
    )


class FastaRecord(NamedTuple):
    """One sequence of a FASTA file.

    Attributes:
        name: The first word behind ">".
        description: The rest of that line.
        sequence: Its letters as they are in the file, lines joined.
    """

    name: str
    description: str
    sequence: str


def read_fasta(path: str | os.PathLike) -> Iterator[FastaRecord]:
    """The sequences of a FASTA file, one after the other, so that a genome need not fit into memory at once.

    Args:
        path: Text, or gzip if the name ends in ".gz". Empty lines and lines that begin with ";" are skipped.

    Raises:
        ValueError: Letters before the first ">", a name that is missing, or characters that are no IUPAC code; the
            message has the number of the line.
    """
    path = Path(path)
    header: str | None = None
    parts: list[str] = []
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            line = line.strip()
            if not line or line.startswith(";"):
                continue
            if line.startswith(">"):
                if header is not None:
                    yield _record(header, parts)
                header, parts = line[1:].strip(), []
                if not header:
                    raise ValueError(f"{path}, line {number}: a sequence without a name; write it behind '>'.")
                continue
            if header is None:
                raise ValueError(f"{path}, line {number}: FASTA begins with a line '>name', got {line[:20]!r}.")
            wrong = sorted(set(line.upper()) - set(IUPAC))
            if wrong:
                raise ValueError(
                    f"{path}, line {number}: {', '.join(map(repr, wrong[:5]))} is no code of a nucleotide; allowed are "
                    f"{IUPAC} in either case."
                )
            parts.append(line)
    if header is not None:
        yield _record(header, parts)


def _record(header: str, parts: list[str]) -> FastaRecord:
    name, _, description = header.partition(" ")
    return FastaRecord(name, description.strip(), "".join(parts))
