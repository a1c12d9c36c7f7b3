"""The code that travels: what is written, that it loads without the package, and what keeps it flat."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import Trainer, TrainingArguments
from transformers.dynamic_module_utils import check_imports, get_imports, get_relative_import_files

import frankenstein_hf as fhf
from frankenstein_hf.configuration.registries import FEED_FORWARDS, MIXERS, NORMS
from frankenstein_hf.hub.bundle import CLASSES, DISCOVERED, bundle_sources
from frankenstein_hf.hub.flat import PARTS, ROOT, flatten
from frankenstein_hf.modeling.hub_bundle import HEADS, auto_map, bundle_files, entry_modules
from tests.heads import head_batch, head_model
from tests.hub.own import own_mixer
from tests.tiny import BIDIRECTIONAL, CAUSAL, tiny_config, tiny_model, tiny_tokenizer, tokens

TRAVELLING = [
    path.relative_to(ROOT).with_suffix("").parts
    for part in PARTS
    for path in sorted((ROOT / part).rglob("*.py"))
    if path.stem != "__init__"
]
# What a process that loads a checkpoint has, beside the standard library.
AVAILABLE = {"torch", "transformers", "huggingface_hub", "safetensors", "tokenizers", "numpy"}


def code_in(directory: Path) -> set[str]:
    return {path.name for path in directory.glob("*.py")}


OWN_PARAMS = {"min_gru": {"expansion": 2}, "swa": {"window_size": 6, "num_sinks": 2}}

# The heads that `pipeline()` serves with a label a text or a token.
LABELLING = {
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of an all-mixer model per mode, of every head, and one mixer alone; what installed code makes of them."""
    folder = tmp_path_factory.mktemp("checkpoints")
    tokenizer = tiny_tokenizer()
    tiny_model([name for name in BIDIRECTIONAL if name in CAUSAL], is_causal=False).save_pretrained(folder / "masked")
    tiny_model(CAUSAL).save_pretrained(folder / "causal")
    tiny_model("gla", is_causal=False).save_pretrained(folder / "alone")
    for auto_name in HEADS:
        head_model(auto_name, ["gla", "swa"], is_causal=False).save_pretrained(folder / auto_name)
    for name in ("masked", "causal", *HEADS):
        tokenizer.save_pretrained(folder / name)
    expected: dict[str, Any] = {"input_ids": tokens(2, 23), "heads": {}}
    with torch.no_grad():
        for auto_name in HEADS:
            batch = head_batch(auto_name, 3, 9)
            outputs = []
            for name in ("masked", auto_name):  # for most heads the first has no weights: they are made, from one seed
                torch.manual_seed(0)
                model = getattr(transformers, auto_name).from_pretrained(folder / name, num_labels=3)
                assert type(model).__module__.startswith("frankenstein_hf."), "the installed code is to be used"
                outputs.append(model(**batch)[:2])
            expected["heads"][auto_name] = batch, outputs
        causal = fhf.FrankensteinForCausalLM.from_pretrained(folder / "causal")
        expected["generate"] = causal.generate(
            expected["input_ids"], max_new_tokens=5, do_sample=False, use_cache=False
        )
        masked = fhf.FrankensteinForMaskedLM.from_pretrained(folder / "masked")
        masked.config.mask_token_id = int(expected["input_ids"][0, 3])
        expected["generate_masked"] = masked.generate_masked(expected["input_ids"], temperature=0)
        with own_mixer(ROOT.parent / "examples" / "min_gru.py"):
            for name, is_causal in (("own", True), ("own_masked", False)):
                own = tiny_model(["min_gru", "swa"], is_causal=is_causal, mixer_params=OWN_PARAMS)
                own.save_pretrained(folder / name)
                expected[name] = own(expected["input_ids"], attention_mask=(expected["input_ids"] > 3).long()).logits
    torch.save(expected, folder / "expected.pt")
    return folder


