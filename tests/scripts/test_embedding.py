"""`run_embedding.py`: training on pairs, triplets and scores, and the four uses of a trained model."""

import json
import random
import sys

import numpy as np
import pytest

pytest.importorskip("sentence_transformers")

from huggingface_hub import ModelCard
from sentence_transformers import SentenceTransformer

from frankenstein_hf.data import corpus
from frankenstein_hf.training.arguments import BadInput
from tests.hub.test_cards import hub  # noqa: F401  (a fixture)

from .conftest import SCRIPTS

WORDS = {"birds": "heron kestrel wren osprey finch".split(), "tools": "hammer chisel pliers wrench saw".split()}  # noqa: SIM905


def topic(name, place):
    """Two words of a topic."""
    return " ".join(random.Random(f"{name}{place}").sample(WORDS[name], 2))


PAIRS = [
    {"anchor": f"{topic(name, place)} {place}", "positive": f"number {place} of {name}"}
    for place in range(20)
    for name in WORDS
]
TRIPLETS = [
    {"a": topic(name, place), "b": topic(name, place + 50), "c": topic(other, place)}
    for place in range(20)
    for name, other in (("birds", "tools"), ("tools", "birds"))
]
SCORED = [
    {"one": row["a"], "two": row["b" if place % 2 else "c"], "score": float(place % 2)}
    for place, row in enumerate(TRIPLETS)
]
LEARNING = {"max_steps": 40, "learning_rate": 0.01, "per_device_train_batch_size": 8, "save_strategy": "no"}


@pytest.fixture
def program():
    """The program."""
    import run_embedding

    return run_embedding


