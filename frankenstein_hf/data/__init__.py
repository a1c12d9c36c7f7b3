"""Data for training: an embedded corpus, tokenizer training, packing, and collators."""

from .collators import (
    CausalLMCollator,
    DiffusionCollator,
    MaskedLMCollator,
    MaskingCallback,
    MaskRateSchedule,
    mask_once,
)
from .conversations import encode_conversation, pack_conversations
from .corpus import Corpus, cache_directory, embedded_corpus, read_corpus
from .dna import FastaRecord, dna_tokenizer, read_fasta
from .mask_rates import RATE_DISTRIBUTIONS, GeometricNoise
from .tokenization import pack, train_tokenizer

__all__ = [
    "RATE_DISTRIBUTIONS",
    "CausalLMCollator",
    "Corpus",
    "DiffusionCollator",
    "FastaRecord",
    "GeometricNoise",
    "MaskRateSchedule",
    "MaskedLMCollator",
    "MaskingCallback",
    "cache_directory",
    "dna_tokenizer",
    "embedded_corpus",
    "encode_conversation",
    "mask_once",
    "pack",
    "pack_conversations",
    "read_corpus",
    "read_fasta",
    "train_tokenizer",
]