@pytest.fixture(scope="module")
def found(checkpoints: Path) -> dict[str, Any]:
    """What `stranger.py` saw, and what a process with the package saw; both run at once."""
    environment = os.environ | {
        "HF_MODULES_CACHE": str(checkpoints / "modules"),
        "HF_HUB_CACHE": str(checkpoints / "hub"),
        "HF_HUB_OFFLINE": "1",
    }
    snapshot = checkpoints / "hub" / "models--me--monster-1.0" / "snapshots" / ("0" * 40)
    shutil.copytree(checkpoints / "alone", snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    with_package = (
        "import json, sys; import frankenstein_hf; early = 'transformers.trainer' in sys.modules\n"
        "from transformers import AutoModelForMaskedLM, Trainer\n"
        f"model = AutoModelForMaskedLM.from_pretrained({str(checkpoints / 'masked')!r}, trust_remote_code=True)\n"
        "import torch\n"
        f"folder = {str(checkpoints / 'own_masked')!r}\n"
        "try:\n    frankenstein_hf.load_mixers(folder)\n"
        "except ValueError as error:\n    refused = str(error)\n"
        "names = frankenstein_hf.load_mixers(folder, trust_remote_code=True)\n"
        "assert frankenstein_hf.load_mixers(folder, trust_remote_code=True) == names\n"
        "own = AutoModelForMaskedLM.from_pretrained(folder)\n"
        f"expected = torch.load({str(checkpoints / 'expected.pt')!r})\n"
        "ids = expected['input_ids']\n"
        "same = torch.equal(own(ids, attention_mask=(ids > 3).long()).logits, expected['own_masked'])\n"
        f"own.save_pretrained({str(checkpoints / 'own_installed')!r})\n"
        "print(json.dumps(dict(own=names, refused=refused, same=same, early=early,\n"
        "    late=hasattr(Trainer.create_model_card, '__wrapped__'),\n"
        "    module=type(model).__module__, modules=list(sys.modules))))"
    )
    stranger = [sys.executable, "-I", str(Path(__file__).with_name("stranger.py")), str(checkpoints)]
    runs = [
        subprocess.Popen(stranger, cwd=checkpoints, env=environment, stderr=subprocess.PIPE, text=True),
        subprocess.Popen(
            [sys.executable, "-c", with_package],
            cwd=ROOT.parent,  # where `import modeling` would find the link
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ),
    ]
    outputs = [run.communicate(timeout=300) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], "\n".join(stderr for _, stderr in outputs)
    return json.loads((checkpoints / "found.json").read_text()) | {"installed": json.loads(outputs[1][0])}


@pytest.mark.parametrize("auto_name", sorted(HEADS))
def test_every_head_loads_without_the_package_and_computes_the_same_bits(found, auto_name):
    assert found["heads"][auto_name] == {"masked": True, auto_name: True}
    assert found["module"].startswith("transformers_modules.")


def test_generation_and_pipelines_work_without_the_package(found, checkpoints):
    assert found["generate"] is True
    assert found["generate_masked"] is True
    for task, answer in (("text-generation", "t5 t6"), ("fill-mask", None)):
        folder = checkpoints / ("causal" if task == "text-generation" else "masked")
        pipe = transformers.pipeline(task, str(folder))
        if answer:
            assert found[task] == pipe(answer, max_new_tokens=3, do_sample=False)[0]["generated_text"]
        else:
            assert found[task] == [guess["token_str"] for guess in pipe("t5 [MASK] t7", top_k=2)]
    for task, auto_name in LABELLING.items():
        pipe = transformers.pipeline(task, str(checkpoints / auto_name))
        wanted = pipe(["t5 t6", "t7"])
        assert found[task] == json.loads(json.dumps(wanted, default=float))


def test_a_model_loaded_from_a_bundle_saves_it_on(found):
    assert found["same files"] and found["again"]
    assert found["card"] is False  # only the toolkit renders cards
    assert found["other pattern"] == CAUSAL[:1]
    assert found["alone"] == found["hub"] == ["gla"]


def test_save_code_false_holds_for_a_bundle_too(found):
    assert found["no_code"] == ["config.json", "generation_config.json", "model.safetensors"]
    assert found["no_code auto_map"] is False


def test_installed_code_wins_and_no_bare_module_appears(found):
    installed = found["installed"]
    assert installed["module"] == "frankenstein_hf.modeling.modeling_frankenstein"
    bare = [name for name in installed["modules"] if name.partition(".")[0] in ("modeling", "configuration")]
    assert bare == found["bare modules"] == []


def test_the_trainer_is_wrapped_when_imported_and_not_imported_by_us(found):
    assert (found["installed"]["early"], found["installed"]["late"]) == (False, True)


def test_a_mixer_of_ones_own_travels_with_its_file(found, checkpoints):
    """To where the package is absent and on from there; and to where the package is and the file is not."""
    assert found["own"] == {"own": True, "own_masked": True, "generate": True, "same files": True, "checked": True}
    assert "from frankenstein_hf" not in (checkpoints / "own" / "modeling_own_min_gru.py").read_text()
    installed = found["installed"]
    assert installed["own"] == ["min_gru"] and installed["same"]
    assert "modeling_own_min_gru.py" in installed["refused"] and "trust_remote_code=True" in installed["refused"]
    assert "load_mixers(" in (checkpoints / "own" / "README.md").read_text()
    own, again = (
        {path.name: path.read_text() for path in (checkpoints / name).glob("*.py")}
        for name in ("own_masked", "own_installed")
    )
    assert own == again


def test_only_reached_modules_are_written(tmp_path):
    tiny_model("swa").save_pretrained(tmp_path)
    code = code_in(tmp_path)
    assert {
        "modeling_mixers_sparse_swa.py",
        "configuration_mixers_sparse_swa.py",
        "modeling_ops_window_attention.py",
    } <= code
    assert (
        not {"modeling_mixers_gated_gla.py", "configuration_mixers_gated_gla.py", "modeling_ops_delta_rule.py"} & code
    )
    entries = [tmp_path / f"{name}.py" for name in entry_modules()]
    reached = {Path(path).name for entry in entries for path in [entry, *get_relative_import_files(entry)]}
    assert code == reached
    for path in tmp_path.glob("*.py"):
        check_imports(path)
        assert "import frankenstein_hf" not in path.read_text() and "from frankenstein_hf" not in path.read_text()


def test_mixers_with_parameters_only_travel_because_the_config_names_them(tmp_path):
    config = tiny_config(
        ["gla", "gla"], mixer_params={"swa": {"window_size": 7}}, per_layer_config={0: {"mixer_params": {"mamba": {}}}}
    )
    fhf.FrankensteinModel(config).save_pretrained(tmp_path)
    assert {"configuration_mixers_sparse_swa.py", "configuration_mixers_recurrent_mamba.py"} <= code_in(tmp_path)


def test_an_older_bundle_is_cleared_away_and_other_files_are_not(tmp_path):
    tiny_model("swa").save_pretrained(tmp_path)
    mine = {"modeling_mine.py": "x = 1\n", "configuration_ünï.py": "# ü\n", "notes.py": ""}
    for name, text in mine.items():
        (tmp_path / name).write_text(text, encoding="latin-1")
    tiny_model("gla").save_pretrained(tmp_path)
    assert "modeling_mixers_sparse_swa.py" not in code_in(tmp_path)
    assert set(mine) <= code_in(tmp_path)
    assert sorted(code_in(tmp_path) - set(mine)) == bundle_files(tmp_path)
    assert not list(tmp_path.glob(".*.tmp"))


def test_save_code_false_writes_no_code_and_claims_none(tmp_path):
    tiny_model("gla").save_pretrained(tmp_path / "with")
    model = fhf.FrankensteinForCausalLM.from_pretrained(tmp_path / "with")
    model.save_pretrained(tmp_path / "without", save_code=False)
    assert not code_in(tmp_path / "without")
    assert "auto_map" not in json.loads((tmp_path / "without" / "config.json").read_text())
    assert "trust_remote_code" not in (tmp_path / "without" / "README.md").read_text()
    assert fhf.FrankensteinForCausalLM.from_pretrained(tmp_path / "without").config.mixer_names == ["gla"]


def test_trainer_save_model_writes_the_bundle(tmp_path):
    trainer = Trainer(tiny_model("gla"), TrainingArguments(str(tmp_path), report_to="none", use_cpu=True))
    trainer.save_model()
    assert set(bundle_sources([MIXERS.get("gla"), NORMS.get("rms_norm"), FEED_FORWARDS.get("gated")])) == code_in(
        tmp_path
    )
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == auto_map()


@pytest.mark.parametrize("module", TRAVELLING, ids="/".join)
def test_every_travelling_module_flattens_line_by_line_and_needs_nothing_else(module):
    source = ROOT.joinpath(*module).with_suffix(".py").read_text(encoding="utf-8")
    needed = set(get_imports(ROOT.joinpath(*module).with_suffix(".py")))
    assert needed <= AVAILABLE | set(sys.stdlib_module_names)
    if module in (DISCOVERED, CLASSES):  # replaced as a whole; what else they import is checked all the same
        source = source.replace("import_module(", "by_name(")
    text, imported = flatten(source, module)
    assert {target[0] for target in imported} <= set(PARTS)
    changed = [line for line, flat in zip(source.rstrip().split("\n"), text.split("\n")) if line != flat]
    assert all(line.lstrip().startswith("from .") for line in changed)


def test_packages_of_travelling_modules_have_no_code_of_their_own():
    for part in PARTS:
        for path in (ROOT / part).rglob("__init__.py"):
            assert all(isinstance(node, (ast.Expr, ast.Import)) for node in ast.parse(path.read_text()).body), path


@pytest.mark.parametrize(
    "statement, problem",
    [
        ("from . import base", "from .module import name"),
        ("from ..ops import scored_attention", "no such module"),
        ("from ...auto import register", "configuration and modeling"),
        ("from ....x import y", "configuration and modeling"),
        ("import frankenstein_hf.auto", "import relatively"),
        ("from frankenstein_hf import auto", "import relatively"),
        ("import_module('x')", "literal"),
        ("if x: from .base import Mixer", "line of its own"),
        ("from .base \\\n    import Mixer", "line of its own"),
        ('"""\nfrom .prose import this\n"""', "looks like an import"),
    ],
)
def test_what_the_loader_cannot_follow_is_rejected_by_name(statement, problem):
    with pytest.raises(ValueError, match=problem) as error:
        flatten(statement, ("modeling", "mixers", "example"))
    assert "modeling/mixers/example.py:" in str(error.value)


def test_imports_are_rewritten_where_they_stand():
    source = (
        "def f():\n    from ..ops.numerics import (  # why\n        at_least_fp32,\n    )\n"
        "from ...configuration.norms import NORM_SPECS\n"
    )
    text, imported = flatten(source, ("modeling", "mixers", "example"))
    lines = text.splitlines()
    assert lines[1] == "    from .modeling_ops_numerics import (  # why"
    assert lines[4] == "from .configuration_norms import NORM_SPECS"
    assert set(imported) == {("modeling", "ops", "numerics"), ("configuration", "norms")}


def test_the_generated_registry_has_the_interface_of_the_one_it_replaces():
    def public(source: str) -> set[str]:
        return {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}

    flat = bundle_sources([MIXERS.get("gla")])
    for (part, name), file in (
        (DISCOVERED, "configuration_discovered.py"),
        (CLASSES, "modeling_discovered.py"),
    ):
        assert public(flat[file]) - {"entries"} == public((ROOT / part / f"{name}.py").read_text()) - {"spec_modules"}


@pytest.mark.parametrize("name", ["modeling_layer.py", "configuration_frankenstein.py", "modeling_mixers_gated_gla.py"])
def test_files_that_were_not_generated_are_never_replaced(name, tmp_path):
    """By `save_pretrained`, and by what passes its files on; nothing else is written then either."""
    (tmp_path / name).write_text("mine = 1\n")
    model = tiny_model("gla")
    with pytest.raises(ValueError, match=rf"did not write.*{name}.*save_code=False"):
        model.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name] and (tmp_path / name).read_text() == "mine = 1\n"
    model.save_pretrained(tmp_path, save_code=False)
    assert (tmp_path / name).read_text() == "mine = 1\n" and (tmp_path / "model.safetensors").exists()
    (tmp_path / name).unlink()
    for _ in range(2):  # generated ones are
        model.save_pretrained(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("nowhere")
    with pytest.raises(ValueError, match=name):
        model.save_pretrained(tmp_path)


def test_every_generated_file_carries_the_mark(tmp_path):
    tiny_model(CAUSAL).save_pretrained(tmp_path)
    assert set(bundle_files(tmp_path)) == code_in(tmp_path) != set()
