"""What a run leaves for people: the loss curve as a picture, the results in the card, and both on the Hub."""

import builtins
import json
import re
import sys

import pytest
from huggingface_hub import ModelCard

from frankenstein_hf.hub.foreign import Markdown
from frankenstein_hf.training import recipe, results
from tests.hub.test_cards import hub  # noqa: F401  (a fixture)

LOSSES = {"before": {"loss": 4.0}}


def table(card):
    """The rows of the section Results, by metric."""
    section = card.partition("\n## Results\n")[2]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line[:2] == "| "]
    return {row[0]: row[1:] for row in rows}


def test_the_card_holds_the_metrics_and_the_picture(program, flags, tmp_path):
    pytest.importorskip("matplotlib")
    metrics = program.main(flags())
    out = tmp_path / "out"
    card = ModelCard.load(out / "README.md")
    assert "held-out data](loss.png)" in card.text and 'from_pretrained("YOUR-NAME/out"' in card.text
    rows = table(card.text)
    baseline, before, after = (metrics[name]["loss"] for name in ("unigram", "before", "after"))
    assert rows["loss"] == [f"{value:.4g}" for value in (before, after, baseline)]
    assert rows["perplexity"][2] == "–"
    (found,) = (result for result in card.data.eval_results if result.metric_type == "loss")
    assert found.metric_value == after and found.dataset_name == "text.txt"
    assert str(tmp_path) not in card.content
    picture = (out / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 5000

    program.main(flags())  # nothing is left to train: the same again
    assert table((out / "README.md").read_text()) == rows and (out / "loss.png").is_file()


def test_a_card_written_by_hand_stays(flags, tmp_path):
    import run_clm

    run_clm.main(flags())
    card = tmp_path / "out" / "README.md"
    card.write_bytes(b"# Mine\r\n")
    run_clm.main(flags())
    run_clm.main([*flags(), "--overwrite_output_dir"])
    assert card.read_bytes() == b"# Mine\r\n"


def test_the_card_names_data_licence_and_start(program, flags, tmp_path):
    program.main(flags())
    card = (tmp_path / "out" / "README.md").read_text()
    for line in (
        "| steps | 4 |",
        "| rows a step | 2 |",
        "| learning rate | 0.001, linear |",
        "| precision | float32 |",
    ):
        assert line in card
    assert re.search(r"\| optimizer \| adamw\S* \|", card) and re.search(r"\| tokens seen \| \d+ \|", card)
    assert ("### What it fills in" if "mlm" in program.__name__ else "### What it writes") in card
    assert "\nTrained on `text.txt`. Evaluated on 5 % of its rows, drawn with the seed 42 and held out:\n" in card
    assert "the checkpoint" not in card
    new = {"layer_pattern": None, "config_overrides": None, "vocab_size": None, "max_steps": 1}
    program.main(flags(output="second", model_name_or_path=tmp_path / "out", **new))
    card = ModelCard.load(tmp_path / "second" / "README.md")
    assert "\nTraining started from the checkpoint `out`. Trained on `text.txt`." in card.text
    assert card.data.base_model is None and str(tmp_path) not in card.content


def test_the_text_has_the_licence_of_data_that_comes_along():
    metrics = {"data": {"origin": "Digits (CC BY 4.0)"}}
    words = {"data_words": Markdown("Digits (CC BY 4.0)")}
    found = results.Results(metrics, "majority", "always the same", "text-classification", "Digits", **words)
    link = "[me/monster](https://huggingface.co/me/monster)"
    assert found.text() == "Trained on Digits (CC BY 4.0)."
    assert found.text("me/monster").startswith(f"Training started from the checkpoint {link}. ")


def test_a_push_carries_results_picture_and_metrics(flags, tmp_path, hub):  # noqa: F811
    import run_mlm

    pytest.importorskip("matplotlib")
    metrics = run_mlm.main([*flags(hub_model_id="me/monster"), "--push_to_hub"])
    last = hub.uploads[-1]
    assert json.loads(last["metrics.json"]) == metrics and last["loss.png"]
    card = ModelCard(last["README.md"])
    assert table(card.text) == table((tmp_path / "out" / "README.md").read_text()) != {}
    assert "held-out data](loss.png)" in card.text and "- learning_rate:" in card.text  # ours and Trainer's
    measured = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert measured == metrics["after"]
    assert 'from_pretrained("me/monster"' in card.text


def test_the_curve_has_every_step_and_the_evaluation_before_the_first():
    history = [{"step": 2, "loss": 3.0}, {"step": 2, "eval_loss": 3.5}, {"step": 4, "loss": 2.0, "grad_norm": 1.0}]
    history += [{"step": 4, "train_loss": 2.5, "train_runtime": 1.0}, {"step": 4, "eval_loss": 2.25}]
    curve = results.loss_curve(history, LOSSES)
    assert curve == {"train": [[2, 3.0], [4, 2.0]], "held_out": [[0, 4.0], [2, 3.5], [4, 2.25]]}
    assert results.loss_curve([], {}) == {"train": [], "held_out": []}


def test_the_picture_shows_the_curve(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    save = figure.Figure.savefig
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k)))
    curve = {"train": [[1, 3.0], [2, 2.0]], "held_out": [[0, 4.0], [1, 3.0], [2, 2.5]]}
    title = r"a model on $\frac{ and }$"  # foreign text is no mathematics
    drawing = results.draw_loss(curve, tmp_path / "loss.png", title, 3.25, "token frequencies")
    assert drawing == ("loss.png", None)
    (axes,) = drawn[0].axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    # a training loss is a mean over the steps since the one before, and stands amid them
    assert lines["training"] == [[0.5, 3.0], [1.5, 2.0]] and lines["held out"] == curve["held_out"]
    assert {y for _, y in lines["token frequencies"]} == {3.25} and axes.get_title(loc="left") == title
    assert {text.get_text().strip() for text in axes.texts} == set(lines) and axes.get_legend() is None
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]
    assert results.draw_loss({"train": [], "held_out": []}, tmp_path / "no.png") == (None, None)


def test_without_matplotlib_a_line_says_so(flags, tmp_path, monkeypatch, capsys):
    import run_clm

    real = builtins.__import__

    def absent(name, *args, **kwargs):
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    run_clm.main(flags())
    assert len(re.findall(r"frankenstein_hf\[plots\]", capsys.readouterr().out)) == 1
    card = (tmp_path / "out" / "README.md").read_text()
    assert table(card)["loss"] and "loss.png" not in card and not (tmp_path / "out" / "loss.png").exists()


def test_tokens_seen_are_those_of_the_rows(tmp_path):
    from datasets import Dataset

    rows = Dataset.from_dict({"input_ids": [[1, 2, 3], [4], []]})
    assert recipe.tokens(rows) == 4


def test_a_validation_file_is_named_and_embedded_data_has_a_language(flags, text, tmp_path):
    import run_clm

    other = tmp_path / "held | out.txt"
    other.write_text(text.read_text())
    run_clm.main(flags(validation_file=other, max_steps=1, license="mit", language="en"))
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert "Evaluated on <code>held &#124; out.txt</code>" in card.text.replace("&#32;", " ")
    assert (card.data.license, card.data.language) == ("mit", ["en"])
