"""What `scripts/run_classification.py` does: labels of sequences or of words, their metrics, a constant answer."""

import importlib.util
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerBase,
    Trainer,
)

from ..data import examples
from ..data.tokenization import words_begin_with_a_space
from . import metrics
from .arguments import BadInput, ModelArguments, ProgramArguments, SourceArguments, check_choice
from .labels import LABEL_COLUMNS, PROBLEM_TYPES, TAG_COLUMNS, Labels, sequence_labels, token_labels, words_column
from .programs import Run
from .sources import strings, text_column

TASKS = ("sequence", "token")


@dataclass
class LabelledDataArguments(SourceArguments):
    """What to classify; by default data that comes with Python and the packages in use."""

    task: str = field(
        default="sequence",
        metadata={"help": "sequence: a label, several or a number for each text; token: a label for each word."},
    )
    problem_type: str | None = field(
        default=None,
        metadata={"help": f"Of --task sequence: {', '.join(PROBLEM_TYPES)}; by default what the labels look like."},
    )
    text_column: str | None = field(
        default=None,
        metadata={"help": "Column with the text; by default 'text' or the only one. For tokens, with lists of words."},
    )
    text_pair_column: str | None = field(default=None, metadata={"help": "Column with a second text."})
    label_column: str | None = field(
        default=None,
        metadata={
            "help": f"Column with the labels, or several of 0 and 1: one,two. By default the first there is of "
            f"{', '.join(LABEL_COLUMNS)} for sequences, of {', '.join(TAG_COLUMNS)} for tokens."
        },
    )

    def check(self) -> None:
        """Raise `BadInput` for what cannot be."""
        super().check()
        check_choice("task", self.task, TASKS)
        if self.problem_type is not None:
            check_choice("problem_type", self.problem_type, PROBLEM_TYPES)
        if self.task == "token" and (self.problem_type or self.text_pair_column):
            raise BadInput("--problem_type and --text_pair_column are for --task sequence.")
        needed = {"sklearn": "scikit-learn", "nervaluate": "nervaluate"}
        if not (self.dataset_name or self.train_file):
            if self.problem_type == "multi_label_classification":
                raise BadInput("There is no data for multi_label_classification here; give --train_file.")
            if self.problem_type == "regression":
                needed["vaderSentiment"] = "vaderSentiment"
        if missing := [name for module, name in needed.items() if importlib.util.find_spec(module) is None]:
            raise BadInput(f"{', '.join(missing)} must be installed: pip install 'frankenstein_hf[classification]'.")

    def embedded(self) -> Any:
        """What is used without files, a function of the share to hold out."""
        if self.task == "token":
            return examples.code_tokens
        return examples.valence if self.problem_type == "regression" else examples.digits


