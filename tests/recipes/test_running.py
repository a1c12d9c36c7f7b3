"""Recipes do what flags do, and a resolved recipe repeats a run to the bit."""

import dataclasses
import json

import pytest

from frankenstein_hf import recipes
from frankenstein_hf.commands.app import status_of
from frankenstein_hf.configuration.configuration_frankenstein import FrankensteinConfig
from frankenstein_hf.recipes import RESOLVED, WRITTEN, BadRecipe, load, presets, validate
from frankenstein_hf.recipes.building import same_data
from frankenstein_hf.recipes.checking import installed_schema, problems
from frankenstein_hf.recipes.reading import read_text, written
from frankenstein_hf.recipes.schema import as_text, config_docs, schema
from frankenstein_hf.training.tasks import PROGRAMS, TASKS

from ..scripts.conftest import _own_caches, text  # noqa: F401

TINY = {
    "model": {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "layer_pattern": ["gated_deltanet", "standard"],
        "mixer_params": {"gated_deltanet": {"conv_kernel": 3}},
    },
    "tokenizer": {"train": {"vocab_size": 300}},
    "data": {"block_size": 16},
    "training": {"max_steps": 2, "per_device_train_batch_size": 2, "disable_tqdm": True, "report_to": "none"},
}


def recipe(tmp_path, text=None, name="r", **sections):  # noqa: F811
    values = {section: dict(own) for section, own in TINY.items()}
    values["training"]["output_dir"] = str(tmp_path / name)
    if text is not None:
        values["data"]["train_file"] = str(text)
    for section, own in sections.items():
        values[section] = {**values.get(section, {}), **own} if isinstance(own, dict) else own
    path = tmp_path / f"{name}.yaml"
    path.write_text(written(values))
    return load(path)


def losses(metrics):
    return {key: metrics[key] for key in metrics if key in ("before", "after", "unigram", "constant", "tf_idf")}


FEW = {"max_train_samples": 40, "max_eval_samples": 20}
FEW_FLAGS = ["--max_train_samples", "40", "--max_eval_samples", "20"]
FLAGS = {
    "masked_lm": ({"objective": {"mask_rate": 0.3}}, ["--mask_rate", "0.3"]),
    "causal_lm": ({"data": {"packing": "documents"}}, ["--packing", "documents"]),
    "sequence_classification": ({"data": FEW}, FEW_FLAGS),
    "sentence_embedding": ({"data": {**FEW, "pooling": "cls"}}, [*FEW_FLAGS, "--pooling", "cls"]),
}


def use_it(task, out, tmp_path, capsys):
    """The commands for a model of this task."""
    capsys.readouterr()
    if task == "sentence_embedding":
        texts = tmp_path / "texts.txt"
        texts.write_text("open a file\nclose a file\nsing a song\n")
        common = ["--file", str(texts), "--output-dir", str(tmp_path / "used"), "--json"]
        for use, more in (("encode", []), ("similarity", []), ("cluster", ["--num-clusters", "2"])):
            assert status_of(["embed", use, str(out), *common, *more]) == 0
            found = json.loads(capsys.readouterr().out)
            assert len(found["labels"] if use == "cluster" else found) == 3
        assert (
            status_of(["embed", "search", str(out), "a song", "--corpus", str(texts), "--top-k", "1", *common[2:]]) == 0
        )
        assert json.loads(capsys.readouterr().out)[0]["hits"][0]["text"] in texts.read_text()
        assert status_of(["embed", "search", str(out), "a song"]) == 2
    elif task != "causal_lm":
        given = "Paragraph [MASK] says" if task == "masked_lm" else "0 0 5 13"
        assert status_of(["predict", str(out), given, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)[0]["text"] == given
        assert status_of(["predict", str(out), given]) == 0
        assert capsys.readouterr().out.startswith(f"{given}\t")


@pytest.mark.parametrize("task", FLAGS)
def test_a_recipe_does_what_flags_do_and_resolved_repeats_it(task, tmp_path, text, capsys):  # noqa: F811
    sections, own_flags = FLAGS[task]
    file = text if task.endswith("_lm") else None
    optimizer = {"name": "muon", "lr": 0.01, "groups": {"embeddings": {"lr": 0.003}}}
    optimizer["stabilizers"] = {"quack": {"tau": 1.0}}
    if task != "causal_lm":
        optimizer = {"name": "adamw", "lr": 0.01, "betas": [0.8, 0.99], "weight_decay": 0.0}
    asked = recipe(tmp_path, file, task=task, optimizer=optimizer, **sections)
    by_recipe = recipes.run(asked)
    flags = ["--output_dir", str(tmp_path / "flags"), "--vocab_size", "300", "--block_size", "16", "--max_steps", "2"]
    flags += ["--per_device_train_batch_size", "2", "--disable_tqdm", "True", "--learning_rate", "0.01", *own_flags]
    flags += ["--layer_pattern", "gated_deltanet,standard", "--mixer_params", '{"gated_deltanet": {"conv_kernel": 3}}']
    flags += ["--config_overrides", "hidden_size=16,num_hidden_layers=2,num_attention_heads=2", "--weight_decay", "0"]
    flags += ["--optim", f"frankenstein_{optimizer['name']}", "--optim_args"]
    flags += ["embeddings.lr=0.003,quack.tau=1.0" if task == "causal_lm" else "betas=0.8:0.99"]
    flags += ["--train_file", str(file)] if file else []
    assert losses(PROGRAMS[TASKS[task].program].main(flags)) == losses(by_recipe)

    out = tmp_path / "r"
    assert (out / WRITTEN).read_text() == asked.text
    again = load(out, [f"training.output_dir={tmp_path / 'again'}"])
    assert problems(again.document) == []
    assert losses(recipes.run(again)) == losses(by_recipe)
    weights = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in ("r", "again", "flags")}
    assert len(set(weights.values())) == 1
    first, second = (read_text((tmp_path / name / RESOLVED).read_text(), "x").values for name in ("r", "again"))
    first["training"]["output_dir"] = second["training"]["output_dir"]
    assert first == second

    use_it(task, out, tmp_path, capsys)
    if task == "masked_lm":
        evaluated = recipes.evaluate(load(out), out, tmp_path / "evaluated")
        assert evaluated["before"] == by_recipe["after"]
        assert losses(recipes.run(load(out))) == losses(by_recipe)  # taken up where it ended
        text.write_text("other words\n\n" * 40)
        again = load(out, [f"training.output_dir={tmp_path / 'other'}"])
        with pytest.raises(ValueError, match=r"text.txt is not what it was when this recipe was resolved"):
            same_data(again, validate(again))


