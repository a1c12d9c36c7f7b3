"""Strict reading: what YAML guesses is read as written, what is dangerous or ambiguous is refused with its place."""

import random
import subprocess
import sys

import pytest

from frankenstein_hf.recipes import BadRecipe, load, presets, problems
from frankenstein_hf.recipes.loading import read_setting
from frankenstein_hf.recipes.reading import Document, merged, read_text, without_nulls, written


def test_scalars_are_what_they_look_like():
    text = "a: [no, yes, on, true, 2e-3, 1:30, 0x10, 012, 2020-01-01, ~, -1.5E3, '3', .inf]"
    expected = ["no", "yes", "on", True, 0.002, "1:30", "0x10", 12, "2020-01-01", None, -1500.0, "3", float("inf")]
    values = read_text(text, "x").values
    assert values == {"a": expected}
    assert list(map(type, values["a"])) == list(map(type, expected))
    assert read_text(written(values), "y").values == values


@pytest.mark.parametrize(
    "text, message",
    [
        ("a: 1\nb: 2\na: 3", "f:3:1: a is given twice"),
        ("m: {x: 1, x: 1}", "f:1:11: m.x is given twice"),
        ("a: !!python/object/apply:os.system [touch pwned]", "f:1:4: the tag"),
        ("- 1", "f:1:1: a recipe consists of sections"),
        ("a: [", "f:1:5: this is no YAML"),
        ("a: 1\n---\nb: 2", "this is no YAML"),
        ("[" * 40, "nested more than 32 deep"),
        ("a: &x [*x]", "f:1:4: aliases make it endless"),
        ("a: &a [1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b]\nd: [*c,*c,*c,*c,*c]", "aliases"),
        ("? [1]\n: 2", "a key must be a word"),
        ("a: " + "9" * 5000, "f:1:4: this number is too long"),
        ("a: \0", "this is no YAML"),
        ("# " + "x" * (1 << 20), "at most 1 MB"),
    ],
)  # fmt: skip
def test_what_is_ambiguous_or_dangerous_is_refused_with_its_place(text, message):
    with pytest.raises(BadRecipe) as error:
        read_text(text, "f")
    assert message in str(error.value)


def some_values(rng, depth=0):
    if depth == 3 or rng.random() < 0.3:
        return rng.choice([None, 1, "x", [1, 2], {}])
    return {key: some_values(rng, depth + 1) for key in "abc" if rng.random() < 0.6}


def test_merging_is_associative_and_null_restores_the_default():
    rng = random.Random(0)
    for _ in range(3000):
        a, b, c = ({"top": some_values(rng)} for _ in range(3))
        assert merged(merged(a, b), c) == merged(a, merged(b, c))
        once = without_nulls(merged(a, {"top": None}))
        assert once == {} == without_nulls(merged(merged(a, {"top": None}), {"top": None}))
        assert merged(a, {}) == a
    assert merged({"m": {"x": 1, "l": [1, 2]}}, {"m": {"l": [3]}}) == {"m": {"x": 1, "l": [3]}}


def test_settings_win_over_the_file_also_with_the_value_of_the_default(tmp_path):
    (tmp_path / "base.yaml").write_text("training: {max_steps: 7, seed: 3}\nmodel: {layer_pattern: [swa]}\n")
    file = tmp_path / "r.yaml"
    file.write_text("extends: [hybrid, base.yaml]\ntraining: {max_steps: 8}\n")
    values = load(file, ["training.seed=42", "model.mixer_params.swa.window_size=9"]).values
    assert values["training"] == {"max_steps": 8, "seed": 42} and values["task"] == "causal_lm"
    assert values["model"]["layer_pattern"] == ["swa"] and values["model"]["hidden_size"] == 512
    assert values["model"]["mixer_params"] == {"swa": {"window_size": 9}}
    assert "max_steps" not in load(file, ["training.max_steps=null"]).values["training"]
    assert "about" not in values
    for bad in ("training.max_steps", "=3", "a..b=1"):
        with pytest.raises(BadRecipe, match=r"section\.key=value"):
            read_setting(bad)