@pytest.fixture
def rows_of(tmp_path, flags):
    """Makes a command line for rows, written to a file."""

    def make(rows, **changes):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return flags(**{"train_file": path, "validation_split_percentage": 20, **changes})

    return make


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model that has learned to tell birds from tools."""
    sys.path.insert(0, str(SCRIPTS))
    import run_embedding

    folder = tmp_path_factory.mktemp("trained")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TRIPLETS))
    flags = {
        "output_dir": folder / "model",
        "train_file": folder / "rows.jsonl",
        "layer_pattern": "gated_deltanet,standard",
        "config_overrides": "hidden_size=16,num_hidden_layers=2,num_attention_heads=2",
        "vocab_size": 300,
        "block_size": 32,
        "disable_tqdm": True,
        **LEARNING,
    }
    metrics = run_embedding.main([part for name, value in flags.items() for part in (f"--{name}", str(value))])
    return folder / "model", metrics


@pytest.fixture
def use(program, trained, tmp_path):
    """Uses the trained model: files of texts in, what was written out."""

    def run(mode, texts, corpus=None, **flags):
        line = ["--mode", mode, "--model_name_or_path", str(trained[0]), "--output_dir", str(tmp_path / "used")]
        for name, lines in (("input_file", texts), ("corpus_file", corpus)):
            if lines is not None:
                path = tmp_path / f"{name}.txt"
                path.write_text("\n".join(lines) + "\n")
                line += [f"--{name}", str(path)]
        for name, value in flags.items():
            line += [f"--{name}", str(value)]
        program.main(line)
        (path,) = (tmp_path / "used").iterdir()
        return np.load(path) if path.suffix == ".npy" else json.loads(path.read_text())

    return run


def test_triplets_are_learned_and_the_model_loads_as_anybody_would_load_it(trained):
    folder, metrics = trained
    assert metrics["data"]["loss"] == "triplet"
    assert metrics["after"]["triplet_accuracy"] > 0.9 > metrics["before"]["triplet_accuracy"]
    assert json.loads((folder / "metrics.json").read_text()) == metrics
    model = SentenceTransformer(str(folder))
    alike, other = (
        model.similarity(*(model.encode(text) for text in ("wren finch", "osprey heron"))),
        model.similarity(*(model.encode(text) for text in ("wren finch", "pliers saw"))),
    )
    assert alike > other
    assert (folder / "modeling_frankenstein.py").is_file() and not (folder / "eval").exists()
    card = (folder / "README.md").read_text()
    assert card.startswith("---") and "TripletLoss" in card and "model-index" in card
    assert "| triplet accuracy |" in card.partition("\n## Results\n")[2].partition("\n## ")[0] and "{%" not in card
    assert f'SentenceTransformer("YOUR-NAME/{folder.name}", trust_remote_code=True)' in card
    assert "`target_modules` for" in card and "`mixer.q_proj`" in card and "| rows seen |" in card
    metadata = ModelCard(card).data
    assert {"frankenstein", "gated_deltanet", "standard", "sentence-transformers"} <= set(metadata.tags)
    assert metadata.base_model is None and "Dataset: `rows.jsonl`" in card and "the `rows.jsonl` dataset" in card
    assert card.index("## Results") < card.index("## Model Details")


@pytest.mark.parametrize(
    "rows, changes, loss, metric",
    [(PAIRS, {}, "multiple_negatives", "mrr@10"), (SCORED, {"columns": "one,two"}, "cosine", "spearman")],
)
def test_pairs_and_scores_are_learned(rows, changes, loss, metric, program, rows_of):
    metrics = program.main(rows_of(rows, block_size=32, **LEARNING, **changes))
    assert metrics["data"]["loss"] == loss
    assert metrics["after"][metric] > metrics["before"][metric] + 0.1
    assert metric in metrics["tf_idf"]


def test_the_retrieval_metrics_are_those_of_the_saved_model(program, rows_of, tmp_path):
    from datasets import Dataset

    metrics = program.main(rows_of(PAIRS, block_size=32, max_steps=2))
    model = SentenceTransformer(str(tmp_path / "out"))
    held_out = Dataset.from_list(PAIRS).train_test_split(test_size=0.2, seed=42)["test"]
    anchors, positives = (
        model.encode(list(held_out[name]), normalize_embeddings=True) for name in ("anchor", "positive")
    )
    scores = anchors @ positives.T
    ranks = [(row > row[place]).sum() + 1 for place, row in enumerate(scores)]
    assert metrics["after"]["mrr@10"] == pytest.approx(np.mean([1 / rank if rank <= 10 else 0 for rank in ranks]))
    assert metrics["after"]["accuracy@1"] == pytest.approx(np.mean([rank == 1 for rank in ranks]))


def test_columns_play_the_roles_in_the_order_they_are_named(rows_of):
    from frankenstein_hf.training import embedding
    from frankenstein_hf.training.arguments import ModelArguments, parse_arguments

    rows = [{"a": f"x{place}", "positive": f"y{place}", "anchor": f"z{place}"} for place in range(10)]
    classes = (ModelArguments, embedding.EmbeddingArguments, embedding.EmbeddingProgramArguments)
    run = embedding.EmbeddingRun(*parse_arguments(classes, rows_of(rows, columns="positive,anchor,a")))
    for part in run.prepare_data()[1:]:
        assert part.column_names == ["anchor", "positive", "negative"]
        assert all((row["anchor"][0], row["positive"][0], row["negative"][0]) == ("y", "z", "x") for row in part)


def test_words_in_common_are_the_baseline(program, rows_of):
    rows = [{"anchor": f"only {word}", "positive": f"{word} again"} for words in WORDS.values() for word in words] * 3
    found = program.main(rows_of(rows, max_steps=1))["tf_idf"]
    assert found == {"accuracy@1": 1.0, "mrr@10": 1.0}


def test_a_resumed_run_equals_a_whole_one(program, rows_of, tmp_path):
    whole = program.main(rows_of(PAIRS, logging_steps=1))
    (tmp_path / "out" / "checkpoint-4" / "trainer_state.json").unlink()
    (tmp_path / "out" / "model.safetensors").unlink()
    resumed = program.main(rows_of(PAIRS, logging_steps=1))
    assert (resumed["after"], resumed["curve"]) == (whole["after"], whole["curve"])
    assert [step for step, _ in resumed["curve"]["train"]] == [1, 2, 3, 4]


def test_a_masked_model_becomes_an_embedding_model_and_goes_on(program, rows_of, tmp_path):
    import run_mlm

    run_mlm.main(rows_of(PAIRS, output="mlm", text_column="anchor", packing="none", layer_pattern="gla,swa"))
    new = {"layer_pattern": None, "config_overrides": None, "vocab_size": None, "max_steps": 1}
    program.main(rows_of(PAIRS, output="one", model_name_or_path=tmp_path / "mlm", pooling="cls", **new))
    program.main(rows_of(PAIRS, output="two", model_name_or_path=tmp_path / "one", **new))
    card = (tmp_path / "two" / "README.md").read_text()
    assert "started from the checkpoint `one`" in card and {"gla", "swa"} <= set(ModelCard(card).data.tags)
    assert ModelCard(card).data.base_model is None and str(tmp_path) not in card
    model = SentenceTransformer(str(tmp_path / "two"))
    assert model[0].auto_model.config.layer_pattern == ["gla", "swa"] and model[1].pooling_mode == "cls"
    with pytest.raises(BadInput, match="--pooling is decided by"):
        program.main(rows_of(PAIRS, output="three", model_name_or_path=tmp_path / "one", pooling="mean", **new))


def test_a_push_carries_results_and_a_card_written_by_hand_stays(program, rows_of, tmp_path, hub):  # noqa: F811
    line = [*rows_of(PAIRS, max_steps=2, hub_model_id="me/monster"), "--push_to_hub"]
    program.main(line)
    card = hub.last_card
    assert "(loss.png)" in card.partition("\n## Results\n")[2] and hub.uploads[-1]["loss.png"]
    assert card.count("## Results") == 1 and 'SentenceTransformer("me/monster", trust_remote_code=True)' in card
    assert set(hub.uploads[-1]) >= {"metrics.json", "modules.json", "modeling_frankenstein.py"}

    (tmp_path / "out" / "README.md").write_text("# Mine\n")
    program.main([*line, "--overwrite_output_dir"])
    assert hub.last_card == (tmp_path / "out" / "README.md").read_text() == "# Mine\n"


def test_a_file_of_flags_says_the_same_as_flags(program, rows_of, tmp_path):
    line = rows_of(PAIRS, max_steps=1)
    by_flags = program.main(line)
    settings = dict(zip((name.removeprefix("--") for name in line[0::2]), line[1::2]))
    settings |= {"output_dir": str(tmp_path / "by_file"), "disable_tqdm": True}
    whole = {name: int(value) if value.isdigit() else value for name, value in settings.items() if value is not True}
    file = tmp_path / "settings.yaml"
    file.write_text(json.dumps(settings | whole))
    assert program.main([str(file)])["after"] == by_flags["after"]


def test_encode_writes_the_vectors_in_order(use, trained):
    texts = ["wren finch", "saw hammer", "heron"]
    assert np.allclose(use("encode", texts), SentenceTransformer(str(trained[0])).encode(texts), atol=1e-5)


def test_search_finds_the_duplicate_first(use):
    corpus = [topic(name, place) for place in range(60, 66) for name in WORDS] + ["a wren behind a saw"]
    found = use("search", [corpus[3], corpus[-1]], corpus, top_k=3)
    for query, place in zip(found, (3, len(corpus) - 1)):
        assert len(query["hits"]) == 3 and query["hits"][0]["text"] == corpus[place] == query["query"]
        assert query["hits"][0]["score"] == pytest.approx(1, abs=1e-4)
        assert all(corpus[hit["place"]] == hit["text"] for hit in query["hits"])


def test_clusters_separate_two_obvious_groups(use):
    texts = [topic(name, place) for place in range(70, 78) for name in ("birds", "tools")]
    found = use("clustering", texts, num_clusters=2)
    assert sorted(map(set, found["clusters"]), key=min) == sorted((set(texts[0::2]), set(texts[1::2])), key=min)
    assert [found["labels"][place] for place in (0, 1)] * 8 == found["labels"]


def test_there_are_no_more_clusters_than_texts_unless_asked_for(use):
    found = use("clustering", ["wren finch", "saw hammer", "wren finch"])
    assert sorted(map(len, found["clusters"])) == [1, 2]


def test_the_card_names_a_checkpoint_of_the_hub(program, rows_of, monkeypatch):
    from frankenstein_hf.training import embedding
    from frankenstein_hf.training.arguments import ModelArguments, parse_arguments

    classes = (ModelArguments, embedding.EmbeddingArguments, embedding.EmbeddingProgramArguments)
    run = embedding.EmbeddingRun(*parse_arguments(classes, rows_of(PAIRS)))
    _, train, held_out = run.prepare_data()
    model = run.build_model()
    run.model_args.model_name_or_path = "me/monster"
    monkeypatch.setattr(embedding.EmbeddingCardData, "set_base_model", lambda *_: False)  # without a network
    run.trainer(model, train, held_out)
    assert model.model_card_data.base_model == "me/monster"
    model[0].auto_model.save_code = False
    assert "trust_remote_code" not in model.model_card_data.generate_usage_snippet()


def test_similarity_of_every_two_and_of_pairs(use, program, trained, tmp_path):
    texts = ["wren finch", "saw hammer", "wren finch"]
    matrix = use("similarity", texts)
    vectors = SentenceTransformer(str(trained[0])).encode(texts, normalize_embeddings=True)
    assert np.allclose(matrix, vectors @ vectors.T, atol=1e-5) and matrix.shape == (3, 3)
    pairs = tmp_path / "pairs.csv"
    pairs.write_text("one,two\nwren finch,saw hammer\nwren finch,wren finch\n")
    line = ["--mode", "similarity", "--model_name_or_path", str(trained[0]), "--input_file", str(pairs)]
    program.main([*line, "--output_dir", str(tmp_path / "scores")])
    found = json.loads((tmp_path / "scores" / "similarity.json").read_text())
    assert [row["score"] for row in found] == pytest.approx([matrix[0, 1], 1], abs=1e-4)
    assert (found[0]["first"], found[0]["second"]) == ("wren finch", "saw hammer")


WRONG = {
    "one column": ([{"text": "a"}] * 9, {}, "two or three columns of text"),
    "unknown column": (PAIRS, {"columns": "anchor,nothing"}, "two or three columns of text"),
    "a text missing": ([*PAIRS, {"anchor": "a", "positive": ""}], {}, r"Row \d+ of \w+ has nothing in 'positive'"),
    "scores out of range": (
        [{**row, "score": 5.0} for row in SCORED],
        {"columns": "one,two"},
        "must be between -1 and 1, got 5",
    ),
    "scores that are words": (
        [{"one": "a", "two": "b", "score": "high"}] * 9,
        {"columns": "one,two"},
        "score must be a number",
    ),
    "a column twice": (PAIRS, {"columns": "anchor,anchor"}, "two or three columns of text"),
    "columns to encode": (PAIRS, {"mode": "encode", "input_file": "ROWS", "columns": "anchor"}, "--text_column"),
    "no such checkpoint": (
        PAIRS,
        {"model_name_or_path": "nowhere/at/all", "layer_pattern": None, "config_overrides": None},
        "Cannot read --model_name_or_path nowhere/at/all",
    ),
    "a model that is none": (
        PAIRS,
        {"mode": "encode", "input_file": "ROWS", "text_column": "anchor", "model_name_or_path": "FOLDER"},
        "is no embedding model",
    ),
    "triplets of pairs": (PAIRS, {"loss": "triplet"}, "needs three texts"),
    "cosine without scores": (PAIRS, {"loss": "cosine"}, "--score_column"),
    "no such score": (PAIRS, {"score_column": "stars"}, "no column 'stars'"),
    "unknown loss": (PAIRS, {"loss": "tripplet"}, "did you mean 'triplet'"),
    "unknown mode": (PAIRS, {"mode": "serach"}, "did you mean 'search'"),
    "no input": (PAIRS, {"mode": "encode"}, "--mode encode needs --input_file"),
    "input for training": (PAIRS, {"input_file": "x.txt"}, "not used by --mode train"),
    "nothing to search in": (PAIRS, {"mode": "search", "input_file": "ROWS"}, "needs --corpus_file"),
    "no model": (PAIRS, {"mode": "encode", "input_file": "ROWS", "text_column": "anchor"}, "--model_name_or_path"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_named_and_nothing_is_written(case, program, rows_of, tmp_path):
    rows, changes, message = WRONG[case]
    files = {"ROWS": tmp_path / "rows.jsonl", "FOLDER": tmp_path}
    changes = {name: files.get(value, value) for name, value in changes.items()}
    with pytest.raises(BadInput, match=message):
        program.main(rows_of(rows, **changes))
    assert not (tmp_path / "out").exists()


def test_bad_use_is_named(use, program, tmp_path):
    with pytest.raises(BadInput, match="more than the 2 different texts"):
        use("clustering", ["a", "b", "a"], num_clusters=3)
    with pytest.raises(BadInput, match="has nothing in 'text'"):
        use("encode", ["a", "", "b"])
    assert not (tmp_path / "used").exists()


def test_the_absence_of_sentence_transformers_is_named(program, monkeypatch):
    monkeypatch.setitem(sys.modules, "frankenstein_hf.training.embedding", None)
    with pytest.raises(BadInput, match=r"sentence-transformers must be installed .*frankenstein_hf\[embeddings\]"):
        program.main(["--output_dir", "x"])


def test_the_embedded_pairs_are_used_without_files(program, flags, monkeypatch):
    monkeypatch.setattr(corpus, "MODULES", ("argparse", "heapq", "textwrap", "threading"))
    few = {"max_train_samples": 20, "max_eval_samples": 3, "max_steps": 1}
    assert program.main(flags(train_file=None, **few))["data"]["rows"] == {"train": 20, "validation": 3}
