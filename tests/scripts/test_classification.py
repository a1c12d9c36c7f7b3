"""`run_classification.py`: every kind of label from files, metrics that are those of the saved model, bad input."""

import csv
import itertools
import json
import random
import sys

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    pipeline,
)

pytest.importorskip("sklearn")
pytest.importorskip("nervaluate")

from frankenstein_hf.data import train_tokenizer
from frankenstein_hf.data.tokenization import words_begin_with_a_space
from frankenstein_hf.training.arguments import BadInput
from frankenstein_hf.training.classification import align
from frankenstein_hf.training.failures import run_main

GOOD, BAD = "bright kind lovely warm".split(), "cold cruel dull grim".split()  # noqa: SIM905
ENTITIES = {"O": "the went to with".split(), "B-name": ["Ada", "Grace"], "I-name": ["Lovelace", "Hopper"]}  # noqa: SIM905


def sentences(number=40):
    """Texts of three words and whether their words are good; deterministic."""
    chance = random.Random(0)
    for place in range(number):
        good = place % 2 == 0
        yield " ".join(chance.choices(GOOD if good else BAD, k=3)), good


def tagged(number=40):
    """Words and their tags, with names of one or two words."""
    chance = random.Random(1)
    for _ in range(number):
        tags = ["O", "B-name", *["I-name"] * chance.randrange(2), "O", "O", "B-name"]
        yield {"tokens": [chance.choice(ENTITIES[tag]) for tag in tags], "tags": tags}


# name -> rows, flags, the problem, the labels, the metrics
KINDS = {
    "words": (
        [{"text": text, "label": "good" if good else "bad"} for text, good in sentences()],
        {},
        "single_label_classification",
        ["bad", "good"],
    ),
    "whole numbers": (
        [{"text": text, "label": 10 if good else 9} for text, good in sentences()],
        {},
        "single_label_classification",
        ["9", "10"],
    ),
    "yes and no": (
        [{"text": text, "label": good} for text, good in sentences()],
        {},
        "single_label_classification",
        ["False", "True"],
    ),
    "fractions": (
        [{"text": text, "label": text.count("a") / 2} for text, _ in sentences()],
        {},
        "regression",
        ["label"],
    ),
    "whole numbers as numbers": (
        [{"text": text, "stars": text.count("l")} for text, _ in sentences()],
        {"label_column": "stars", "problem_type": "regression"},
        "regression",
        ["stars"],
    ),
    "lists": (
        [{"text": text, "labels": ["good", "any"] if good else ["any"]} for text, good in sentences()],
        {},
        "multi_label_classification",
        ["any", "good"],
    ),
    "columns": (
        [{"text": text, "good": int(good), "warm": int("warm" in text)} for text, good in sentences()],
        {"label_column": "good,warm"},
        "multi_label_classification",
        ["good", "warm"],
    ),
    "pairs": (
        [
            {"one": text, "two": random.Random(place).choice(GOOD), "label": "yes" if good else "no"}
            for place, (text, good) in enumerate(sentences())
        ],
        {"text_column": "one", "text_pair_column": "two"},
        "single_label_classification",
        ["no", "yes"],
    ),
    "tags": (list(tagged()), {"task": "token"}, None, ["B-name", "I-name", "O"]),
}
METRICS = {
    "single_label_classification": {"accuracy", "macro_f1", "mcc"},
    "multi_label_classification": {"micro_f1", "macro_f1", "subset_accuracy"},
    "regression": {"mse", "pearson", "spearman"},
    None: {"accuracy", "macro_f1", "entity_precision", "entity_recall", "entity_f1"},
}


@pytest.fixture
def program():
    """The program."""
    import run_classification

    return run_classification


@pytest.fixture
def labelled(tmp_path, flags):
    """Makes a command line for rows, written to a file."""

    def make(rows, validation=None, suffix="jsonl", output="out", **changes):
        files = {}
        for split, part in (("train", rows), ("validation", validation)):
            if part is None:
                continue
            path = tmp_path / f"{split}.{suffix}"
            with path.open("w", newline="") as file:
                if suffix == "csv":
                    csv.writer(file).writerows([part[0], *(row.values() for row in part)])
                else:
                    file.writelines(json.dumps(row) + "\n" for row in part)
            files[f"{split}_file"] = path
        return flags(output, **files, **changes)

    return make


