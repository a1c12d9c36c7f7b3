"""What `scripts/run_mlm.py` and `scripts/run_clm.py` share: text, packed, and the loss of token frequencies."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedTokenizerBase, Trainer

from ..configuration.values import did_you_mean
from ..data import conversations
from ..data.baseline import unigram_loss
from ..data.collators import CausalLMCollator, DiffusionCollator, MaskedLMCollator, MaskRateSchedule, mask_once
from ..data.conversations import pack_conversations
from ..data.corpus import embedded_corpus
from ..data.mask_rates import RATE_DISTRIBUTIONS
from ..data.tokenization import pack
from ..hub.foreign import Markdown
from .arguments import BadInput, CausalDataArguments, DataArguments, ModelArguments, ProgramArguments
from .failures import good
from .programs import Run
from .recipe import continued_text, filled_mask
from .sources import text_column

MESSAGES = "messages"  # the column of conversations


@dataclass
class MaskingArguments:
    """How many tokens are hidden."""

    mask_rate: float = field(default=0.15, metadata={"help": "Share of the tokens to predict while training."})
    final_mask_rate: float | None = field(
        default=None, metadata={"help": "Move from --mask_rate to this rate over the training."}
    )
    mask_schedule: str | None = field(
        default=None,
        metadata={
            "help": "Draw a rate for every document, as masked diffusion does, instead of --mask_rate: betalinear30, "
            "cosine, sqrt_esm or sqrt_odyssey. Hidden tokens then all become the mask token."
        },
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
        if self.mask_schedule is not None:
            if self.mask_schedule not in RATE_DISTRIBUTIONS:
                raise BadInput(
                    f"Unknown --mask_schedule {self.mask_schedule!r}"
                    + did_you_mean(self.mask_schedule, RATE_DISTRIBUTIONS)
                )
            if self.final_mask_rate is not None:
                raise BadInput("--final_mask_rate moves --mask_rate, which --mask_schedule replaces; leave one out.")
        if self.mask_rate_shape not in ("linear", "cosine"):
            raise BadInput(f"--mask_rate_shape {self.mask_rate_shape!r} must be linear or cosine.")

    def collator(self, tokenizer: Any, seed: int) -> MaskedLMCollator:
        """What hides tokens while training."""
        if self.mask_schedule is not None:
            return DiffusionCollator(tokenizer, seed=seed, schedule=self.mask_schedule)
        return MaskedLMCollator(tokenizer, self.rate(), self.mask_replace_prob, self.random_replace_prob, seed=seed)

    def rate(self) -> float | MaskRateSchedule:
        """The rate while training."""
        if self.final_mask_rate is None:
            return self.mask_rate
        return MaskRateSchedule(self.mask_rate, self.final_mask_rate, self.mask_rate_shape)  # type: ignore[arg-type]


class LanguageModelRun(Run):
    """A run of masked ("mlm") or causal ("clm") language modelling."""

    data_args: DataArguments
    baseline_name = "unigram"
    baseline_words = "token frequencies alone"
    embedded_language = "en"
    conversations = False  # whether the data are some

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
            self.conversations = self._has_conversations(raw["train"])
            if self.conversations:
                column = MESSAGES
                good(lambda: conversations.check_conversations(raw, column))
                texts: Iterable[str] = conversations.texts(raw["train"], column)
            else:
                column = text_column(raw["train"], data.text_column)
                texts = (text for batch in raw["train"].iter(1000) for text in batch[column] if text)
            tokenizer = self._tokenizer_for(texts)
            sets = {split: self._pack(raw[split], column, split) for split in ("train", "validation")}
        kind = "conversations" if self.conversations else "documents"
        self.describe_data(
            **{kind: {split: len(raw[split]) for split in sets}},
            rows={split: len(rows) for split, rows in sets.items()},
            packing=self._packing(),
        )
        self.say(
            f"        {len(raw['train']):,} {kind} to train on, {len(raw['validation']):,} held out: "
            f"{len(sets['train']):,} + {len(sets['validation']):,} rows of up to {data.block_size} tokens"
        )
        return tokenizer, sets["train"], sets["validation"]

    def _has_conversations(self, rows: Any) -> bool:
        return (
            self.objective == "clm"
            and self.data_args.text_column is None
            and conversations.is_conversations(rows.features.get(MESSAGES))
        )

    def _tokenizer_for(self, texts: Iterable[str]) -> PreTrainedTokenizerBase:
        asked = getattr(self.data_args, "chat_template", None)
        asked = asked or ("turns" if self.conversations else None)
        options: dict[str, Any] = {}
        if asked is not None:
            options["chat_template"] = conversations.chat_template(asked)
            options["more_tokens"] = conversations.ROLE_TOKENS if asked in conversations.TEMPLATES else ()
        tokenizer = self.make_tokenizer(texts, **options)
        if getattr(self.data_args, "chat_template", None) is not None:
            tokenizer.chat_template = options["chat_template"]  # also of one that was not trained here
        if self.objective == "mlm" and tokenizer.mask_token_id is None:
            raise BadInput(
                f"The tokenizer {tokenizer.name_or_path} has no mask token, so it cannot be used for masked "
                "language modelling."
            )
        if self.conversations and not tokenizer.chat_template:
            raise BadInput(
                f"The tokenizer {tokenizer.name_or_path} has no chat template for the conversations in {MESSAGES!r}; "
                "give one with --chat_template."
            )
        if tokenizer.chat_template:
            self._try_template(tokenizer)
        return tokenizer

    def _try_template(self, tokenizer: PreTrainedTokenizerBase) -> None:
        example = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            _, labels = conversations.encode_conversation(tokenizer, example)
        except Exception as error:  # whatever a template does
            raise BadInput(f"The chat template cannot be used: {error}") from error
        if self.conversations and all(label == -100 for label in labels):
            raise BadInput("The chat template leaves the assistant's words out, so there is nothing to learn.")

    def _packing(self) -> str:
        return self.data_args.packing or ("documents" if self.conversations else "blocks")

    def _pack(self, documents: Any, column: str, split: str) -> Any:
        data, tokenizer = self.data_args, self.tokenizer
        assert tokenizer is not None
        pack_rows = pack_conversations if self.conversations else pack
        processes = data.preprocessing_num_workers
        return good(
            lambda: pack_rows(
                documents, tokenizer, data.block_size, self._packing(), column, processes, f"Tokenizing {split}"
            )
        )

    def evaluate(self, trainer: Trainer) -> dict[str, float]:
        """Loss and perplexity."""
        loss = super().evaluate(trainer)["loss"]
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}

    def example(self) -> Any:
        """A text to try the model on, or a conversation."""
        assert self.tokenizer is not None
        if self.conversations:
            return [{"role": "user", "content": "Hello!"}]
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


class MaskedRun(LanguageModelRun):
    """A run of masked language modelling."""

    def __init__(
        self,
        model_args: ModelArguments,
        data_args: DataArguments,
        mask_args: MaskingArguments,
        training_args: ProgramArguments,
    ) -> None:
        mask_args.check()
        self.mask_args = mask_args
        # logits at the labelled positions only: the same loss, for a fraction of the work (a label smoother wants all)
        sparse = training_args.label_smoothing_factor == 0
        super().__init__("mlm", model_args, data_args, training_args, sparse_prediction=sparse)

    def trainer(self, model: Any, train: Any, held_out: Any, **more: Any) -> Trainer:
        """transformers' own, hiding tokens anew in every epoch and the same ones in every evaluation."""
        masks, seed, tokenizer = self.mask_args, self.args.seed, self.tokenizer
        assert tokenizer is not None
        collator = masks.collator(tokenizer, seed)
        with self.bars():
            held_out = mask_once(held_out, collator, masks.eval_mask_rate, seed)
        return super().trainer(model, train, held_out, data_collator=collator, callbacks=[collator.callback()], **more)


class CausalRun(LanguageModelRun):
    """A run of causal language modelling."""

    def __init__(
        self, model_args: ModelArguments, data_args: CausalDataArguments, training_args: ProgramArguments
    ) -> None:
        super().__init__("clm", model_args, data_args, training_args)

    def trainer(self, model: Any, train: Any, held_out: Any, **more: Any) -> Trainer:
        """transformers' own."""
        assert self.tokenizer is not None
        return super().trainer(model, train, held_out, data_collator=CausalLMCollator(self.tokenizer), **more)
