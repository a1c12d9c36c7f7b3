"""What a forward takes besides tensors of its own: keywords of heads, of losses, of kernels, and those nobody knows."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..configuration.component import did_you_mean

# Arguments that only transformers' attention functions read; they pass through the context.
KERNEL_KEYS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "position_ids")
LOSS_KEYS = ("num_items_in_batch", "shift_labels")
# What other models' tokenizers and transformers' own callers pass, and nothing here needs. The tokenizer with which
# `generate` looks for stop strings reaches the forward of models too.
IGNORED_KEYS = ("token_type_ids", "return_dict", "cache_position", "tokenizer")
# Known to heads and to the stack by name; for messages.
NAMED_KEYS = (
    "input_ids", "attention_mask", "position_ids", "cache", "past_key_values", "inputs_embeds", "labels", "use_cache",
    "output_hidden_states", "output_attentions", "output_max_logits", "seq_idx", "logits_to_keep", "start_positions",
    "end_positions",
)  # fmt: skip


def for_stack(kwargs: Mapping[str, Any], **fixed: Any) -> dict[str, Any]:
    """What a head passes on to its stack: all but the arguments of losses, whatever `config.return_dict` says.

    Args:
        kwargs: What the head was given beyond its own arguments.
        fixed: What the head decides; it replaces what the caller says.
    """
    own = {key: value for key, value in kwargs.items() if key not in LOSS_KEYS}
    return {**own, **fixed, "return_dict": True}


def check_keywords(kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError for keywords of `forward` that nobody reads, unless they are None."""
    for key, value in kwargs.items():
        if value is not None and key not in (*KERNEL_KEYS, *IGNORED_KEYS):
            known = {*NAMED_KEYS, *KERNEL_KEYS, *LOSS_KEYS, "token_type_ids"}
            raise TypeError(f"forward() has no argument {key!r} here" + did_you_mean(key, known))


def looked_up(name: str, ids: Tensor, size: int, look_up: Callable[[], Tensor]) -> Tensor:
    """What `look_up` returns; its IndexError becomes a ValueError that says which `ids` are not below `size`."""
    if torch.compiler.is_compiling():
        return look_up()
    try:
        return look_up()
    except IndexError as error:
        wrong = ids[((ids < 0) & (ids != -100)) | (ids >= size)]
        if not len(wrong):
            raise
        raise ValueError(
            f"{name} must be from 0 to {size - 1} (vocab_size={size}), got {wrong[:5].tolist()}. A tokenizer may have "
            "more tokens than the model: if so, call model.resize_token_embeddings(len(tokenizer))."
        ) from error