def held_out(rows):
    """The rows that a run with seed 42 and a fifth held out evaluates."""
    from datasets import Dataset

    return list(Dataset.from_list(rows).train_test_split(test_size=0.2, seed=42)["test"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_problem_is_read_from_the_labels_and_the_metrics_are_those_of_the_saved_model(
    kind, program, labelled, tmp_path
):
    rows, changes, problem, names = KINDS[kind]
    metrics = program.main(labelled(rows, **changes, learning_rate=0.01, save_strategy="no"))
    out = tmp_path / "out"
    assert json.loads((out / "metrics.json").read_text()) == metrics
    assert set(metrics["after"]) == METRICS[problem] | {"loss"} and set(metrics["constant"]) == METRICS[problem]
    config = json.loads((out / "config.json").read_text())
    assert list(config["id2label"].values()) == names and config.get("problem_type") == problem
    tokenizer = AutoTokenizer.from_pretrained(out)
    if problem is None:
        model, right = AutoModelForTokenClassification.from_pretrained(out).eval(), []
        for row in held_out(rows):
            encoded = tokenizer(row["tokens"], is_split_into_words=True, truncation=True, max_length=16)
            places = {word: place for place, word in reversed(list(enumerate(encoded.word_ids()))) if word is not None}
            answers = model(torch.tensor([encoded["input_ids"]])).logits[0].argmax(-1)
            right += [names[answers[place]] == row["tags"][word] for word, place in places.items()]
        assert metrics["after"]["accuracy"] == pytest.approx(np.mean(right))
        return
    model = AutoModelForSequenceClassification.from_pretrained(out).eval()
    texts = [changes.get("text_column", "text"), *([changes["text_pair_column"]] if kind == "pairs" else [])]
    answers, truths = [], []
    for row in held_out(rows):
        logits = model(**tokenizer(*(row[name] for name in texts), return_tensors="pt")).logits[0].detach()
        if problem == "single_label_classification":
            answers.append(names[int(logits.argmax())])
            truths.append(str(row["label"]))
        elif problem == "regression":
            answers.append(float(logits[0]))
            truths.append(float(row[names[0]]))
        else:
            answers.append({name for name, logit in zip(names, logits) if logit > 0})
            truths.append(set(row["labels"]) if kind == "lists" else {name for name in names if row[name]})
    if problem == "regression":
        expected = np.mean((np.array(answers) - np.array(truths)) ** 2)
        assert metrics["after"]["mse"] == pytest.approx(expected, rel=1e-4)
    else:
        name = "accuracy" if problem.startswith("single") else "subset_accuracy"
        assert metrics["after"][name] == pytest.approx(np.mean([a == t for a, t in zip(answers, truths)]))


@pytest.mark.parametrize("kind, better", [("words", "accuracy"), ("lists", "macro_f1"), ("tags", "entity_f1")])
def test_what_can_be_learned_is_learned(kind, better, program, labelled, tmp_path):
    rows, changes, *_ = KINDS[kind]
    metrics = program.main(labelled(rows, **changes, max_steps=40, learning_rate=0.01, save_strategy="no"))
    assert metrics["after"][better] > 0.9 > metrics["constant"][better] + 0.1
    task, text = ("token-classification", "Ada Lovelace went") if kind == "tags" else ("text-classification", "warm")
    auto = AutoModelForTokenClassification if kind == "tags" else AutoModelForSequenceClassification
    out = tmp_path / "out"
    use = pipeline(task, model=auto.from_pretrained(out), tokenizer=AutoTokenizer.from_pretrained(out))
    if kind == "tags":
        (entity,) = pipeline(task, model=use.model, tokenizer=use.tokenizer, aggregation_strategy="first")(text)
        assert (entity["entity_group"], entity["word"].strip()) == ("name", "Ada Lovelace")
    elif kind == "words":
        assert use(text)[0]["label"] == "good"


def test_fractions_are_learned(program, labelled):
    rows = [{"text": f"{text} {text}", "label": 3.5 if good else -1.5} for text, good in sentences()]
    line = labelled(rows, suffix="csv", max_steps=40, learning_rate=0.01, save_strategy="no")
    metrics = program.main(line)
    assert metrics["after"]["pearson"] > 0.9 and metrics["after"]["mse"] < metrics["constant"]["mse"] / 2


def test_a_checkpoint_goes_on_with_its_tokenizer_its_pattern_and_the_order_of_its_labels(program, labelled, tmp_path):
    import run_mlm

    rows = KINDS["words"][0]
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": row["text"]}) + "\n" for row in rows))
    run_mlm.main(labelled(rows, output="mlm", packing="none", text_column="text", layer_pattern="gla,swa"))
    new = {"layer_pattern": None, "config_overrides": None, "vocab_size": None}
    program.main(labelled(rows, model_name_or_path=tmp_path / "mlm", **new))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["layer_pattern"] == ["gla", "swa"]
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "mlm" / "tokenizer.json").read_bytes()

    config["id2label"] = {"0": "good", "1": "bad"}
    config["label2id"] = {"good": 0, "bad": 1}
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    before = program.main(labelled(rows, output="again", model_name_or_path=tmp_path / "out", **new))["data"]
    assert before["labels"] == ["good", "bad"]
    other = [{**row, "label": row["text"][0]} for row in rows]
    many = program.main(labelled(other, output="other", model_name_or_path=tmp_path / "out", **new))
    assert many["data"]["labels"] == sorted({row["label"] for row in other})


def test_a_resumed_run_equals_a_whole_one_and_its_curve_covers_all_steps(program, labelled, tmp_path):
    rows = KINDS["words"][0]
    common = {"logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2}
    whole = program.main(labelled(rows, **common))
    out = tmp_path / "out"
    for path in ("checkpoint-4/trainer_state.json", "metrics.json", "loss.png", "model.safetensors"):
        (out / path).unlink(missing_ok=True)
    resumed = program.main(labelled(rows, **common))
    assert resumed["after"] == whole["after"] and resumed["curve"] == whole["curve"]
    assert [step for step, _ in resumed["curve"]["train"]] == [1, 2, 3, 4]
    assert [step for step, _ in resumed["curve"]["held_out"]] == [0, 2, 4]
    assert resumed["curve"]["held_out"][-1][1] == whole["after"]["loss"]

    other = [{**row, "label": row["label"].upper()} for row in rows]
    with pytest.raises(BadInput, match="trained for other labels: bad, good"):
        program.main(labelled(other, **common))


ROWS = [{"text": text, "label": "good" if good else "bad"} for text, good in sentences(10)]
TAGS = list(tagged(10))
WRONG = {
    "no label column": ([{"text": "a"}] * 9, {}, "--label_column; there are text"),
    "another label column": (ROWS, {"label_column": "stars"}, "no column 'stars'"),
    "another text column": (ROWS, {"text_column": "review"}, "--text_column 'review' is no column of text"),
    "another second text": (ROWS, {"text_pair_column": "review"}, "--text_pair_column 'review'"),
    "one class only": ([{**row, "label": "good"} for row in ROWS], {}, "the same label, good"),
    "a label missing": ([*ROWS, {"text": "a", "label": None}], {}, r"Row \d of (train|validation) has no label"),
    "a text missing": (
        [*ROWS, {"text": "", "label": "good"}],
        {},
        r"Row \d of (train|validation) has nothing in 'text'",
    ),
    "words as numbers": (ROWS, {"problem_type": "regression"}, "label must be a number, got '(good|bad)'"),
    "fractions as classes": (
        [{"text": "a", "label": 0.5}] * 9,
        {"problem_type": "single_label_classification"},
        "fractions, which are no classes",
    ),
    "lists as classes": (
        [{"text": "a", "label": ["x"]}] * 9,
        {"problem_type": "single_label_classification"},
        "several labels a row",
    ),
    "lists as numbers": ([{"text": "a", "label": [1.0]}] * 9, {"problem_type": "regression"}, "one number a row"),
    "a word as several labels": (ROWS, {"problem_type": "multi_label_classification"}, "need lists"),
    "counts as yes and no": (
        [{"text": "a", "x": 2, "y": 0}] * 9,
        {"label_column": "x,y"},
        "x must be 0 or 1, got 2",
    ),
    "unknown problem": (ROWS, {"problem_type": "regresion"}, "did you mean 'regression'"),
    "unknown task": (ROWS, {"task": "tokens"}, "did you mean 'token'"),
    "problem of tokens": (TAGS, {"task": "token", "problem_type": "regression"}, "for --task sequence"),
    "texts for words": (ROWS, {"task": "token"}, "lists of words"),
    "too few tags": ([*TAGS, {"tokens": ["a", "b"], "tags": ["O"]}], {"task": "token"}, "2 words and 1 labels"),
    "one tag": ([{"tokens": ["a"], "tags": ["O"]}] * 9, {"task": "token"}, "the same label, O"),
    "several labels without data": ([], {"problem_type": "multi_label_classification"}, "give --train_file"),
    "no such checkpoint": (
        ROWS,
        {"model_name_or_path": "nowhere/at/all", "layer_pattern": None, "config_overrides": None},
        "Cannot read --model_name_or_path",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_named_in_a_line_and_nothing_is_written(case, program, labelled, tmp_path, monkeypatch, capsys):
    rows, changes, message = WRONG[case]
    line = labelled(rows, **changes) if rows else labelled(None, train_file=None, **changes)
    with pytest.raises(BadInput, match=message):
        program.main(line)
    assert not (tmp_path / "out").exists()
    if case == "one class only":
        monkeypatch.setattr(sys, "argv", ["run_classification.py", *line])
        with pytest.raises(SystemExit) as end:
            run_main(program.main)
        assert end.value.code == 2
        assert capsys.readouterr().err.strip().splitlines()[-1].startswith("run_classification.py: error: All training")


def test_a_label_only_the_validation_file_has_is_named(program, labelled, tmp_path):
    new = [*ROWS, {"text": "grim", "label": "ugly"}]
    with pytest.raises(BadInput, match=r"Row 10 of validation has the label 'ugly'.*bad, good"):
        program.main(labelled(ROWS, new))
    with pytest.raises(BadInput, match="Row 0 of validation has no label"):
        program.main(labelled(ROWS, [{"text": "grim"}]))
    assert not (tmp_path / "out").exists()
    rare = [*ROWS, {"text": "grim", "label": "ugly"}]  # held out or not, it is one of the labels
    for seed in range(3):
        line = labelled(rare, seed=seed, do_train=False, do_eval=False, output=f"out{seed}")
        assert program.main(line)["data"]["labels"] == ["bad", "good", "ugly"]


def test_the_label_of_a_word_stands_at_its_first_token():
    words = [["unbelievable", "x", "->", "naïve"], ["y", "unbelievable"]]
    tokenizer = train_tokenizer(["a tiny text about nothing"], 300)
    words_begin_with_a_space(tokenizer)
    encoded = tokenizer(words, is_split_into_words=True)
    for row, row_words in enumerate(words):
        labels = align(encoded.word_ids(row), list(range(len(row_words))))
        ids = encoded["input_ids"][row]
        assert labels[0] == labels[-1] == -100  # [CLS] and [SEP]
        firsts = [place for place, label in enumerate(labels) if label != -100]
        assert [labels[place] for place in firsts] == list(range(len(row_words)))
        for first, last in itertools.pairwise([*firsts, len(ids) - 1]):
            assert tokenizer.decode(ids[first:last]) == " " + row_words[labels[first]]


def test_long_rows_are_cut_and_their_later_words_not_asked_for(program, labelled):
    rows = [{"tokens": row["tokens"] * 9, "tags": row["tags"] * 9} for row in KINDS["tags"][0]]
    metrics = program.main(labelled(rows, task="token", max_steps=1))
    assert metrics["after"]["loss"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes, metric, enough",
    [
        ({}, "accuracy", 0.5),  # of ten classes; more steps reach more
        ({"task": "token"}, "macro_f1", 0.8),
        ({"problem_type": "regression", "vocab_size": 2000}, "pearson", 0.3),
    ],
)
def test_the_embedded_data_is_learned(changes, metric, enough, program, flags):
    changes.get("problem_type") and pytest.importorskip("vaderSentiment")
    settings = {
        "train_file": None,
        "config_overrides": "hidden_size=64,num_hidden_layers=2,num_attention_heads=2",
        "per_device_train_batch_size": 32,
        "learning_rate": 3e-3,
        "max_steps": 200,
        "block_size": 96,
    }
    metrics = program.main(flags(**settings | changes))
    assert metrics["after"][metric] > enough > metrics["constant"][metric]


@pytest.mark.parametrize("changes", [{}, {"task": "token"}, {"problem_type": "regression"}])
def test_the_embedded_data_is_used_without_files(changes, program, flags):
    changes.get("problem_type") and pytest.importorskip("vaderSentiment")
    few = {"max_train_samples": 40, "max_eval_samples": 10, "max_steps": 1}
    metrics = program.main(flags(train_file=None, **few, **changes))
    assert metrics["data"]["rows"] == {"train": 40, "validation": 10}
    assert np.isfinite(list(metrics["after"].values())).all() and torch.isfinite(torch.tensor(metrics["after"]["loss"]))