@pytest.mark.parametrize("name", [name for name in presets() if "unavailable" not in presets()[name].read_text()])
def test_every_preset_builds_and_its_resolved_form_builds_the_same_model(name):
    whole = "layer_pattern" in presets()[name].read_text()
    read = load(name if whole else f"hybrid+{name}")
    run = validate(read)
    values = read_text(run.leaves[RESOLVED], "resolved")
    again = validate(recipes.Recipe("again", values, ""))
    assert run._config(300).to_dict() == again._config(300).to_dict()
    assert dataclasses.asdict(run.data_args) == dataclasses.asdict(again.data_args)
    assert values.values["training"]["output_dir"] == f"runs/{read.name}"


@pytest.mark.parametrize(
    "sections, message",
    [
        ({"model": {"hidden_size": 17}}, r"r.yaml:\d+:\d+: model: hidden_size=17 is not divisible"),
        (
            {"data": {"train_file": "nowhere.txt"}},
            r"r.yaml:\d+:\d+: data: data.train_file nowhere.txt: there is no such",
        ),
        ({"objective": {"mask_rate": 2.0}}, r"r.yaml:\d+:\d+: objective: objective.mask_rate 2.0 must be between"),
        ({"training": {"learning_rate": 0.1}, "optimizer": {"name": "lion"}}, "training.learning_rate is said twice"),
        ({"model": {"from": "x"}}, "model.hidden_size is decided by the checkpoint"),
        ({"model": {"revision": "main"}}, "model.revision needs model.from"),
        ({"tokenizer": {"from": "x"}}, "tokenizer.from and tokenizer.train: give one of them"),
        ({"optimizer": {"name": "lion", "groups": {"norms": {"eps": 1}}}}, r"r.yaml:\d+:\d+: optimizer: .lion.: group"),
        ({"task": "sequence_classification", "data": {"task": "token"}}, "unknown key data.task"),
    ],
)
def test_what_does_not_go_together_is_named_before_anything_is_written(sections, message, tmp_path, text):  # noqa: F811
    with pytest.raises(BadRecipe, match=message):
        validate(recipe(tmp_path, text, **sections))
    assert not (tmp_path / "r").exists()


def test_the_schema_is_up_to_date_valid_and_describes_every_field():
    made = schema()
    assert json.loads(as_text(made)) == installed_schema(), "run scripts/write_docs.py"
    assert set(made["$defs"]["model"]["properties"]) >= {
        field for field in config_docs() if field in FrankensteinConfig.__dataclass_fields__
    } - set(made["x-decided"])
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(made)
    validator = jsonschema.Draft202012Validator(made)
    for name in presets():
        if "unavailable" not in presets()[name].read_text():
            assert list(validator.iter_errors(load(name).values)) == []
    values = read_text(validate(load("modernbert+nano")).leaves[RESOLVED], "x").values
    assert list(validator.iter_errors(values)) == []
    for section in ("model", "data", "training", "objective", "tokenizer"):
        assert list(validator.iter_errors({**values, section: {**values[section], "nonsense": 1}}))

    def undescribed(found, way=""):
        for name, own in found.get("properties", {}).items():
            if own and not {"$ref", "description", "const"} & set(own):
                yield f"{way}.{name}"
            yield from undescribed(own, f"{way}.{name}")

    assert not [*undescribed(made), *(way for name, own in made["$defs"].items() for way in undescribed(own, name))]
