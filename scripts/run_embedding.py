r"""Train a hybrid model to embed texts, through sentence-transformers, or use one.

    python scripts/run_embedding.py --output_dir outputs/embedding        # parts of docstrings that belong together
    python scripts/run_embedding.py --output_dir outputs/embedding --train_file triplets.jsonl \
        --model_name_or_path outputs/mlm
    python scripts/run_embedding.py --mode search --model_name_or_path outputs/embedding --output_dir outputs/found \
        --input_file questions.txt --corpus_file answers.csv --text_column answer
    python scripts/run_embedding.py settings.yaml                         # the same flags as keys of a file

Rows of training data have two texts that belong together (the other rows of a batch are the wrong answers), an
anchor, a positive and a negative, or two texts and a score. Running a command again resumes from its last checkpoint.
`metrics.json` in the output folder holds how well held-out texts are found before and after, beside what the words in
common find; `loss.png` the course of the loss. The model loads with `SentenceTransformer(folder)`.

`--mode similarity`, `search`, `clustering` and `encode` read `--input_file` and write JSON or NPY into `--output_dir`.
"""

if __name__ == "__main__":  # a mistyped flag is answered before the imports that take seconds
    import flags

    flags.check(__file__, "ModelArguments", "EmbeddingArguments", "EmbeddingProgramArguments")

from collections.abc import Sequence
from typing import Any

import frankenstein_hf  # noqa: F401  (registers the models)
from frankenstein_hf.training.arguments import BadInput, ModelArguments, parse_arguments
from frankenstein_hf.training.programs import run_main


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the program; returns the metrics, or what was written."""
    try:
        from frankenstein_hf.training.embedding import EmbeddingArguments, EmbeddingProgramArguments, EmbeddingRun
        from frankenstein_hf.training.embedding_use import use
    except ImportError as error:
        raise BadInput(
            f"sentence-transformers must be installed ({error}): pip install 'frankenstein_hf[embeddings]'."
        ) from error
    classes = (ModelArguments, EmbeddingArguments, EmbeddingProgramArguments)
    model_args, data_args, training_args = parse_arguments(classes, argv)
    if data_args.mode != "train":
        return use(model_args, data_args, training_args)
    run = EmbeddingRun(model_args, data_args, training_args)

    _, train_dataset, eval_dataset = run.prepare_data()
    trainer = run.trainer(run.build_model(), train_dataset, eval_dataset)
    return run.train_and_evaluate(trainer)


if __name__ == "__main__":
    run_main(main)
