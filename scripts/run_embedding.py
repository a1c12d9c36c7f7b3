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

import flags

main = flags.program("sentence_embedding")

if __name__ == "__main__":
    flags.run(__file__, "sentence_embedding")
