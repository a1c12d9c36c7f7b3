"""Data for training: an embedded corpus, tokenizer training, packing, and collators."""

from .collators import CausalLMCollator, MaskedLMCollator, MaskingCallback, MaskRateSchedule, mask_once
from .corpus import Corpus, cache_directory, embedded_corpus, read_corpus
from .tokenization import pack, train_tokenizer

__all__ = [
    "CausalLMCollator",
    "Corpus",
    "MaskRateSchedule",
    "MaskedLMCollator",
    "MaskingCallback",
    "cache_directory",
    "embedded_corpus",
    "mask_once",
    "pack",
    "read_corpus",
    "train_tokenizer",
]
