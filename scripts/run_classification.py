r"""Train a hybrid model to label texts or their words, or continue from a checkpoint.

    python scripts/run_classification.py --output_dir outputs/digits                  # scikit-learn's digits as texts
    python scripts/run_classification.py --output_dir outputs/code --task token       # kinds of words in Python code
    python scripts/run_classification.py --output_dir outputs/valence --problem_type regression   # ratings of words
    python scripts/run_classification.py --output_dir outputs/mine --train_file my.csv --text_column review \
        --label_column stars --model_name_or_path outputs/mlm
    python scripts/run_classification.py settings.yaml                                # the same flags as keys of a file

Labels are words, whole numbers, yes and no (one class a text), fractions (regression), or lists and several columns
(several labels a text); `--problem_type` decides otherwise. With `--task token` a row has a list of words and one of
labels. Running a command again resumes from its last checkpoint. `metrics.json` in the output folder holds the metrics
on held-out data before and after, beside those of the most frequent answer; `loss.png` the course of the loss.
"""

if __name__ == "__main__":  # a mistyped flag is answered before the imports that take seconds
    import flags

    flags.check(__file__, "ModelArguments", "LabelledDataArguments", "ProgramArguments")

from collections.abc import Sequence
from typing import Any

from transformers import Trainer

import frankenstein_hf  # noqa: F401  (registers the models)
from frankenstein_hf.training.arguments import ModelArguments, ProgramArguments, parse_arguments
from frankenstein_hf.training.classification import ClassificationRun, LabelledDataArguments
from frankenstein_hf.training.programs import run_main


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the program; returns the metrics."""
    classes = (ModelArguments, LabelledDataArguments, ProgramArguments)
    model_args, data_args, training_args = parse_arguments(classes, argv)
    run = ClassificationRun(model_args, data_args, training_args)

    tokenizer, train_dataset, eval_dataset = run.prepare_data()
    trainer = Trainer(
        model=run.build_model(),
        args=training_args,
        data_collator=run.collator(),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        compute_metrics=run.compute_metrics,
        preprocess_logits_for_metrics=run.predictions,
    )
    return run.train_and_evaluate(trainer)


if __name__ == "__main__":
    run_main(main)