def test_circles_missing_parents_and_deep_chains_are_named(tmp_path):
    for number in range(7):
        (tmp_path / f"{number}.yaml").write_text(f"extends: {number + 1}.yaml\n")
    (tmp_path / "7.yaml").write_text("task: causal_lm\n")
    (tmp_path / "circle.yaml").write_text("extends: [other.yaml]\n")
    (tmp_path / "other.yaml").write_text("\nextends: circle.yaml\n")
    for name, message in (
        ("0.yaml", "5 levels deep at most"),
        ("circle.yaml", r"other.yaml:2:1: recipes extend each other in a circle: .*circle.yaml → .*other.yaml → "),
    ):
        with pytest.raises(BadRecipe, match=message):
            load(tmp_path / name)
    assert load(tmp_path / "4.yaml").values == {"task": "causal_lm"}
    with pytest.raises(BadRecipe, match="'modernbrt'; did you mean 'modernbert'"):
        load("modernbrt+nano")
    (tmp_path / "later.yaml").write_text("about: x\nunavailable: something is missing.\n")
    with pytest.raises(BadRecipe, match=r"later\.yaml is not available: something is missing"):
        load("later+nano", folders=[tmp_path])
    (tmp_path / "llama.yaml").write_text("task: masked_lm\n")
    assert load("llama", folders=[tmp_path]).values == {"task": "masked_lm"}


PROBLEMS = """task: masked_lm
model:
  layer_patern: [swa]
  hidden_size: "64"
  vocab_size: 9
  n_layer: 3
  block_size: 8
  mixer_params: {swa: {window_size: 0}, glaa: {}}
  norm: rmsnorm
optimizer: {name: muon, lr: -1, ns_stepz: 3}
training: {max_step: 3, eval_strategy: stepz, bf16: "yes"}
data: {packing: 3, mask_rate: 0.1}
nonsense: 1
"""


def test_all_problems_are_found_at_once_with_place_key_value_and_the_nearest_name():
    found = "\n".join(problems(read_text(PROBLEMS, "f")))
    for words in (
        "f:3:3: unknown key model.layer_patern; did you mean 'layer_pattern'?",
        "f:4:3: model.hidden_size='64' must be a whole number ≥ 1",
        "f:5:3: model.vocab_size: say it with tokenizer.train.vocab_size.",
        "f:6:3: unknown key model.n_layer; did you mean 'num_hidden_layers'?",
        "f:7:3: unknown key model.block_size: it belongs to data.block_size.",
        "f:8:24: model.mixer_params.swa.window_size=0 must be a whole number ≥ 1.",
        "f:8:41: unknown key model.mixer_params.glaa; did you mean 'gla'?",
        "f:9:3: model.norm='rmsnorm' is unknown; did you mean 'rms_norm'?",
        "f:10:25: optimizer.lr=-1 must be a number ≥ 0.",
        "f:10:33: unknown key optimizer.ns_stepz; did you mean 'ns_steps'?",
        "f:11:12: unknown key training.max_step; did you mean 'max_steps'?",
        "f:11:25: training.eval_strategy='stepz' is unknown; did you mean 'steps'?",
        ": training.bf16='yes' must be true or false.",
        "f:12:8: data.packing=3 must be a word.",
        "f:12:20: unknown key data.mask_rate: it belongs to objective.mask_rate.",
        "f:13:1: unknown key nonsense.",
    ):
        assert words in found
    assert len(found.splitlines()) == 16


def mutated(rng, values):
    """`values` with one thing wrong, or odd, in a random place."""
    path, here = [], values
    while isinstance(here, dict) and here and (not path or rng.random() < 0.7):
        path.append(rng.choice(sorted(here)))
        here = here[path[-1]]
    odd = [
        None,
        {},
        [],
        [[]],
        "no",
        "",
        -1,
        1e400,
        True,
        {"x": {"y": []}},
        "9" * 50,
        ["swa", 3],
        "\x1b[31m",
        {"from": 3},
    ]
    import copy

    changed = copy.deepcopy(values)
    place = changed
    for name in path[:-1]:
        place = place[name]
    if rng.random() < 0.3:
        place[path[-1] + rng.choice(["x", "_", "\n"])] = place.pop(path[-1])
    else:
        place[path[-1]] = rng.choice(odd)
    return changed


def test_five_hundred_mutated_recipes_give_problems_and_no_traceback():
    rng = random.Random(1)
    base = {**load("modernbert+nano").values, "optimizer": {"name": "muon", "lr": 0.1, "groups": {"norms": {"lr": 1}}}}
    base |= {"objective": {"mask_rate": 0.2}, "hub": {"repo_id": "a/b"}, "extends": "llama"}
    wrong = 0
    for _ in range(500):
        found = problems(Document(mutated(rng, base)))
        wrong += bool(found)
        assert all(isinstance(line, str) for line in found)
    assert wrong > 300


def test_reading_checking_and_listing_need_no_torch():
    code = (
        "import sys; from frankenstein_hf import recipes; recipes.problems(recipes.load('llama+nano').document); "
        "assert recipes.presets(); print(*({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("name", presets())
def test_every_preset_has_a_line_about_it_and_no_problem(name):
    text = presets()[name].read_text()
    values = read_text(text, name).values
    assert values["about"]
    if "unavailable" not in values:
        assert problems(load(name).document) == []
