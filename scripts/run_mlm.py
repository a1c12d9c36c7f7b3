r"""Train a hybrid encoder to fill masks, or continue from a checkpoint.

    python scripts/run_mlm.py --output_dir outputs/mlm                    # standard library docstrings, default mixers
    python scripts/run_mlm.py --output_dir outputs/mlm --train_file my.txt --layer_pattern gated_deltanet,swa \
        --mixer_params '{"swa": {"window_size": 64}}' --config_overrides hidden_size=192,num_hidden_layers=6
    python scripts/run_mlm.py settings.yaml                               # the same flags as keys of a file

Running a command again resumes from its last checkpoint. `metrics.json` in the output folder holds the held-out loss
before and after, on the same masks, beside that of knowing only the token frequencies; `loss.png` its course.
"""

import flags

main = flags.program("masked_lm")

if __name__ == "__main__":
    flags.run(__file__, "masked_lm")
