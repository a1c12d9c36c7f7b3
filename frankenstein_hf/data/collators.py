"""Batches for masked and causal language modelling: padded, or packed without padding.

A row with `position_ids` holds several documents, at whose starts they restart (`pack(…, packing="documents")`). Such
rows are joined into one row without padding, as transformers' `DataCollatorWithFlattening` does with documents.
"""

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers import TrainerCallback

from ..configuration.values import did_you_mean
from .mask_rates import RATE_DISTRIBUTIONS, GeometricNoise

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase, TrainerControl, TrainerState, TrainingArguments

Features = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class MaskRateSchedule:
    """A mask rate that moves from `start` at the first step to `end` at the last.

    Many masks early teach the common words fast, fewer later leave more context to learn from.
    """

    start: float
    end: float
    shape: Literal["linear", "cosine"] = "linear"

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            _check_rate(getattr(self, name), name)
        if self.shape not in ("linear", "cosine"):
            raise ValueError(f"shape={self.shape!r} must be 'linear' or 'cosine'.")

    def __call__(self, step: int, total_steps: int) -> float:
        """The rate of optimizer step `step`, counted from 0."""
        progress = min(max(step / max(total_steps - 1, 1), 0.0), 1.0)
        if self.shape == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        return self.start + (self.end - self.start) * progress


