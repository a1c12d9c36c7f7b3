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

if __name__ == "__main__":  # a mistyped flag is answered before the imports that take seconds
    import flags

    flags.check(__file__, "ModelArguments", "CausalDataArguments", "ProgramArguments")

from collections.abc import Sequence
from typing import Any

from transformers import Trainer

import frankenstein_hf  # noqa: F401  (registers the models)
from frankenstein_hf.data import CausalLMCollator
from frankenstein_hf.training.arguments import CausalDataArguments, ModelArguments, ProgramArguments, parse_arguments
from frankenstein_hf.training.language_modeling import LanguageModelRun
from frankenstein_hf.training.programs import run_main


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the program; returns the metrics."""
    model_args, data_args, training_args = parse_arguments(
        (ModelArguments, CausalDataArguments, ProgramArguments), argv
    )
    run = LanguageModelRun("clm", model_args, data_args, training_args)

    tokenizer, train_dataset, eval_dataset = run.prepare_data()
    trainer = Trainer(
        model=run.build_model(),
        args=training_args,
        data_collator=CausalLMCollator(tokenizer),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
    )
    return run.train_and_evaluate(trainer)


if __name__ == "__main__":
    run_main(main)
