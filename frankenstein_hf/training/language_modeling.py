"""What `scripts/run_mlm.py` and `scripts/run_clm.py` share: text, packed, and the loss of token frequencies."""

import math
from typing import Any, Literal

from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedTokenizerBase, Trainer

from ..data.baseline import unigram_loss
from ..data.corpus import embedded_corpus
from ..data.tokenization import pack
from ..hub.foreign import Markdown
from .arguments import BadInput, DataArguments, ModelArguments, ProgramArguments
from .programs import Run, good
from .recipe import continued_text, filled_mask
from .sources import text_column


class LanguageModelRun(Run):
    """A run of masked ("mlm") or causal ("clm") language modelling."""

    data_args: DataArguments
    baseline_name = "unigram"
    baseline_words = "token frequencies alone"
    embedded_language = "en"

    def __init__(
        self,
        objective: Literal["mlm", "clm"],
        model_args: ModelArguments,
        data_args: DataArguments,
        training_args: ProgramArguments,
        **config: Any,
    ) -> None:
        self.tokenizer_kind = objective
        self.task = "fill-mask" if objective == "mlm" else "text-generation"
        auto_class = AutoModelForMaskedLM if objective == "mlm" else AutoModelForCausalLM
        super().__init__(objective, auto_class, model_args, data_args, training_args, **config)

    def prepare_data(self) -> tuple[PreTrainedTokenizerBase, Any, Any]:
        """The tokenizer, and the packed datasets to train and evaluate on."""
        data = self.data_args
        with self.bars(), self.args.main_process_first(desc="preparing the data"):
            as_text = data.train_file is not None and data.train_file.lower().endswith(".txt")
            raw = self.read(embedded_corpus, **({"sample_by": data.sample_by} if as_text else {})).rows
            column = text_column(raw["train"], data.text_column)
            texts = (text for batch in raw["train"].iter(1000) for text in batch[column] if text)
            tokenizer = self.make_tokenizer(texts)
            if self.objective == "mlm" and tokenizer.mask_token_id is None:
                raise BadInput(
                    f"The tokenizer {tokenizer.name_or_path} has no mask token, so it cannot be used for masked "
                    "language modelling."
                )
            sets = {split: self._pack(raw[split], column, split) for split in ("train", "validation")}
        self.describe_data(
            documents={split: len(raw[split]) for split in sets},
            rows={split: len(rows) for split, rows in sets.items()},
            packing=data.packing,
        )
        self.say(
            f"        {len(raw['train']):,} documents to train on, {len(raw['validation']):,} held out: "
            f"{len(sets['train']):,} + {len(sets['validation']):,} rows of up to {data.block_size} tokens"
        )
        return tokenizer, sets["train"], sets["validation"]

    def _pack(self, documents: Any, column: str, split: str) -> Any:
        data, tokenizer = self.data_args, self.tokenizer
        assert tokenizer is not None
        processes = data.preprocessing_num_workers
        return good(
            lambda: pack(
                documents, tokenizer, data.block_size, data.packing, column, processes, f"Tokenizing {split}"
            )
        )  # fmt: skip

    def evaluate(self, trainer: Trainer) -> dict[str, float]:
        """Loss and perplexity."""
        loss = super().evaluate(trainer)["loss"]
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}

    def example(self) -> str:
        """A text to try the model on."""
        assert self.tokenizer is not None
        return f"Return the {self.tokenizer.mask_token} of the file." if self.objective == "mlm" else "Return the"

    def sample(self, trainer: Trainer) -> Markdown:
        """What the model writes, or fills in."""
        assert self.tokenizer is not None
        model = trainer.accelerator.unwrap_model(trainer.model).eval()
        rows: Any = trainer.eval_dataset
        row = rows[0]
        if self.objective == "clm":
            return continued_text(model, self.tokenizer, row["input_ids"], self.args.seed)
        labels = row.get("labels", [-100] * len(row["input_ids"]))
        unmasked = [token if label == -100 else label for token, label in zip(row["input_ids"], labels)]
        return filled_mask(model, self.tokenizer, unmasked)

    def baseline(self, trainer: Trainer) -> dict[str, float]:
        """The loss of knowing only how often each token occurs."""
        assert self.tokenizer is not None
        never = self.tokenizer.all_special_ids if self.objective == "mlm" else ()
        train: Any = trainer.train_dataset
        evaluation: Any = trainer.eval_dataset
        return {"loss": unigram_loss(train, evaluation, len(self.tokenizer), never)}
