"""One tiny model and one labelled batch for every head of the family."""

from typing import Any

import torch
import transformers
from torch import Tensor

from .tiny import tiny_config, tokens

NUM_LABELS, CHOICES = 3, 2


def head_model(auto_name: str, pattern: str | list[str], seed: int = 0, **changes: Any) -> Any:
    """The model transformers' class `auto_name` builds, in training mode."""
    torch.manual_seed(seed)
    config = tiny_config(pattern, **{"num_labels": NUM_LABELS, **changes})
    return getattr(transformers, auto_name).from_config(config).train()


def head_batch(auto_name: str, rows: int, length: int) -> dict[str, Tensor]:
    """Arguments for a loss, rows with unequal numbers of pads and labels; without labels for a model without a head."""
    shape = (rows, CHOICES, length) if auto_name.endswith("MultipleChoice") else (rows, length)
    ids = tokens(*shape)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, ..., length - row % (length // 2) :] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    generator = torch.Generator().manual_seed(3)
    if auto_name.endswith(("CausalLM", "MaskedLM")):
        batch["labels"] = ids.masked_fill(mask == 0, -100)
    elif auto_name.endswith("TokenClassification"):
        batch["labels"] = torch.randint(NUM_LABELS, shape, generator=generator).masked_fill(mask == 0, -100)
    elif auto_name.endswith("QuestionAnswering"):
        batch["start_positions"] = torch.randint(length // 2, (rows,), generator=generator)
        batch["end_positions"] = batch["start_positions"] + 1
    elif auto_name.endswith("MultipleChoice"):
        batch["labels"] = torch.randint(CHOICES, (rows,), generator=generator)
    elif auto_name.endswith("SequenceClassification"):
        batch["labels"] = torch.randint(NUM_LABELS, (rows,), generator=generator)
    return batch
