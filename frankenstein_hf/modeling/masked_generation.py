"""Writing with a model that fills in masks: the surest places first, a few at a time, none of them twice.

Shapes: B batch, T tokens, V vocabulary.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .ops.numerics import at_least_fp32

ORDERS = ("top_probability", "margin", "random")


@torch.no_grad()
def fill_masks(
    logits_of: Callable[[Tensor], Tensor],
    input_ids: Tensor,
    mask_token_id: int,
    attention_mask: Tensor | None = None,
    tokens_per_step: int = 1,
    temperature: float = 1.0,
    order: str = "top_probability",
    suppress_tokens: Iterable[int] = (),
    generator: torch.Generator | None = None,
) -> Tensor:
    """Replace every mask token; arguments as in `FrankensteinForMaskedLM.generate_masked`, and:

    Args:
        logits_of: Ids [B, T] -> logits [B, T, V].
        mask_token_id: What is replaced, and never written.
    """
    ids = input_ids.clone()
    never = sorted({mask_token_id, *suppress_tokens})
    open_places = ids == mask_token_id
    if attention_mask is not None:
        open_places &= attention_mask.bool()
    while bool(open_places.any()):
        logits = at_least_fp32(logits_of(ids)[open_places])  # [M, V]
        logits[:, never] = -torch.inf
        written, surety = _choose(logits, temperature, order, generator)
        # as many of each row as one step may fill, the surest first; ties go to the left
        score = torch.full(ids.shape, -torch.inf, dtype=surety.dtype, device=ids.device)
        score[open_places] = surety
        rank = score.sort(dim=1, descending=True, stable=True).indices.argsort(dim=1)
        chosen = open_places & (rank < tokens_per_step)
        proposal = ids.clone()
        proposal[open_places] = written
        ids = torch.where(chosen, proposal, ids)
        open_places &= ~chosen
    return ids


def _choose(logits: Tensor, temperature: float, order: str, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """What would be written at each place [M], and how early, [M]: by the probabilities at temperature one."""
    probabilities = logits.softmax(-1)
    if order == "random":
        surety = torch.rand(len(logits), generator=generator, device=logits.device, dtype=logits.dtype)
    else:
        top = probabilities.topk(min(2, probabilities.shape[1]), dim=1).values
        surety = top[:, 0] - top[:, 1] if order == "margin" and top.shape[1] > 1 else top[:, 0]
    if temperature == 0:
        return logits.argmax(-1), surety
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0], surety


def check_arguments(
    config: Any, input_ids: Tensor, tokens_per_step: int, temperature: float, order: str, suppress_tokens: Iterable[int]
) -> int:
    """The mask token; raises ValueError where `fill_masks` could not do what was asked."""
    if config.mask_token_id is None:
        raise ValueError(
            "generate_masked() has to know which token is a mask: set model.config.mask_token_id = "
            "tokenizer.mask_token_id."
        )
    if input_ids.dim() != 2 or input_ids.is_floating_point():
        raise ValueError(f"input_ids must be whole numbers [B, T], got {list(input_ids.shape)} {input_ids.dtype}.")
    if not isinstance(tokens_per_step, int) or tokens_per_step < 1:
        raise ValueError(f"tokens_per_step={tokens_per_step!r} must be a whole number from 1 on.")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature!r} must be 0 (always the likeliest token) or positive.")
    if order not in ORDERS:
        raise ValueError(f"order={order!r} must be one of {', '.join(ORDERS)}.")
    never = {config.mask_token_id, *suppress_tokens}
    if wrong := sorted(token for token in never if not 0 <= token < config.vocab_size):
        raise ValueError(f"suppress_tokens must be from 0 to {config.vocab_size - 1}, got {wrong[:5]}.")
    if len(never) >= config.vocab_size:
        raise ValueError("suppress_tokens leaves no token to write.")
    return int(config.mask_token_id)