@dataclass
class MaskedLMCollator:
    """Choose tokens to predict and hide them, at a fixed or a scheduled rate.

    Of every document the same fraction is chosen: `mask_rate` times its ordinary tokens, rounded, at least one.
    Special tokens and pads are never chosen. Of the chosen, 80 % become the mask token, 10 % a random ordinary token
    and 10 % stay, as in BERT (arXiv:1810.04805).

    Masks are a function of `seed` and the number of the batch, not of global random state: they change from batch to
    batch, and a resumed run sees those an uninterrupted one would have. With the stock `Trainer`, pass
    `callbacks=[collator.callback()]`, which tells the collator where training stands, also in data-loader workers.
    Rows that already carry labels are batched as they are: `mask_once` gives an evaluation set masks that stay.

    Args:
        tokenizer: With a mask token.
        mask_rate: Fraction in [0, 1], or a function of (step, total_steps) such as `MaskRateSchedule`.
        mask_replace_prob, random_replace_prob: Fractions of the chosen tokens that become the mask token, or a random
            one.
        pad_to_multiple_of: Pad rows to a multiple of this length.
        seed: Of the masks.
        total_steps: What a schedule is told; the callback fills it in.

    Raises:
        ValueError: No mask token, or a rate out of range.
    """

    tokenizer: "PreTrainedTokenizerBase"
    mask_rate: float | Callable[[int, int], float] = 0.15
    mask_replace_prob: float = 0.8
    random_replace_prob: float = 0.1
    pad_to_multiple_of: int | None = None
    seed: int = 0
    total_steps: int | None = None
    accumulation: int = field(default=1, init=False)
    # [pass over the data, number of its first batch]: shared with workers that outlive a pass
    clock: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.long), init=False, repr=False)
    calls: int = field(default=0, init=False, repr=False)  # batches made in this pass, by this process
    _pass: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.tokenizer.mask_token_id is None:
            raise ValueError(f"The tokenizer ({type(self.tokenizer).__name__}) has no mask token; MLM needs one.")
        if not callable(self.mask_rate):
            _check_rate(self.mask_rate, "mask_rate")
        _check_rate(self.mask_replace_prob, "mask_replace_prob")
        _check_rate(self.random_replace_prob, "random_replace_prob")
        if self.mask_replace_prob + self.random_replace_prob > 1:
            raise ValueError("mask_replace_prob and random_replace_prob must not add up to more than 1.")
        special = set(self.tokenizer.all_special_ids)
        self._special = torch.tensor(sorted(special))
        self._ordinary = torch.tensor([token for token in range(len(self.tokenizer)) if token not in special])

    def callback(self) -> "MaskingCallback":
        """What tells this collator where training stands; for `Trainer(callbacks=[…])`."""
        return MaskingCallback(self)

    def rate_at(self, step: int) -> float:
        """The mask rate of optimizer step `step`, counted from 0."""
        if not callable(self.mask_rate):
            return self.mask_rate
        if self.total_steps is None:
            raise ValueError(
                "A scheduled mask rate needs the number of steps: pass callbacks=[collator.callback()] to the Trainer, "
                "or total_steps to the collator."
            )
        rate = self.mask_rate(step, self.total_steps)
        _check_rate(rate, f"mask_rate({step}, {self.total_steps})")
        return rate

    def __call__(self, features: Features, return_tensors: str = "pt") -> dict[str, Tensor]:
        """A batch: `input_ids`, `labels` (−100 where nothing is predicted), and `attention_mask` or `position_ids`."""
        if return_tensors != "pt":
            raise ValueError(f"return_tensors={return_tensors!r} must be 'pt'.")
        batch, documents = _batch(features, self.tokenizer, self.pad_to_multiple_of)
        special = batch.pop("special_tokens_mask", None)
        if "labels" not in batch:
            number = self._next_batch()
            generator = torch.Generator().manual_seed(_seed(self.seed, os.environ.get("RANK", "0"), number))
            maskable = self._maskable(batch, special)
            batch |= self._hide(batch["input_ids"], maskable, documents, number // self.accumulation, generator)
        return batch

    def _hide(
        self, input_ids: Tensor, maskable: Tensor, documents: Tensor, step: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """What masking makes of a batch of optimizer step `step`: masked ids, labels, and what the loss needs else."""
        ids, labels = self.mask(input_ids, maskable, documents, self.rate_at(step), generator)
        return {"input_ids": ids, "labels": labels}

    def mask(
        self, input_ids: Tensor, maskable: Tensor, documents: Tensor, rate: float, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Masked ids and labels, both [B, T].

        Args:
            input_ids: [B, T].
            maskable: [B, T] True at tokens that may be chosen.
            documents: [B, T] number of the document a token belongs to, rising through the flattened batch.
            rate: Fraction of each document's maskable tokens to choose.
            generator: Source of randomness.
        """
        shape, ids, maskable, documents = input_ids.shape, input_ids.flatten(), maskable.flatten(), documents.flatten()
        count = int(documents.max()) + 1
        room = torch.zeros(count, dtype=torch.long).index_add_(0, documents, maskable.long())
        wanted = (room.double() * rate).round().long().clamp_min(1 if rate > 0 else 0).minimum(room)
        # a random order within every document, its maskable tokens first; the first `wanted` of them are chosen
        score = torch.rand(ids.shape, generator=generator, dtype=torch.double) + (~maskable).double() + 2 * documents
        order = score.argsort()
        length = torch.bincount(documents, minlength=count)
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(ids)) - (length.cumsum(0) - length)[documents[order]]
        chosen = rank < wanted[documents]

        ids, labels = self._replace(ids, chosen, generator)
        return ids.view(shape), labels.view(shape)

    def _replace(self, ids: Tensor, chosen: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """`ids` with the chosen ones hidden, swapped or left as they are, and the labels."""
        labels = torch.where(chosen, ids, -100)
        draw = torch.rand(ids.shape, generator=generator)
        replacement = self._ordinary[torch.randint(len(self._ordinary), ids.shape, generator=generator)]
        hidden = chosen & (draw < self.mask_replace_prob)
        swapped = chosen & ~hidden & (draw < self.mask_replace_prob + self.random_replace_prob)
        return torch.where(swapped, replacement, ids).masked_fill(hidden, self.tokenizer.mask_token_id), labels

    def _maskable(self, batch: Mapping[str, Tensor], special: Tensor | None) -> Tensor:
        maskable = ~torch.isin(batch["input_ids"], self._special)
        if special is not None:
            maskable &= special == 0
        if "attention_mask" in batch:
            maskable &= batch["attention_mask"] != 0
        return maskable

    def _next_batch(self) -> int:
        """The number of this batch in the whole training, in whichever process it is made."""
        if self._pass != int(self.clock[0]):
            self._pass, self.calls = int(self.clock[0]), 0
        worker = torch.utils.data.get_worker_info()
        first = int(self.clock[1])
        number = first + (self.calls if worker is None else self.calls * worker.num_workers + worker.id)
        self.calls += 1
        return number


@dataclass
class DiffusionCollator(MaskedLMCollator):
    """Hide tokens at a rate that every document draws for itself, as masked diffusion models are trained.

    Each ordinary token of a document is hidden with the document's rate, by itself. Hidden tokens become the mask
    token. Everything else is as in `MaskedLMCollator`, whose `mask_rate` is not used.

    Args:
        schedule: A name of `RATE_DISTRIBUTIONS`, whose labels are the hidden tokens; or `GeometricNoise(…)` for models
            with `masked_lm_loss="score_entropy"`: labels are then all ordinary tokens, and the batch has `noise` and
            `noise_rate` [B, T], the noise of each token's document and its speed.
        low, high: Rates drawn below or above are moved there (0.05 and 0.95 in Odyssey's program). Not with
            `GeometricNoise`, whose weights belong to the rates as drawn.
        at_least_one: Hide one token of documents in which the draws hid none, so that every document has a loss. Not
            with `GeometricNoise` either.

    Raises:
        ValueError: An unknown schedule, or a range that is none.
    """

    mask_replace_prob: float = 1.0
    random_replace_prob: float = 0.0
    schedule: str | GeometricNoise = "betalinear30"
    low: float = 0.0
    high: float = 1.0
    at_least_one: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.schedule, str) and self.schedule not in RATE_DISTRIBUTIONS:
            raise ValueError(f"Unknown schedule {self.schedule!r}" + did_you_mean(self.schedule, RATE_DISTRIBUTIONS))
        if not 0 <= self.low <= self.high <= 1:
            raise ValueError(f"low={self.low} and high={self.high} must be 0 ≤ low ≤ high ≤ 1.")
        if isinstance(self.schedule, GeometricNoise) and (self.low, self.high) != (0.0, 1.0):
            raise ValueError("low and high would make the weights of GeometricNoise wrong; set its sigmas instead.")

    def _hide(
        self, input_ids: Tensor, maskable: Tensor, documents: Tensor, step: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        count = int(documents.max()) + 1
        if not isinstance(self.schedule, str):
            noise = self.schedule.draw(count, generator)
            hidden = maskable & (_uniform(input_ids, generator) < noise.rate[documents])
            return {
                "input_ids": input_ids.masked_fill(hidden, self.tokenizer.mask_token_id),
                "labels": input_ids.masked_fill(~maskable, -100),
                "noise": noise.total[documents].float(),
                "noise_rate": noise.speed[documents].float(),
            }
        rates = RATE_DISTRIBUTIONS[self.schedule].draw(count, generator).clamp(self.low, self.high)
        draw = _uniform(input_ids, generator).masked_fill(~maskable, 2.0)
        chosen = draw < rates[documents]
        if self.at_least_one:
            smallest = torch.full((count,), 2.0, dtype=draw.dtype).scatter_reduce_(
                0, documents.flatten(), draw.flatten(), "amin"
            )
            chosen |= (draw == smallest[documents]) & maskable
        ids, labels = self._replace(input_ids.flatten(), chosen.flatten(), generator)
        return {"input_ids": ids.view_as(input_ids), "labels": labels.view_as(input_ids)}


def _uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(like.shape, generator=generator, dtype=torch.double)


class MaskingCallback(TrainerCallback):
    """Tells a `MaskedLMCollator` how long training is and, at each pass over the data, the number of its next batch.

    The collator counts from there itself: batches are made ahead of the step they belong to, in workers far ahead.
    """

    def __init__(self, collator: MaskedLMCollator) -> None:
        self.collator = collator
        self._calls = 0

    def on_train_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """Learn the length of training; share the clock with workers to come."""
        self.collator.total_steps = state.max_steps
        self.collator.accumulation = args.gradient_accumulation_steps
        if args.dataloader_num_workers > 0:
            self.collator.clock.share_memory_()

    def on_epoch_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """Set the clock; a resumed pass starts behind the batches that were trained on before."""
        self.collator.clock[1] = state.global_step * args.gradient_accumulation_steps
        self.collator.clock[0] += 1

    def on_step_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """Remember the count, in case an evaluation without fixed masks follows."""
        self._calls = self.collator.calls

    def on_evaluate(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """Batches of an evaluation do not count."""
        self.collator.calls = self._calls


@dataclass
class CausalLMCollator:
    """Batches whose labels are the tokens themselves; pads and the first tokens of packed documents have no label."""

    tokenizer: "PreTrainedTokenizerBase"
    pad_to_multiple_of: int | None = None

    def __call__(self, features: Features, return_tensors: str = "pt") -> dict[str, Tensor]:
        """A batch: `input_ids`, `labels`, and `attention_mask` or `position_ids`."""
        if return_tensors != "pt":
            raise ValueError(f"return_tensors={return_tensors!r} must be 'pt'.")
        batch, documents = _batch(features, self.tokenizer, self.pad_to_multiple_of)
        batch.pop("special_tokens_mask", None)
        if "labels" not in batch:
            labels = batch["input_ids"].clone()
            if "attention_mask" in batch:
                labels.masked_fill_(batch["attention_mask"] == 0, -100)
            batch["labels"] = labels
        starts = torch.ones_like(documents, dtype=torch.bool)
        starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
        # here too, where labels were given: a loss that Trainer computes by itself knows nothing of documents
        batch["labels"] = batch["labels"].masked_fill(starts, -100)
        return batch


def mask_once(
    dataset: "Dataset",
    collator: MaskedLMCollator,
    mask_rate: float = 0.15,
    seed: int = 0,
    description: str = "Masking",
) -> "Dataset":
    """`dataset` with the columns `input_ids` and `labels` of one draw of masks, so that losses can be compared.

    A row's mask depends on the seed, its number and its tokens only.

    Args:
        dataset: Rows of `input_ids`, and `position_ids` if they are packed.
        collator: How to mask; its own rate and seed are not used.
        mask_rate: Fraction in [0, 1].
        seed: Of the masks.
        description: What the progress bar says.
    """
    _check_rate(mask_rate, "mask_rate")

    def masked(row: dict[str, Any], number: int) -> dict[str, Any]:
        batch, documents = _batch([row], collator.tokenizer, None)
        maskable = collator._maskable(batch, batch.pop("special_tokens_mask", None))
        generator = torch.Generator().manual_seed(_seed(seed, "fixed", number))
        ids, labels = collator.mask(batch["input_ids"], maskable, documents, mask_rate, generator)
        return {"input_ids": ids[0].tolist(), "labels": labels[0].tolist()}

    return dataset.map(masked, with_indices=True, desc=description)


def _batch(
    features: Features, tokenizer: "PreTrainedTokenizerBase", multiple: int | None
) -> tuple[dict[str, Tensor], Tensor]:
    """The rows as one batch, and [B, T] document numbers that rise through the flattened batch."""
    rows = [
        feature if isinstance(feature, Mapping) or hasattr(feature, "keys") else {"input_ids": feature}
        for feature in features
    ]
    packed = "position_ids" in rows[0]
    fill = {"input_ids": tokenizer.pad_token_id, "labels": -100, "special_tokens_mask": 1, "attention_mask": 0}
    names = [name for name in (*fill, "position_ids") if name in rows[0]]
    columns = {name: [torch.as_tensor(row[name], dtype=torch.long) for row in rows] for name in names}
    if packed:
        if "attention_mask" in columns and not all(bool(mask.all()) for mask in columns["attention_mask"]):
            raise ValueError("Rows with position_ids are packed and must not contain pads.")
        columns.pop("attention_mask", None)
        batch = {name: torch.cat(values)[None] for name, values in columns.items()}
        positions = batch["position_ids"][0]
        starts = torch.zeros_like(positions)
        starts[1:] = (positions[1:] <= positions[:-1]).long()
        edges = torch.tensor([len(values) for values in columns["input_ids"]]).cumsum(0)[:-1]
        starts[edges] = 1
        return batch, starts.cumsum(0)[None]
    if "attention_mask" not in columns:
        columns["attention_mask"] = [torch.ones_like(ids) for ids in columns["input_ids"]]
    length = max(len(ids) for ids in columns["input_ids"])
    if multiple is not None:
        length = -(-length // multiple) * multiple
    if any(len(ids) < length for ids in columns["input_ids"]) and tokenizer.pad_token_id is None:
        raise ValueError("Rows of different lengths need a pad token; set tokenizer.pad_token.")
    left = tokenizer.padding_side == "left"
    batch = {}
    for name, values in columns.items():
        table = torch.full((len(values), length), fill[name] if fill[name] is not None else 0, dtype=torch.long)
        for row, value in zip(table, values):
            (row[length - len(value) :] if left else row[: len(value)]).copy_(value)
        batch[name] = table
    documents = torch.arange(len(rows))[:, None].expand(len(rows), length)
    return batch, documents


def _check_rate(value: float, name: str) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value} must be between 0 and 1.")


def _seed(*parts: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1
