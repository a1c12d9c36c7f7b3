r"""Train a hybrid language model to continue text, or continue from a checkpoint.

    python scripts/run_clm.py --output_dir outputs/clm                    # standard library docstrings, default mixers
    python scripts/run_clm.py --output_dir outputs/clm --train_file my.txt --packing documents \
        --layer_pattern gla,standard --config_overrides hidden_size=192,num_hidden_layers=6
    python scripts/run_clm.py settings.yaml                               # the same flags as keys of a file

Data with a column `messages` (lists of {"role": …, "content": …}) is trained on the assistant's turns; the tokenizer
then carries a chat template (`--chat_template`). Running a command again resumes from its last checkpoint.
`metrics.json` in the output folder holds the held-out loss before and after, beside that of knowing only the token
frequencies; `loss.png` its course.
"""

import flags

main = flags.program("causal_lm")

if __name__ == "__main__":
    flags.run(__file__, "causal_lm")
