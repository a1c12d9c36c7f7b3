"""Pretrain a hybrid encoder on masked words and let it fill a gap: python examples/pretrain_encoder.py [folder] [steps]

Two layers in three are linear in length; `--help` of scripts/run_mlm.py has everything that is left out here.
"""

import sys

from transformers import AutoModelForMaskedLM, Trainer, TrainingArguments, pipeline

import frankenstein_hf as fhf
from frankenstein_hf.data import MaskedLMCollator, embedded_corpus, mask_once, pack, train_tokenizer


def main(folder: str = "outputs/encoder", steps: int = 100) -> dict[str, float]:
    corpus = embedded_corpus()  # docstrings of Python's standard library
    tokenizer = train_tokenizer(corpus["train"]["text"], vocab_size=2048, objective="mlm")
    rows = {split: pack(corpus[split], tokenizer, 128, packing="documents") for split in ("train", "validation")}

    config = fhf.FrankensteinConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        layer_pattern=["gated_deltanet", "swa", "standard"],
        mixer_params={"swa": {"window_size": 32}},
        sparse_prediction=True,  # logits at the masked tokens only
    )
    collator = MaskedLMCollator(tokenizer, mask_rate=0.25)
    trainer = Trainer(
        AutoModelForMaskedLM.from_config(config),
        TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=16,
            learning_rate=0.09,
            optim="frankenstein_adafactor",
            warmup_steps=0.05,
            logging_steps=max(1, steps // 4),
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=rows["train"],
        eval_dataset=mask_once(rows["validation"].select(range(32)), collator, 0.15, seed=0),
        data_collator=collator,
        callbacks=[collator.callback()],
        processing_class=tokenizer,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model(folder)  # weights, tokenizer, code and a model card

    sentence = f"Return True if the path {tokenizer.mask_token} a directory."
    guesses = pipeline("fill-mask", folder)(sentence, top_k=4)
    print(f"held-out loss {before:.2f} -> {after:.2f} nats; {sentence} {[guess['token_str'] for guess in guesses]}")
    return {"before": before, "after": after}


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
