"""Embeddings that can be cut short: python examples/matryoshka.py [folder] [steps]

sentence-transformers trains a hybrid encoder such that the first channels of an embedding are an embedding as well
(Matryoshka Representation Learning, arXiv 2205.13147). Needs the extra "embeddings".
"""

import sys

from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss, MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

import frankenstein_hf as fhf
from frankenstein_hf.data import train_tokenizer
from frankenstein_hf.data.examples import docstring_pairs

WIDTHS = (128, 32, 8)


def main(folder: str = "outputs/matryoshka", steps: int = 80) -> dict[int, float]:
    pairs = docstring_pairs()  # the summary of a docstring and the rest of it
    tokenizer = train_tokenizer([*pairs["train"]["anchor"], *pairs["train"]["positive"]], 2048, "mlm", 128)
    config = fhf.FrankensteinConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        hidden_size=WIDTHS[0],
        num_hidden_layers=2,
        num_attention_heads=4,
        layer_pattern=["gated_deltanet", "standard"],
    )
    fhf.FrankensteinModel(config).save_pretrained(f"{folder}/encoder")
    tokenizer.save_pretrained(f"{folder}/encoder")
    encoder = Transformer(f"{folder}/encoder", max_seq_length=64)
    model = SentenceTransformer(modules=[encoder, Pooling(WIDTHS[0], "mean")], device="cpu")

    trainer = SentenceTransformerTrainer(
        model,
        SentenceTransformerTrainingArguments(
            f"{folder}/runs",
            max_steps=steps,
            per_device_train_batch_size=32,
            learning_rate=2e-3,
            warmup_steps=0.1,
            save_strategy="no",
            report_to="none",
            logging_steps=max(1, steps // 4),
        ),
        train_dataset=pairs["train"],
        loss=MatryoshkaLoss(model, MultipleNegativesRankingLoss(model), list(WIDTHS)),
    )
    trainer.train()
    model.save_pretrained(folder)

    held_out = pairs["validation"]
    questions = {f"q{i}": text for i, text in enumerate(held_out["anchor"])}
    answers = {f"a{i}": text for i, text in enumerate(held_out["positive"])}
    right = {f"q{i}": {f"a{i}"} for i in range(len(questions))}
    found = {}
    for width in WIDTHS:
        cut = SentenceTransformer(folder, truncate_dim=width, device="cpu")
        metrics = InformationRetrievalEvaluator(questions, answers, right, accuracy_at_k=[10], name="held_out")(cut)
        found[width] = metrics["held_out_cosine_accuracy@10"]
    shown = ", ".join(f"{value:.0%} with {width}" for width, value in found.items())
    print(f"among the ten nearest of {len(answers)} texts is the right one: {shown} channels")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
