"""How a model was trained, and what it makes of held-out data: for `metrics.json` and the model card."""

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, Trainer

from ..hub.foreign import Markdown, code, fenced

PROMPT_TOKENS, NEW_TOKENS = 12, 40
MASKS_SHOWN = 3


def recipe(trainer: Trainer) -> dict[str, Any]:
    """Steps, data seen, optimizer and precision of a training that has ended, by the names a card shows."""
    args, state = trainer.args, trainer.state
    rows: Any = trainer.train_dataset
    epochs = state.epoch or 0.0
    seen = round(epochs * len(rows))
    found: dict[str, Any] = {"steps": state.global_step, "passes over the data": round(epochs, 3), "rows seen": seen}
    if "input_ids" in rows.column_names:
        found["tokens seen"] = round(epochs * tokens(rows))
    found["rows a step"] = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    optimizer = str(getattr(args.optim, "value", args.optim))
    found["optimizer"] = f"{optimizer}, {args.optim_args}" if args.optim_args else optimizer
    found["learning rate"] = (
        f"{args.learning_rate:g}, {getattr(args.lr_scheduler_type, 'value', args.lr_scheduler_type)}"
    )
    found["warm-up"] = (
        f"{args.warmup_steps:g} of the steps" if 0 < args.warmup_steps < 1 else f"{args.warmup_steps:g} steps"
    )
    found["weight decay"] = float(args.weight_decay)
    weights = str(next(trainer.model.parameters()).dtype).removeprefix("torch.")  # type: ignore[union-attr]
    mixed = "bfloat16" if args.bf16 else "float16" if args.fp16 else None
    found["precision"] = f"{weights} weights, {mixed} autocast" if mixed else weights
    found["seed"] = args.seed
    found["device"] = f"{args.world_size} × {args.device.type}" if args.world_size > 1 else args.device.type
    return found


def tokens(rows: Any) -> int:
    """The tokens in a dataset with a column `input_ids`."""
    import pyarrow.compute

    table = rows.select_columns(["input_ids"]).with_format("arrow")
    lengths = (pyarrow.compute.list_value_length(part["input_ids"]) for part in table.iter(1000))
    return sum(pyarrow.compute.sum(part).as_py() or 0 for part in lengths)


@torch.no_grad()
def continued_text(model: Any, tokenizer: PreTrainedTokenizerBase, ids: list[int], seed: int) -> Markdown:
    """The beginning of a held-out row and what the model writes after it, for a card."""
    prompt = torch.tensor([ids[:PROMPT_TOKENS]], device=model.device)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        written = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW_TOKENS,
            do_sample=True,
            temperature=0.8,
            top_k=40,
            pad_token_id=tokenizer.pad_token_id,
        )
    texts = [
        str(tokenizer.decode(part, skip_special_tokens=True)) for part in (prompt[0], written[0, prompt.shape[1] :])
    ]
    return Markdown(
        "### What it writes\n\nThe beginning of a held-out text, and behind the bar how the model went on "
        f"(temperature 0.8, top 40):\n\n{fenced('│'.join(texts), 'text')}"
    )


@torch.no_grad()
def filled_mask(model: Any, tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> Markdown:
    """A piece of a held-out row with one token hidden, and what the model takes it for, for a card."""
    special = set(tokenizer.all_special_ids)
    piece = [token for token in ids[: 4 * PROMPT_TOKENS] if token not in special][: 2 * PROMPT_TOKENS]
    if len(piece) < 3:
        return Markdown("")
    place = len(piece) // 2
    hidden = [*piece[:place], tokenizer.mask_token_id, *piece[place + 1 :]]
    inputs = tokenizer(tokenizer.decode(hidden), return_tensors="pt").to(model.device)
    where = (inputs["input_ids"][0] == tokenizer.mask_token_id).nonzero()
    if len(where) == 0:  # a tokenizer that does not read what it writes
        return Markdown("")
    logits = model(**inputs).logits[0, where[0, 0]]
    best = logits.softmax(-1).topk(min(MASKS_SHOWN, len(logits)))
    guesses = ", ".join(
        f"{code(str(tokenizer.decode(token)).strip() or ' ')} ({p:.0%})"
        for p, token in zip(*(x.tolist() for x in best))
    )
    return Markdown(
        "### What it fills in\n\nA held-out text with one token hidden:\n\n"
        f"{fenced(tokenizer.decode(hidden), 'text')}\n\nThe model says {guesses}; "
        f"{code(str(tokenizer.decode(piece[place])).strip() or ' ')} stood there."
    )
