"""Evaluate a model with lm-evaluation-harness, without a network: python examples/evaluate.py [checkpoint] [folder]

A task is a YAML file beside its data; tasks of the harness itself are downloaded once and then work offline as well.
Without a checkpoint a small untrained hybrid shows the way. Needs the extra "eval".
"""

import json
import os
import sys
from pathlib import Path

import yaml

import frankenstein_hf as fhf
from frankenstein_hf.data import train_tokenizer

QUESTIONS = [
    {"question": "Return True if the path is a", "choices": ["directory.", "of if."], "answer": 0},
    {"question": "This class is used to create a new", "choices": ["by in from", "object."], "answer": 1},
    {"question": "Raise an error if the file does not", "choices": ["exist.", "the a."], "answer": 0},
]


def write_task(folder: Path) -> None:
    """A task with choices: the model's answer is the likeliest one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)) + "\n")
    task = {
        "task": "words",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder.resolve() / "questions.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }
    (folder / "words.yaml").write_text(yaml.safe_dump(task, sort_keys=False))


def make_model(folder: Path) -> str:
    tokenizer = train_tokenizer([row["question"] for row in QUESTIONS] * 9, 300, "clm")
    config = fhf.FrankensteinConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        layer_pattern=["gated_deltanet", "swa"],
    )  # fmt: skip
    fhf.FrankensteinForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def main(checkpoint: str | None = None, folder: str = "outputs/evaluation") -> dict[str, float]:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import lm_eval
    from lm_eval.tasks import TaskManager

    checkpoint = checkpoint or make_model(Path(folder) / "model")
    write_task(Path(folder) / "tasks")
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": checkpoint},  # with trust_remote_code=True where frankenstein_hf is not imported
        tasks=["words"],
        task_manager=TaskManager(include_path=str(Path(folder) / "tasks"), include_defaults=False),
        device="cpu",
        batch_size=4,
        bootstrap_iters=0,
    )
    found = results["results"]["words"]
    print(f"accuracy of {checkpoint}: {found['acc,none']:.0%} of {len(QUESTIONS)} questions")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:3])
