"""Tiny models for tests: odd sizes, weights large enough that every effect shows."""

from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

import frankenstein_hf as fhf
from frankenstein_hf.configuration.registries import MIXERS

VOCAB = 61
ALL_MIXERS = MIXERS.names()
CAUSAL = [spec.name for spec in MIXERS if spec.causal]
BIDIRECTIONAL = [spec.name for spec in MIXERS if spec.bidirectional]
# every mixer in every mode its spec claims
MODES = [(name, True) for name in sorted(CAUSAL)] + [(name, False) for name in sorted(BIDIRECTIONAL)]


def tiny_config(pattern: str | list[str], **changes: Any) -> fhf.FrankensteinConfig:
    pattern = [pattern] if isinstance(pattern, str) else pattern
    values: dict[str, Any] = dict(
        vocab_size=VOCAB,
        hidden_size=20,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=10,
        intermediate_size=24,
        num_hidden_layers=len(pattern),
        layer_pattern=pattern,
        mixer_params={name: dict(MIXERS.get(name).small_params) for name in pattern},
        initializer_range=0.3,
        max_position_embeddings=512,
    )
    return fhf.FrankensteinConfig(**values | changes)


def tiny_model(pattern: str | list[str], is_causal: bool = True, seed: int = 0, **changes: Any):
    """A CausalLM or MaskedLM in eval mode."""
    torch.manual_seed(seed)
    model_class = fhf.FrankensteinForCausalLM if is_causal else fhf.FrankensteinForMaskedLM
    return model_class(tiny_config(pattern, **changes)).eval()


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, shape, generator=generator)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A stock fast tokenizer for `VOCAB` words: "t5" has the id 5."""
    words = ["[PAD]", "[UNK]", "[MASK]", *(f"t{i}" for i in range(3, VOCAB))]
    model = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    model.pre_tokenizer = Whitespace()
    # the pre-tokenizer would split a plain "[MASK]"; the fast tokenizer adds it as a special token
    return PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]", model_max_length=64
    )


def assert_near(actual: torch.Tensor, expected: torch.Tensor, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.double(), expected.double()
    if torch.equal(actual, expected):  # zeros too
        return 0.0
    return ((actual - expected).square().mean().sqrt() / expected.square().mean().sqrt()).item()
