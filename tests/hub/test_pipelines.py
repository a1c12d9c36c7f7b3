"""`pipeline()` on saved models of every head with a stock tokenizer: it answers, and nothing warns."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import PreTrainedTokenizerFast, pipeline
from transformers.pipelines import SUPPORTED_TASKS
from transformers.utils import logging as transformers_logging

from frankenstein_hf.hub.cards import TASKS

from ..heads import head_model
from ..tiny import VOCAB, tiny_tokenizer

PATTERN = ["gated_deltanet", "swa", "mamba", "standard"]
LABELS = {0: "contradiction", 1: "neutral", 2: "entailment"}
TASK_OF_HEAD = {auto_name: task for auto_name, (task, _) in TASKS.items()}
SERVED = {task: auto_name for auto_name, task in TASK_OF_HEAD.items() if task in SUPPORTED_TASKS}
SERVED["zero-shot-classification"] = "AutoModelForSequenceClassification"
TEXTS = ["t5 t6 t7 t8", "t9"]


@contextmanager
def silence() -> Iterator[None]:
    """Fails if anything is logged as a warning or warned about, even what is said only once a process."""
    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    for once in ("warning_once", "info_once"):
        getattr(transformers_logging, once).cache_clear()
    listener = Listener(logging.WARNING)
    loggers = [logging.getLogger(), transformers_logging.get_logger()]
    for logger in loggers:
        logger.addHandler(listener)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        for logger in loggers:
            logger.removeHandler(listener)
    heard += [str(warning.message) for warning in caught]
    assert not heard


def saved_pipeline(task: str, folder: Any, **changes: Any) -> Any:
    """The pipeline of a model saved with its tokenizer, from disk; building it is silent as well."""
    model = head_model(SERVED[task], PATTERN, **{"pad_token_id": 0, "id2label": LABELS, **changes})
    if "label2id" not in changes:
        model.config.label2id = {label: number for number, label in model.config.id2label.items()}
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    with silence():
        return pipeline(task, str(folder))


def check_fill_mask(pipe: Any) -> None:
    best = pipe("t5 [MASK] t7", top_k=2)
    assert len(best) == 2 and best[0]["score"] >= best[1]["score"]
    assert best[0]["sequence"] == f"t5 {best[0]['token_str']} t7"


def check_text_generation(pipe: Any) -> None:
    answers = pipe(TEXTS, max_new_tokens=4, do_sample=False, batch_size=2)  # the second is padded on the left
    for text, (answer,) in zip(TEXTS, answers):
        assert answer["generated_text"].startswith(text)
        assert answer == pipe(text, max_new_tokens=4, do_sample=False)[0]


def check_text_classification(pipe: Any) -> None:
    for scores in pipe(TEXTS, top_k=None, batch_size=2):
        assert {score["label"] for score in scores} == set(LABELS.values())
        assert sum(score["score"] for score in scores) == pytest.approx(1)
    assert pipe({"text": "t5", "text_pair": "t6"})["label"] in LABELS.values()


def check_token_classification(pipe: Any) -> None:
    for text, found in zip(TEXTS, pipe(TEXTS, batch_size=2, ignore_labels=[])):
        assert [entity["word"] for entity in found] == text.split()
        assert all(entity["entity"] in LABELS.values() for entity in found)
    assert pipe(TEXTS[0], aggregation_strategy="simple", ignore_labels=[])[-1]["end"] == len(TEXTS[0])


def check_feature_extraction(pipe: Any) -> None:
    for text, states in zip(TEXTS, pipe(TEXTS)):
        assert np.array(states).shape == (1, len(text.split()), 20)


def check_zero_shot_classification(pipe: Any) -> None:
    answer = pipe("t5 t6", candidate_labels=["t7", "t8 t9"], hypothesis_template="t10 {}")  # pairs of unequal length
    assert sorted(answer["labels"]) == ["t7", "t8 t9"] and sum(answer["scores"]) == pytest.approx(1)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("task", sorted(SERVED))
def test_every_task_runs_from_disk_without_a_warning(task, is_causal, tmp_path):
    check: Callable[[Any], None] = globals()[f"check_{task.replace('-', '_')}"]
    pipe = saved_pipeline(task, tmp_path, is_causal=None if "MaskedLM" in SERVED[task] else is_causal)
    assert type(pipe.model) is getattr(transformers, SERVED[task])._model_mapping[type(pipe.model.config)]
    with silence():
        check(pipe)


def test_a_warning_would_be_heard(tmp_path):
    with pytest.raises(AssertionError, match="saved by a causal model"):
        saved_pipeline("fill-mask", tmp_path, is_causal=True)


def test_a_batch_with_pads_gives_the_answers_of_single_texts(tmp_path):
    pipe = saved_pipeline("text-classification", tmp_path)
    for together, text in zip(pipe(TEXTS, batch_size=2), TEXTS):
        alone = pipe(text)[0]
        assert together["label"] == alone["label"] and together["score"] == pytest.approx(alone["score"], rel=1e-5)


@pytest.mark.parametrize(
    "problem_type, apply", [("multi_label_classification", torch.sigmoid), ("regression", torch.nn.Identity())]
)
def test_scores_follow_the_problem_type_of_the_checkpoint(problem_type, apply, tmp_path):
    pipe = saved_pipeline("text-classification", tmp_path, problem_type=problem_type)
    with torch.no_grad():
        logits = pipe.model(torch.tensor([[5, 6]])).logits[0]
    scores = {score["label"]: score["score"] for score in pipe("t5 t6", top_k=None)}
    for number, label in LABELS.items():
        assert scores[label] == pytest.approx(apply(logits)[number].item(), rel=1e-5)


def test_tasks_without_a_pipeline_are_those_transformers_has_removed_or_never_had():
    without = {task for task in TASK_OF_HEAD.values() if task not in SERVED}
    assert without == {"question-answering", "multiple-choice"}


def test_an_answer_is_found_without_a_pipeline_too(tmp_path):
    model, tokenizer = head_model("AutoModelForQuestionAnswering", PATTERN, pad_token_id=0), tiny_tokenizer()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with silence(), torch.no_grad():
        model = transformers.AutoModelForQuestionAnswering.from_pretrained(tmp_path)
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
        inputs = tokenizer(["t5", "t6 t7"], ["t8 t9 t10", "t11"], padding=True, return_tensors="pt")
        output = model(**inputs)
    with pytest.raises(KeyError, match="has been removed from transformers"):
        pipeline("question-answering", str(tmp_path))
    real = inputs["attention_mask"].bool()
    for scores in (output.start_logits, output.end_logits):
        assert (scores.softmax(-1)[~real] == 0).all() and (scores + scores).isfinite().all()
    assert isinstance(tokenizer, PreTrainedTokenizerFast) and int(inputs["input_ids"].max()) < VOCAB
