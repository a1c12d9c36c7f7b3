"""Data for training: an embedded corpus, tokenizer training, packing, and collators."""

from .collators import CausalLMCollator, MaskedLMCollator, MaskingCallback, MaskRateSchedule, mask_once
from .conversations import encode_conversation, pack_conversations
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
    "encode_conversation",
    "mask_once",
    "pack",
    "pack_conversations",
    "read_corpus",
    "train_tokenizer",
]
