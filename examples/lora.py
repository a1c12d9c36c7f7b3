"""Adapt a saved model with LoRA, merge it and push it: python examples/lora.py [folder] [steps] [owner/name]

Without a name on the Hub a folder stands in for it, and nothing leaves this machine. Needs the extra "peft".
"""

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import frankenstein_hf as fhf
from frankenstein_hf.data import CausalLMCollator, embedded_corpus, pack, train_tokenizer


@contextlib.contextmanager
def folder_for_hub(folder: Path) -> Iterator[None]:
    """Pushing copies into `folder/owner/name`."""

    def create_commit(repo_id: str, operations: list, **_) -> None:
        for operation in operations:
            target = folder / repo_id / operation.path_in_repo
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(operation.path_or_fileobj, target)

    api = SimpleNamespace(
        create_repo=lambda repo_id, **_: SimpleNamespace(repo_id=repo_id),
        create_commit=create_commit,
        create_branch=lambda *_, **__: None,
    )
    with mock.patch("transformers.utils.hub._hf_api", api):
        yield


def train(model: torch.nn.Module, rows: Dataset, tokenizer, folder: str, steps: int, rate: float) -> list[float]:
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=rate,
        save_strategy="no",
        report_to="none",
        logging_steps=max(1, steps // 5),
    )
    trainer = Trainer(model, arguments, train_dataset=rows, data_collator=CausalLMCollator(tokenizer))
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(folder: str = "outputs/lora", steps: int = 40, repo_id: str | None = None) -> dict[str, float]:
    corpus = embedded_corpus()["train"].select(range(512))
    tokenizer = train_tokenizer(corpus["text"], vocab_size=1024, objective="clm")
    rows = pack(corpus, tokenizer, block_size=128)
    base = fhf.FrankensteinForCausalLM(
        fhf.FrankensteinConfig(
            vocab_size=len(tokenizer), hidden_size=96, num_hidden_layers=3, num_attention_heads=4,
            layer_pattern=["gla", "swa", "standard"],
        )
    )  # fmt: skip
    train(base, rows, tokenizer, f"{folder}/runs", 3 * steps, 5e-3)
    base.save_pretrained(f"{folder}/base")

    loud = corpus.map(lambda row: {"text": row["text"].upper()})  # something that the base does not know
    rows = pack(loud, tokenizer, block_size=128)
    # Without target_modules every projection of every mixer gets an adapter.
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(f"{folder}/base"), LoraConfig(r=8, lora_alpha=16, task_type="CAUSAL_LM")
    )
    adapted.print_trainable_parameters()
    losses = train(adapted, rows, tokenizer, f"{folder}/runs", steps, 3e-2)
    adapted.save_pretrained(f"{folder}/adapter")  # some hundred kilobytes

    loaded = AutoPeftModelForCausalLM.from_pretrained(f"{folder}/adapter")  # base and adapter
    merged = loaded.merge_and_unload()  # an ordinary model again
    ids = torch.tensor([rows[0]["input_ids"]])
    with torch.no_grad():
        difference = (merged.eval()(ids).logits - adapted.eval()(input_ids=ids).logits).abs().max().item()

    hub = Path(folder) / "hub"
    with contextlib.nullcontext() if repo_id else folder_for_hub(hub):
        merged.push_to_hub(repo_id or "me/monster")  # weights, code and a model card
        tokenizer.push_to_hub(repo_id or "me/monster")
    again = AutoModelForCausalLM.from_pretrained(repo_id or hub / "me/monster", trust_remote_code=True)
    with torch.no_grad():
        pushed = (again.eval()(ids).logits - merged(ids).logits).abs().max().item()
    print(
        f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; merging moved logits by {difference:.1e}, pushing by {pushed:.1e}"
    )
    return {"first": losses[0], "last": losses[-1], "difference": difference, "pushed": pushed}


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]), *sys.argv[3:4])
