"""The programs and the tasks of recipes: which `Run` does it, and what it is told.

Only names are written here, so that listing and checking need no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Program:
    """A training program.

    Attributes:
        run: "module:Class" of its `Run`, below this package.
        classes: Section of a recipe -> "module:Class" of the dataclass it fills, in the order `run` takes them.
        use: "module:function" that takes the place of `run` where the data's `mode` is not "train".
        needs: The extra to install if `run` cannot be imported.
    """

    run: str
    classes: Mapping[str, str]
    use: str = ""
    needs: str = ""

    def class_names(self) -> list[str]:
        """Names of the dataclasses."""
        return [reference.partition(":")[2] for reference in self.classes.values()]

    def load(self) -> tuple[Any, dict[str, type]]:
        """The `Run`, and the dataclasses by section.

        Raises:
            BadInput: A package it needs is not installed.
        """
        from .failures import BadInput

        try:
            return load(self.run), {section: load(reference) for section, reference in self.classes.items()}
        except ImportError as error:
            if not self.needs:
                raise
            package, _, extra = self.needs.partition(":")
            raise BadInput(f"{package} must be installed ({error}): pip install 'frankenstein_hf[{extra}]'.") from error

    def main(self, argv: Sequence[str] | None = None) -> dict[str, Any]:
        """Run with these flags, or with those of the command line; returns the metrics, or what was written."""
        from .arguments import parse_arguments

        run, classes = self.load()
        given = parse_arguments(tuple(classes.values()), argv)
        if self.use and getattr(given[1], "mode", "train") != "train":
            return load(self.use)(*given)
        return run(*given).execute()


def load(reference: str) -> Any:
    """The object "module:name" of this package."""
    module, _, name = reference.partition(":")
    return getattr(import_module(f".{module}", __package__), name)


PROGRAMS = {
    "masked_lm": Program(
        "language_modeling:MaskedRun",
        {
            "model": "arguments:ModelArguments",
            "data": "arguments:DataArguments",
            "objective": "language_modeling:MaskingArguments",
            "training": "arguments:ProgramArguments",
        },
    ),
    "causal_lm": Program(
        "language_modeling:CausalRun",
        {
            "model": "arguments:ModelArguments",
            "data": "arguments:CausalDataArguments",
            "training": "arguments:ProgramArguments",
        },
    ),
    "classification": Program(
        "classification:ClassificationRun",
        {
            "model": "arguments:ModelArguments",
            "data": "classification:LabelledDataArguments",
            "training": "arguments:ProgramArguments",
        },
    ),
    "sentence_embedding": Program(
        "embedding:EmbeddingRun",
        {
            "model": "arguments:ModelArguments",
            "data": "embedding:EmbeddingArguments",
            "training": "embedding:EmbeddingProgramArguments",
        },
        use="embedding_use:use",
        needs="sentence-transformers:embeddings",
    ),
}


@dataclass(frozen=True)
class Task:
    """What a recipe can ask a model to learn.

    Attributes:
        summary: One line.
        program: Name in `PROGRAMS`.
        decided: Fields of the data that the task decides.
        metric: The result to compare by.
        greater_is_better: Whether more of it is better.
    """

    summary: str
    program: str
    decided: Mapping[str, Any] = field(default_factory=dict)
    metric: str = "loss"
    greater_is_better: bool = False


TASKS = {
    "masked_lm": Task("an encoder that fills masks", "masked_lm"),
    "causal_lm": Task("a language model that continues text or conversations", "causal_lm"),
    "sequence_classification": Task(
        "labels, several labels or a number for each text", "classification", {"task": "sequence"}, "accuracy", True
    ),
    "token_classification": Task("a label for each word", "classification", {"task": "token"}, "f1", True),
    "sentence_embedding": Task(
        "embeddings of texts, for search and comparison", "sentence_embedding", {"mode": "train"}
    ),
}
