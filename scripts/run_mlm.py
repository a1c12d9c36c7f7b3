r"""Train a hybrid encoder to fill masks, or continue from a checkpoint.

    python scripts/run_mlm.py --output_dir outputs/mlm                    # standard library docstrings, default mixers
    python scripts/run_mlm.py --output_dir outputs/mlm --train_file my.txt --layer_pattern gated_deltanet,swa \
        --mixer_params '{"swa": {"window_size": 64}}' --config_overrides hidden_size=192,num_hidden_layers=6
    python scripts/run_mlm.py settings.yaml                               # the same flags as keys of a file

Running a command again resumes from its last checkpoint. `metrics.json` in the output folder holds the held-out loss
before and after, on the same masks, beside that of knowing only the token frequencies; `loss.png` its course.
"""

if __name__ == "__main__":  # a mistyped flag is answered before the imports that take seconds
    import flags

    flags.check(__file__, "ModelArguments", "DataArguments", "MaskingArguments", "ProgramArguments")

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import Trainer

import frankenstein_hf  # noqa: F401  (registers the models)
from frankenstein_hf.data import MaskedLMCollator, MaskRateSchedule, mask_once
from frankenstein_hf.training.arguments import (
    BadInput,
    DataArguments,
    ModelArguments,
    ProgramArguments,
    parse_arguments,
)
from frankenstein_hf.training.language_modeling import LanguageModelRun
from frankenstein_hf.training.programs import run_main


@dataclass
class MaskingArguments:
    """How many tokens are hidden."""

    mask_rate: float = field(default=0.15, metadata={"help": "Share of the tokens to predict while training."})
    final_mask_rate: float | None = field(
        default=None, metadata={"help": "Move from --mask_rate to this rate over the training."}
    )
    mask_rate_shape: str = field(default="linear", metadata={"help": "How it moves: linear or cosine."})
    eval_mask_rate: float = field(default=0.15, metadata={"help": "Share of the tokens to predict in evaluations."})
    mask_replace_prob: float = field(default=0.8, metadata={"help": "Share of those that become the mask token."})
    random_replace_prob: float = field(default=0.1, metadata={"help": "Share of those that become a random token."})

    def check(self) -> None:
        """Raise `BadInput` for rates out of range."""
        for name in ("mask_rate", "final_mask_rate", "eval_mask_rate", "mask_replace_prob", "random_replace_prob"):
            if (value := getattr(self, name)) is not None and not 0 <= value <= 1:
                raise BadInput(f"--{name} {value} must be between 0 and 1.")
        if self.mask_replace_prob + self.random_replace_prob > 1:
            raise BadInput("--mask_replace_prob and --random_replace_prob must not add up to more than 1.")
        if self.mask_rate_shape not in ("linear", "cosine"):
            raise BadInput(f"--mask_rate_shape {self.mask_rate_shape!r} must be linear or cosine.")

    def rate(self) -> float | MaskRateSchedule:
        """The rate while training."""
        if self.final_mask_rate is None:
            return self.mask_rate
        return MaskRateSchedule(self.mask_rate, self.final_mask_rate, self.mask_rate_shape)  # type: ignore[arg-type]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the program; returns the metrics."""
    classes = (ModelArguments, DataArguments, MaskingArguments, ProgramArguments)
    model_args, data_args, mask_args, training_args = parse_arguments(classes, argv)
    mask_args.check()
    # logits at the labelled positions only: the same loss, for a fraction of the work (a label smoother wants them all)
    sparse = training_args.label_smoothing_factor == 0
    run = LanguageModelRun("mlm", model_args, data_args, training_args, sparse_prediction=sparse)

    tokenizer, train_dataset, eval_dataset = run.prepare_data()
    collator = MaskedLMCollator(
        tokenizer,
        mask_args.rate(),
        mask_args.mask_replace_prob,
        mask_args.random_replace_prob,
        seed=training_args.seed,
    )
    with run.bars():
        eval_dataset = mask_once(eval_dataset, collator, mask_args.eval_mask_rate, training_args.seed)
    trainer = Trainer(
        model=run.build_model(),
        args=training_args,
        data_collator=collator,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        callbacks=[collator.callback()],
    )
    return run.train_and_evaluate(trainer)


if __name__ == "__main__":
    run_main(main)
