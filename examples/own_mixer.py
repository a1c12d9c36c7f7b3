"""A mixer of one's own in a model that goes to the Hub with it: python examples/own_mixer.py [folder] [steps]

The mixer is in examples/min_gru.py. Importing that file registers it; saving takes the file along.
"""

import sys

import min_gru  # noqa: F401  (registers the mixer)
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import frankenstein_hf as fhf
from frankenstein_hf.data import CausalLMCollator, embedded_corpus, pack, train_tokenizer


def main(folder: str = "outputs/min_gru", steps: int = 250) -> dict[str, float]:
    corpus = embedded_corpus()
    tokenizer = train_tokenizer(corpus["train"]["text"], vocab_size=1024, objective="clm")
    config = fhf.FrankensteinConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        layer_pattern=["min_gru", "swa", "min_gru"],
        mixer_params={"min_gru": {"expansion": 2}, "swa": {"window_size": 32}},
    )
    trainer = Trainer(
        AutoModelForCausalLM.from_config(config),
        TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            learning_rate=3e-3,
            save_strategy="no",
            report_to="none",
            logging_steps=max(1, steps // 4),
        ),
        train_dataset=pack(corpus["train"].select(range(512)), tokenizer, block_size=128),
        data_collator=CausalLMCollator(tokenizer),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model(folder)  # modeling_own_min_gru.py among its files; trainer.push_to_hub() would upload it too

    # Where neither this package nor the file is installed, trust_remote_code=True is all that is needed. Where the
    # package is and the file is not: fhf.load_mixers(folder, trust_remote_code=True). Here both are.
    again = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer("Return a list of", return_tensors="pt").input_ids
    with torch.no_grad():
        difference = (again(ids).logits - trainer.model.eval()(ids).logits).abs().max().item()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(tokenizer.decode(again.generate(ids, max_new_tokens=12, do_sample=False)[0]))
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; loaded again it differs by {difference:.1e}")
    return {"first": losses[0], "last": losses[-1], "difference": difference}


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