class ClassificationRun(Run):
    """A run of sequence or token classification."""

    data_args: LabelledDataArguments
    baseline_name = "constant"

    def __init__(
        self, model_args: ModelArguments, data_args: LabelledDataArguments, training_args: ProgramArguments
    ) -> None:
        self.of_tokens = data_args.task == "token"
        self.task = "token-classification" if self.of_tokens else "text-classification"
        auto_class = AutoModelForTokenClassification if self.of_tokens else AutoModelForSequenceClassification
        training_args.prediction_loss_only = False
        super().__init__(f"{data_args.task} classification", auto_class, model_args, data_args, training_args)

    def trainer(self, model: Any, train: Any, held_out: Any, **more: Any) -> Trainer:
        """transformers' own, with the metrics of the labels."""
        return super().trainer(
            model,
            train,
            held_out,
            data_collator=self.collator(),
            compute_metrics=self.compute_metrics,
            preprocess_logits_for_metrics=self.predictions,
            **more,
        )

    @property
    def baseline_words(self) -> str:  # type: ignore[override]
        """What the baseline is."""
        return "always the mean" if self.classes.problem_type == "regression" else "always the most frequent answer"

    def prepare_data(self) -> tuple[PreTrainedTokenizerBase, Any, Any]:
        """The tokenizer, and the encoded datasets to train and evaluate on."""
        data = self.data_args
        with self.bars(), self.args.main_process_first(desc="preparing the data"):
            source = self.read(data.embedded())
            train = source.rows["train"]
            if self.of_tokens:
                texts = [words_column(source, data.text_column)]
                self.classes = token_labels(source, data.label_column, texts[0], self._known_names())
            else:
                self.classes = sequence_labels(source, data.label_column, data.problem_type, self._known_names())
                texts = self._text_columns(train)
            for split in ("train", "validation"):
                self._check_texts(source.rows[split], texts, split)
            self.labels = self.classes.config()
            self._check_labels_of_checkpoint()
            tokenizer = self._tokenizer_for(train, texts)
            sets = {split: self._encode(source.rows[split], texts, split) for split in ("train", "validation")}
        self.describe_data(
            rows={split: len(rows) for split, rows in sets.items()},
            problem_type=self.classes.problem_type or "token_classification",
            labels=self.classes.names,
        )
        self.say(f"        {len(sets['train']):,} rows to train on, {len(sets['validation']):,} held out")
        kind = (self.classes.problem_type or "token classification").replace("_", " ")
        shown = ", ".join(self.classes.names[:12]) + (" …" if len(self.classes.names) > 12 else "")
        self.say(f"        {kind}: {shown}")
        return tokenizer, sets["train"], sets["validation"]

    def collator(self) -> Any:
        """transformers' own, which pads."""
        cls: Any = DataCollatorForTokenClassification if self.of_tokens else DataCollatorWithPadding
        return cls(self.tokenizer)

    # ------------------------------------------------------------------ data

    def _known_names(self) -> list[str] | None:
        """The labels of a checkpoint to continue from."""
        if not self.model_args.model_name_or_path:
            return None
        names = self.pretrained_config.id2label
        return [names[number] for number in sorted(names)]

    def _check_labels_of_checkpoint(self) -> None:
        if self.checkpoint is None:
            return
        saved = AutoConfig.from_pretrained(self.checkpoint, trust_remote_code=self.model_args.trust_remote_code)
        if saved.id2label != self.labels["id2label"] or saved.problem_type != self.labels.get("problem_type"):
            raise BadInput(
                f"{self.checkpoint} was trained for other labels: {', '.join(saved.id2label.values())}. Choose another "
                "--output_dir or --overwrite_output_dir."
            )

    def _text_columns(self, train: Any) -> list[str]:
        data, pair = self.data_args, self.data_args.text_pair_column
        never = (*self.classes.columns, *([pair] if pair else ()))
        hint = " A second one joins it with --text_pair_column."
        columns = [text_column(train, data.text_column, never=never, hint=hint)]
        if pair is not None:
            if pair not in strings(train):
                raise BadInput(
                    f"--text_pair_column {pair!r} is no column of text; there are {', '.join(strings(train))}."
                )
            columns.append(pair)
        return columns

    def _check_texts(self, rows: Any, columns: list[str], split: str) -> None:
        for column in columns:
            if column not in rows.column_names:
                raise BadInput(f"{split} has no column {column!r}; there are {', '.join(rows.column_names)}.")
            for number, value in enumerate(rows[column]):
                if not value or (self.of_tokens and not any(value)):
                    raise BadInput(f"Row {number} of {split} has nothing in {column!r}.")

    def _tokenizer_for(self, train: Any, columns: list[str]) -> PreTrainedTokenizerBase:
        def texts() -> Any:
            for batch in train.iter(1000):
                for column in columns:
                    yield from (" ".join(words) for words in batch[column]) if self.of_tokens else batch[column]

        tokenizer = self.make_tokenizer(texts(), add_prefix_space=self.of_tokens)
        if self.of_tokens:
            if not tokenizer.is_fast:
                raise BadInput("--task token needs a fast tokenizer, which knows the words its tokens come from.")
            words_begin_with_a_space(tokenizer)
        return tokenizer

    def _encode(self, rows: Any, columns: list[str], split: str) -> Any:
        tokenizer, classes = self.tokenizer, self.classes
        assert tokenizer is not None
        end = tokenizer.eos_token if tokenizer.num_special_tokens_to_add(pair=True) == 0 else None

        def encode(batch: dict[str, list[Any]]) -> dict[str, Any]:
            texts = [batch[column] for column in columns]
            if len(texts) == 2 and end is not None:  # nothing else would keep the two apart
                texts = [[f"{one}{end}{two}" for one, two in zip(*texts)]]
            encoded = tokenizer(
                *texts, truncation=True, max_length=self.data_args.block_size, is_split_into_words=self.of_tokens
            )
            labels = [classes.encode(*values) for values in zip(*(batch[column] for column in classes.columns))]
            if self.of_tokens:
                labels = [align(encoded.word_ids(row), words) for row, words in enumerate(labels)]
            return {**encoded, "labels": labels}

        return rows.map(
            encode,
            batched=True,
            remove_columns=rows.column_names,
            num_proc=self.data_args.preprocessing_num_workers,
            desc=f"Tokenizing {split}",
        )

    # ------------------------------------------------------------------ results

    def predictions(self, logits: Any, labels: Any = None) -> Any:
        """What the logits say: ids, 0 and 1, or numbers; for Trainer's `preprocess_logits_for_metrics`."""
        logits = logits[0] if isinstance(logits, tuple) else logits
        if self.classes.problem_type == "regression":
            return logits.squeeze(-1)
        if self.classes.problem_type == "multi_label_classification":
            return (logits > 0).int()
        return logits.argmax(-1)

    def compute_metrics(self, evaluation: EvalPrediction) -> dict[str, float]:
        """The metrics of the problem; for Trainer."""
        return score(self.classes, np.asarray(evaluation.predictions), np.asarray(evaluation.label_ids))

    def baseline(self, trainer: Trainer) -> dict[str, float]:
        """The metrics of the same answer for every row: the mean, or the most frequent label (each label's own)."""
        train: Any = trainer.train_dataset
        evaluation: Any = trainer.eval_dataset
        if self.of_tokens:
            seen = np.concatenate([np.asarray(row) for row in train["labels"]])
            true = [np.asarray(row) for row in evaluation["labels"]]
            width = max(map(len, true))
            true_ids = np.stack([np.pad(row, (0, width - len(row)), constant_values=-100) for row in true])
            return score(self.classes, np.full_like(true_ids, np.bincount(seen[seen >= 0]).argmax()), true_ids)
        seen, true_labels = np.asarray(train["labels"]), np.asarray(evaluation["labels"])
        if self.classes.problem_type == "single_label_classification":
            answer: Any = np.bincount(seen).argmax()
        else:
            answer = seen.mean(axis=0)
            answer = answer if self.classes.problem_type == "regression" else answer > 0.5
        return score(self.classes, np.broadcast_to(answer, true_labels.shape), true_labels)


def align(word_ids: list[int | None], labels: list[int]) -> list[int]:
    """A label for the first token of each word; −100 for its other tokens and for special tokens."""
    before: Any = None
    aligned = []
    for word in word_ids:
        aligned.append(labels[word] if word is not None and word != before else -100)
        before = word
    return aligned


def score(classes: Labels, predicted: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """The metrics of the problem that the labels pose."""
    if classes.problem_type is None:
        return metrics.token_labels(predicted, true, classes.names)
    functions = {
        "regression": metrics.regression,
        "single_label_classification": metrics.single_label,
        "multi_label_classification": metrics.multi_label,
    }
    return functions[classes.problem_type](predicted, true)
