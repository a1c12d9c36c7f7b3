"""One module draws; names stand beside their curves and never on each other."""

import itertools
import random
import re
from pathlib import Path

import pytest

from frankenstein_hf.training import pictures
from frankenstein_hf.training.pictures import Picture, spread

ROOT = Path(__file__).resolve().parents[2]


def test_nothing_else_draws_and_nothing_has_a_legend():
    own = Path(pictures.__file__)
    for folder in ("frankenstein_hf", "scripts", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            assert path == own or not re.search(r"^\s*(from|import) matplotlib", text, re.M), path
            assert ".legend(" not in text, path


@pytest.mark.parametrize("count", [0, 1, 2, 7, 30])
def test_places_move_apart_and_no_further_than_needed(count):
    generator = random.Random(count)
    places = [generator.uniform(0, 20) for _ in range(count)]
    moved = spread(places, 2.0)
    order = sorted(range(count), key=lambda i: places[i])
    assert all(moved[b] - moved[a] >= 2.0 - 1e-9 for a, b in itertools.pairwise(order))
    assert sum(moved) == pytest.approx(sum(places))  # a run is moved around its middle
    cost = sum((a - b) ** 2 for a, b in zip(moved, places))
    for _ in range(200):  # no other arrangement that fits is nearer
        other = [x + generator.gauss(0, 0.3) for x in moved]
        if all(other[b] - other[a] >= 2.0 for a, b in itertools.pairwise(order)):
            assert sum((a - b) ** 2 for a, b in zip(other, places)) >= cost - 1e-9
    assert spread([10.0 * i for i in range(count)], 2.0) == [10.0 * i for i in range(count)]


def test_names_of_curves_that_end_together_do_not_overlap(tmp_path):
    pytest.importorskip("matplotlib")
    picture = Picture("a title\nof two lines " + "x" * 100, 2, size=(4, 3), share=True)
    groups = {
        "one": {f"curve {i}": [[0, i], [1, 5 + i / 100]] for i in range(6)},
        "two": {"alone": [[0, 1.0], [1, float("nan")]], "none": []},
    }
    picture.multiples(groups)
    picture.save(tmp_path / "picture.png")
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]
    boxes = {text.get_text(): text.get_window_extent() for text in picture.panels[0].texts}
    assert set(boxes) == set(groups["one"])
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes.values(), 2))
    heights = [boxes[f"curve {i}"].y0 for i in range(6)]
    assert heights == sorted(heights)  # in the order of their curves
    assert [text.get_text() for text in picture.panels[1].texts] == ["alone"]
    (title,) = picture.figure.texts
    assert "\n" not in title.get_text() and len(title.get_text()) == pictures.TITLE


def test_a_heat_map_writes_its_numbers_and_what_was_not_run(tmp_path):
    pytest.importorskip("matplotlib")
    picture = Picture("accuracy")
    picture.heat_map(picture.panels[0], {"a": [0.5, None]}, ["4", "8"], "pairs")
    picture.save(tmp_path / "picture.png")
    assert [text.get_text() for text in picture.panels[0].texts] == ["50%", "not run"]
