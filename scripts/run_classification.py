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

import flags

main = flags.program("classification")

if __name__ == "__main__":
    flags.run(__file__, "classification")
