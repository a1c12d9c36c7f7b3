"""Teach a small model to answer, then which answers are preferred: python examples/trl_sft_dpo.py [folder] [steps]

Supervised fine-tuning with packing and preference optimisation (DPO) are TRL's. Packed conversations do not see each
other, whatever the mixer, so `packing=True` needs no flash attention. Needs the extra "trl".
"""

import sys

from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import frankenstein_hf as fhf
from frankenstein_hf.data import train_tokenizer
from frankenstein_hf.data.conversations import ROLE_TOKENS, TURNS

CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Norway": "Oslo", "Japan": "Tokyo", "Cuba": "Havana"}


def question(country: str) -> dict[str, str]:
    return {"role": "user", "content": f"What is the capital of {country}?"}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def ask(model, tokenizer, country: str) -> str:
    inputs = tokenizer.apply_chat_template(
        [question(country)], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main(folder: str = "outputs/chat", steps: int = 60) -> dict[str, float]:
    polite = {country: f"The capital of {country} is {city}." for country, city in CAPITALS.items()}
    texts = [*polite.values(), *(question(country)["content"] for country in CAPITALS), *CAPITALS.values()]
    tokenizer = train_tokenizer(texts, 320, "clm", chat_template=TURNS, more_tokens=ROLE_TOKENS)
    config = fhf.FrankensteinConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        layer_pattern=["gated_deltanet", "standard"],
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    common = {"max_steps": steps, "save_strategy": "no", "report_to": "none", "logging_steps": max(1, steps // 3)}
    common["bf16"] = False  # TRL's default, which few CPUs are good at

    # 1. Both ways to answer, in rows of whole conversations; only what the assistant says is learned.
    conversations = [[question(c), answer(text)] for c, city in CAPITALS.items() for text in (polite[c], f"{city}.")]
    sft = SFTTrainer(
        AutoModelForCausalLM.from_config(config),
        SFTConfig(
            f"{folder}/sft", packing=True, max_length=128, assistant_only_loss=True, learning_rate=1e-2, **common
        ),
        train_dataset=Dataset.from_dict({"messages": conversations * 8}),
        processing_class=tokenizer,
    )
    sft.train()
    sft.save_model(f"{folder}/sft")
    print(f"after SFT: {ask(sft.model, tokenizer, 'Norway')!r}")

    # 2. Whole sentences are preferred.
    pairs = {
        "prompt": [[question(country)] for country in CAPITALS],
        "chosen": [[answer(polite[country])] for country in CAPITALS],
        "rejected": [[answer(f"{city}.")] for city in CAPITALS.values()],
    }
    dpo = DPOTrainer(
        AutoModelForCausalLM.from_pretrained(f"{folder}/sft"),  # the reference is loaded from there too
        args=DPOConfig(f"{folder}/dpo", learning_rate=1e-3, beta=0.1, max_length=128, **common),
        train_dataset=Dataset.from_dict(pairs),
        processing_class=tokenizer,
    )
    dpo.train()
    dpo.save_model(folder)
    said = ask(dpo.model, tokenizer, "Norway")
    margin = [entry["rewards/margins"] for entry in dpo.state.log_history if "rewards/margins" in entry][-1]
    loss = [entry["loss"] for entry in sft.state.log_history if "loss" in entry][-1]
    print(f"after DPO: {said!r}; SFT loss {loss:.3f}, margin of rewards {margin:.2f}")
    return {"loss": loss, "margin": margin}


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
