"""What `scripts/run_embedding.py` does in training: a sentence-transformers model from any pattern of mixers.

Importing this module needs sentence-transformers, the extra "embeddings".
"""

import contextlib
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.model_card import SentenceTransformerModelCardData
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import AutoModel, PreTrainedTokenizerBase, Trainer
from transformers.utils import cached_file

from ..data import examples
from ..data.atomic import write_text
from ..hub.cards import OWNER, hub_name, is_generated, is_hub_name, parse_card, target_modules
from ..hub.foreign import code, html_text, markdown, python
from ..modeling.hub_bundle import read_card
from .arguments import (
    FILE_TYPES,
    BadInput,
    ModelArguments,
    ProgramArguments,
    SourceArguments,
    check_choice,
    checked_file,
)
from .checkpoints import CARD
from .embedding_metrics import NAMES, ROLES, evaluator, tf_idf
from .failures import readable
from .labels import number
from .programs import Run, in_shell
from .results import Results
from .sources import strings

MODES = ("train", "similarity", "search", "clustering", "encode")
LOSSES = ("multiple_negatives", "triplet", "cosine")
POOLINGS = ("mean", "cls", "last")
NUM_CLUSTERS = 8  # unless told, or there are fewer texts


@dataclass
class EmbeddingArguments(SourceArguments):
    """What to do: train on texts that belong together (by default parts of docstrings), or use a trained model."""

    mode: str = field(default="train", metadata={"help": f"What to do: {', '.join(MODES)}."})
    columns: str | None = field(
        default=None,
        metadata={
            "help": "The texts of a row, 'anchor,positive' or 'anchor,positive,negative'; by default columns of these "
            "names, or the only two or three columns of text."
        },
    )
    score_column: str | None = field(
        default=None, metadata={"help": "How similar two texts are, −1 to 1; by default 'score' if there is one."}
    )
    loss: str | None = field(
        default=None,
        metadata={
            "help": f"{', '.join(LOSSES)}; by default cosine with scores, triplet with three texts, else the first."
        },
    )
    pooling: str | None = field(
        default=None,
        metadata={"help": f"How a new embedding is made: {', '.join(POOLINGS)}; by default last if causal, else mean."},
    )
    validation_split_percentage: float = field(
        default=10.0, metadata={"help": "Share of the rows to hold out when nothing was given to evaluate on."}
    )
    input_file: str | None = field(
        default=None,
        metadata={"help": "Texts to use a model on: a txt file with one a line, csv, json, jsonl, parquet."},
    )
    text_column: str | None = field(default=None, metadata={"help": "Column with the texts of these files."})
    corpus_file: str | None = field(default=None, metadata={"help": "Texts to search in."})
    top_k: int = field(default=5, metadata={"help": "How many texts a search finds."})
    num_clusters: int | None = field(
        default=None,
        metadata={"help": f"How many clusters to make; by default {NUM_CLUSTERS}, or fewer if there are fewer texts."},
    )

    def check(self) -> None:
        """Raise `BadInput` for what cannot be."""
        super().check()
        check_choice("mode", self.mode, MODES)
        if self.loss is not None:
            check_choice("loss", self.loss, LOSSES)
        if self.pooling is not None:
            check_choice("pooling", self.pooling, POOLINGS)
        for name in ("top_k", "num_clusters"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise BadInput(f"--{name} {number} must be at least 1.")
        needed = {"train": (), "search": ("input_file", "corpus_file")}.get(self.mode, ("input_file",))
        if self.columns is not None and self.mode not in ("train", "similarity"):
            raise BadInput(f"--columns is not used by --mode {self.mode}; choose one with --text_column.")
        for name in ("input_file", "corpus_file"):
            value = getattr(self, name)
            if name in needed and value is None:
                raise BadInput(f"--mode {self.mode} needs --{name}.")
            if name not in needed and value is not None:
                raise BadInput(f"--{name} is not used by --mode {self.mode}.")
            if value is not None:
                checked_file(name, value, FILE_TYPES)


@dataclass
class EmbeddingProgramArguments(ProgramArguments, SentenceTransformerTrainingArguments):
    """`ProgramArguments` for sentence-transformers' trainer."""

    batch_sampler: str = field(
        default="no_duplicates",
        metadata={"help": "batch_sampler, no_duplicates (other rows of a batch are wrong answers) or group_by_label."},
    )


class EmbeddingCardData(SentenceTransformerModelCardData):
    """sentence-transformers' card of a model whose code may lie beside it, with what comes from outside escaped.

    Attributes:
        results: A section of the card, shown where the template says `{{ results }}`.
        place: What examples call the model while it has no name on the Hub.
    """

    results: str = ""
    place: str = f"{OWNER}/MODEL"

    def to_dict(self) -> dict[str, Any]:
        """Variables of the template."""
        values = super().to_dict()
        for name in ("all_hyperparameters", "non_default_hyperparameters"):
            values[name] = {key: markdown(value) for key, value in (values.get(name) or {}).items()}
        return values | {"results": self.results}

    @staticmethod
    def _format_example_value(value: Any) -> str:
        """A cell of the table of examples, between the tags of code."""
        shown = str(value)
        return html_text(shown if len(shown) <= 1000 else f"{shown[:1000]}…")

    def generate_usage_snippet(self) -> str:
        """The snippet, which runs that code."""
        snippet = super().generate_usage_snippet().replace('"sentence_transformers_model_id"', python(self.place))
        body: Any = self.model[0].auto_model  # type: ignore[index]
        if getattr(body, "save_code", hasattr(body.config, "auto_map")):
            snippet = re.sub(r'(?<= = SentenceTransformer\()("[^"]+")(?=\))', r"\1, trust_remote_code=True", snippet)
        return snippet

    def try_to_set_base_model(self) -> None:
        """Nothing: it would look for the last two folders of a path on the Hub; `EmbeddingRun` knows better."""


class EmbeddingRun(Run):
    """A run that trains an embedding model."""

    data_args: EmbeddingArguments
    task = "sentence-similarity"
    baseline_name = "tf_idf"
    baseline_words = "words in common (TF-IDF)"
    embedded_language = "en"

    def __init__(
        self, model_args: ModelArguments, data_args: EmbeddingArguments, training_args: EmbeddingProgramArguments
    ) -> None:
        super().__init__("embedding", AutoModel, model_args, data_args, training_args)
        if data_args.pooling is not None and self._is_sentence_transformer():
            raise BadInput(f"--pooling is decided by {model_args.model_name_or_path}, which is an embedding model.")
        if model_args.model_name_or_path and model_args.tokenizer_name:
            raise BadInput("--tokenizer_name cannot be chosen with --model_name_or_path, which has its own.")

    def prepare_data(self) -> tuple[PreTrainedTokenizerBase, Any, Any]:
        """The tokenizer, and texts to train and evaluate on: `anchor`, `positive`, maybe `negative` or `score`."""
        with self.bars(), self.args.main_process_first(desc="preparing the data"):
            source = self.read(examples.docstring_pairs)
            columns, score = self._columns(source.rows["train"])
            self.loss = self._loss(columns, score)
            kept = dict(zip(columns, ROLES)) | ({score: "score"} if score and self.loss == "cosine" else {})
            for split in ("train", "validation"):
                rows = source.rows[split]
                if missing := [name for name in kept if name not in rows.column_names]:
                    raise BadInput(f"{split} has no column {missing[0]!r}; there are {', '.join(rows.column_names)}.")
                rows = rows.select_columns(list(kept))
                for row, values in enumerate(rows):
                    for name in columns:
                        if not values[name]:
                            raise BadInput(f"Row {row} of {split} has nothing in {name!r}.")
                    if "score" in kept.values() and abs(number(values[score], str(score), split, row)) > 1:
                        raise BadInput(f"Row {row} of {split}: {score} must be between -1 and 1, got {values[score]}.")
                source.rows[split] = rows.rename_columns(kept)
            train, held_out = source.rows["train"], source.rows["validation"]
            texts = (text for batch in train.iter(1000) for role in ROLES for text in batch.get(role, ()))
            tokenizer = self.make_tokenizer(texts)
        self.describe_data(rows={split: len(rows) for split, rows in source.rows.items()}, loss=self.loss)
        self.say(
            f"        {len(train):,} rows of {', '.join(train.column_names)} to train on, {len(held_out):,} held out"
        )
        return tokenizer, train, held_out

    def build_model(self) -> Any:
        """The new model, or the checkpoint to continue from, as a `SentenceTransformer`."""
        transformers.logging.disable_progress_bar()
        length = self.data_args.block_size
        if self._is_sentence_transformer():
            name = self.model_args.model_name_or_path
            model = load(self.model_args, model_card_data=EmbeddingCardData())
            model.max_seq_length = min(length, model.max_seq_length or length)
            body: Any = model[0]
            self.describe_model(model, body.auto_model.config)
            self.say(f"        an embedding model, {name}")
            return model
        base = super().build_model()
        pooling = self.data_args.pooling or ("last" if getattr(base, "is_causal", False) else "mean")
        assert self.tokenizer is not None
        with tempfile.TemporaryDirectory() as folder:  # the module can only be made from files
            base.save_pretrained(folder, **({"save_code": False} if hasattr(base, "save_code") else {}))
            self.tokenizer.save_pretrained(folder)
            body = Transformer(
                folder,
                max_seq_length=length,
                model_kwargs=self._computation(),
                config_kwargs={"trust_remote_code": self.model_args.trust_remote_code},
            )
        body.auto_model.config._name_or_path = self.model_args.model_name_or_path or ""
        mode = {"last": "lasttoken"}.get(pooling, pooling)
        modules = [body, Pooling(base.config.hidden_size, mode)]
        return SentenceTransformer(modules=modules, model_card_data=EmbeddingCardData())

    def trainer(self, model: Any, train: Any, held_out: Any, **more: Any) -> SentenceTransformerTrainer:
        """sentence-transformers' trainer with the loss and the evaluators that fit the data."""
        self._describe_for_card(model)
        loss: Any = {
            "multiple_negatives": lambda: losses.MultipleNegativesRankingLoss(model),
            "triplet": lambda: losses.TripletLoss(model, losses.TripletDistanceMetric.COSINE, triplet_margin=0.5),
            "cosine": lambda: losses.CosineSimilarityLoss(model),
        }[self.loss]()
        trainer = SentenceTransformerTrainer(
            model=model,
            args=self.args,  # type: ignore[arg-type]
            train_dataset=train,
            eval_dataset=held_out,
            loss=loss,
            evaluator=evaluator(held_out, self.loss),
        )
        if self._card_by_hand():  # sentence-transformers would write over it, at the end and in pushes before
            skipped = trainer._checkpoint_push_skip_names
            model._create_model_card = lambda *args, **kwargs: None
            trainer._checkpoint_push_skip_names = lambda folder: skipped(folder) | {CARD}  # type: ignore[method-assign, assignment]
        return trainer

    def _describe_for_card(self, model: Any) -> None:
        """Tell sentence-transformers' card what it cannot know; its `Trainer` completes it."""
        assert self.source is not None
        card, name = model.model_card_data, self.model_args.model_name_or_path
        card.generate_widget_examples = False
        card.place = hub_name(self.args.output_dir or "", self.args.hub_model_id)
        card.license, card.language = self.model_args.license, list(self.languages())
        if mixers := getattr(model[0].auto_model.config, "mixer_names", None):
            card.add_tags(["frankenstein", *dict.fromkeys(mixers)])
        if name and is_hub_name(name) and not card.set_base_model(name, self.model_args.model_revision):
            card.base_model = name  # the Hub could not be asked
        dataset = self.data_args.dataset_name
        if not dataset or not is_hub_name(dataset):  # datasets of the Hub are recognised
            card.train_datasets, card.eval_datasets = [{"name": self.source.words}], [{"name": self.source.words}]

    # ------------------------------------------------------------------ data

    def _is_sentence_transformer(self) -> bool:
        name = self.model_args.model_name_or_path
        return bool(name) and is_sentence_transformer(str(name), self.model_args.model_revision)

    def _read_config(self) -> Any:
        return None if self._is_sentence_transformer() else super()._read_config()

    def _columns(self, rows: Any) -> tuple[list[str], str | None]:
        data, texts = self.data_args, strings(rows)
        if data.columns is not None:
            columns = [name.strip() for name in data.columns.split(",") if name.strip()]
        elif {"anchor", "positive"} <= set(texts):
            columns = [role for role in ROLES if role in texts]
        else:
            columns = texts
        if len(columns) not in (2, 3) or len(set(columns)) != len(columns) or not set(columns) <= set(texts):
            raise BadInput(
                f"Choose two or three columns of text with --columns; there are {', '.join(texts) or 'none'}."
            )
        if data.score_column is not None and data.score_column not in rows.column_names:
            raise BadInput(
                f"--score_column: there is no column {data.score_column!r}; there are {', '.join(rows.column_names)}."
            )
        return columns, data.score_column or ("score" if "score" in rows.column_names else None)

    def _loss(self, columns: list[str], score: str | None) -> str:
        if self.data_args.score_column is not None and self.data_args.loss not in (None, "cosine"):
            raise BadInput(f"--loss {self.data_args.loss} does not use a --score_column.")
        loss = self.data_args.loss or ("cosine" if score else "triplet" if len(columns) == 3 else "multiple_negatives")
        if loss == "triplet" and len(columns) != 3:
            raise BadInput("--loss triplet needs three texts a row: an anchor, a positive and a negative.")
        if loss == "cosine" and (score is None or len(columns) != 2):
            raise BadInput("--loss cosine needs two texts a row and a --score_column.")
        return loss

    # ------------------------------------------------------------------ results

    def usage(self, output: Path) -> str:
        """A command that uses the model."""
        return in_shell(
            f"import frankenstein_hf; from sentence_transformers import SentenceTransformer; "
            f"print(SentenceTransformer({python(str(output))}).encode([{python(self.example())}]))"
        )

    def evaluate(self, trainer: Trainer) -> dict[str, float]:
        """The loss, and how well the texts that belong together are found (or, with scores, the correlations)."""
        found = super().evaluate(trainer)
        with contextlib.suppress(OSError):
            (Path(self.args.output_dir or "") / "eval").rmdir()  # made for files that are not written
        return {name: float(found[key]) for key, name in NAMES.items() if key in found}

    def baseline(self, trainer: Trainer) -> dict[str, float]:
        """The same for the words in common."""
        return tf_idf(trainer.train_dataset, trainer.eval_dataset, self.loss)

    def _card_by_hand(self) -> bool:
        """Whether the output folder has a card that no program wrote."""
        card = parse_card(read_card(self.args.output_dir or "") or "")
        return not is_generated(card) and "sentence-transformers" not in (card.metadata.get("tags") or ())

    def add_to_card(self, trainer: Trainer, output: Path, results: Results) -> None:
        """Put the results into sentence-transformers' card, also when it writes it again for a push."""
        model: Any = trainer.model
        if self._card_by_hand():
            return
        self._card = tempfile.TemporaryDirectory()  # lives as long as the run
        data = model.model_card_data
        template = Path(data.template_path).read_text(encoding="utf-8")
        above, details, below = template.partition("## Model Details\n")
        section = "## Results\n\n{{ results }}\n\n"  # a variable: what comes from outside is never a template
        whole = "".join((above if details else f"{above}\n\n", section, details, below))
        data.results = results.text(self.model_args.model_name_or_path)
        layers: Any = getattr(model[0].auto_model, "layers", ())
        if hasattr(model[0].auto_model.config, "mixer_names"):
            named = ", ".join(map(code, target_modules(layers)))
            data.results += f"\n\n`target_modules` for adapters, the projections of its mixers: {named}."
        data.template_path = write_text(Path(self._card.name) / "template.md", whole)
        model._create_model_card(self._card.name)
        write_text(output / CARD, (Path(self._card.name) / CARD).read_text(encoding="utf-8"))


def is_sentence_transformer(name: str, revision: str = "main") -> bool:
    """Whether a folder or a model of the Hub was saved by sentence-transformers."""
    if Path(name).is_dir():
        return (Path(name) / "modules.json").is_file()
    quietly = {"_raise_exceptions_for_missing_entries": False}
    return readable(name, lambda: cached_file(name, "modules.json", revision=revision, **quietly)) is not None


def load(model_args: ModelArguments, **options: Any) -> SentenceTransformer:
    """The embedding model `--model_name_or_path`, with `options`; one without a pooling gets the mean."""
    name = model_args.attn_implementation
    return SentenceTransformer(
        model_args.model_name_or_path,
        revision=model_args.model_revision,
        trust_remote_code=model_args.trust_remote_code,
        model_kwargs={} if name is None else {"attn_implementation": name},
        **options,
    )
