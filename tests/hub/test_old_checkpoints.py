"""Whatever an earlier commit saved loads, or the error says precisely why not.

The checkpoints lie in `tests/fixtures/checkpoints`, one folder per label and kind; `tests/fixtures/add_checkpoints.py`
adds those of today's code and never writes over one. If a change makes one impossible to load as it is, do not delete
or regenerate it: convert what it holds while loading (in the configuration's `__post_init__`, or by
`_checkpoint_conversion_mapping` for the names of weights). If that is impossible too, raise an error that names the
checkpoint's version, what changed and the last version that loads it, and test that error here in its place.
"""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import frankenstein_hf as fhf
from frankenstein_hf.configuration.registries import MIXERS
from frankenstein_hf.modeling.hub_bundle import HEADS

from ..tiny import relative_rms

CHECKPOINTS = sorted((Path(__file__).parents[1] / "fixtures" / "checkpoints").iterdir())
EXAMPLE = next(path for path in CHECKPOINTS if path.name.endswith("_classifier"))


def architecture(folder: Path) -> Any:
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(fhf, name)


@pytest.fixture
def changed(tmp_path: Path):
    """A copy of the example with other values in its config."""

    def change(**values: Any) -> Path:
        shutil.copytree(EXAMPLE, tmp_path / "changed")
        path = tmp_path / "changed" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
        return tmp_path / "changed"

    return change


@pytest.mark.parametrize("folder", CHECKPOINTS, ids=lambda folder: folder.name)
def test_a_checkpoint_of_an_earlier_commit_gives_its_logits(folder):
    """Tolerance: what rounding does to today's own fp32 logits; two dozen layers of such weights magnify it."""
    model, info = architecture(folder).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    expected = load_file(folder / "expected.safetensors")
    mask = expected["mask"]
    with torch.no_grad():
        logits, exact = (
            m(expected["input_ids"], attention_mask=mask).logits for m in (model, copy.deepcopy(model).double())
        )
    real = mask.bool() if logits.dim() == 3 else slice(None)  # what stands at pads is nobody's business
    rounding = relative_rms(logits[real], exact[real])
    assert relative_rms(expected["logits"][real], exact[real]) < 1e-6 + 4 * rounding
    assert rounding < 1e-4
    assert logits[real].abs().max() > 0.1


def test_the_fixtures_cover_every_mixer_in_both_modes_and_an_earlier_commit():
    configs = [json.loads((folder / "config.json").read_text()) for folder in CHECKPOINTS]
    for is_causal, attribute in ((True, "causal"), (False, "bidirectional")):
        covered = {name for config in configs if config["is_causal"] is is_causal for name in config["layer_pattern"]}
        missing = {spec.name for spec in MIXERS if getattr(spec, attribute)} - covered
        assert not missing, "run tests/fixtures/add_checkpoints.py with a new label"
    assert any(not folder.name.startswith(fhf.__version__) for folder in CHECKPOINTS)
    assert (
        sum(path.stat().st_size for folder in CHECKPOINTS for path in folder.iterdir()) < 1_000_000
    )  # some 6 kB a mixer and mode
    assert not [path for folder in CHECKPOINTS for path in folder.glob("*.py")], "loading must not need their own code"


@pytest.mark.parametrize("auto_name", sorted(HEADS))
def test_every_head_takes_its_stack_from_an_old_language_model(auto_name):
    for folder in CHECKPOINTS:
        without_causal_form = "ssog" in (folder / "config.json").read_text()
        if folder == EXAMPLE or (auto_name.endswith("CausalLM") and without_causal_form):
            continue
        loaded, info = getattr(transformers, auto_name).from_pretrained(folder, output_loading_info=True)
        assert not [key for key in info["missing_keys"] if "layers." in key or "embed_tokens" in key]
        assert type(loaded).__name__ == HEADS[auto_name].partition(".")[2]


def test_saving_again_writes_todays_version(changed, tmp_path):
    model = fhf.FrankensteinForSequenceClassification.from_pretrained(changed(frankenstein_version="0.0.1"))
    model.save_pretrained(tmp_path / "again", save_code=False)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["frankenstein_version"] == fhf.__version__


def test_unknown_keys_of_a_newer_version_are_kept_and_reported(changed, tmp_path, caplog):
    folder = changed(frankenstein_version="99.0.0", warp=9)
    with caplog.at_level("WARNING"):
        model = architecture(folder).from_pretrained(folder)
    assert "Unknown config key 'warp'" in caplog.text
    assert f"written by frankenstein_hf 99.0.0, this is {fhf.__version__}: upgrade" in caplog.text
    model.save_pretrained(tmp_path / "again", save_code=False)
    saved = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (saved["warp"], saved["frankenstein_version"]) == (9, "99.0.0")
    folder = tmp_path / "again"
    assert torch.equal(architecture(folder).from_pretrained(folder).classifier.weight, model.classifier.weight)


@pytest.mark.parametrize(
    "values, reason",
    [
        ({"layer_pattern": ["hyperdelta", "swa", "standard"]}, "Unknown mixer 'hyperdelta'"),
        ({"mixer_params": {"swa": {"spin": 1}}}, "'swa' has no parameter 'spin'"),
        ({"norm": "scale_norm"}, "scale_norm"),
        ({"hidden_size": "wide"}, "hidden_size must be a whole number"),
    ],
)
def test_what_a_newer_version_alone_can_read_is_refused_with_both_versions(values, reason, changed):
    folder = changed(frankenstein_version="99.0.0", **values)
    with pytest.raises(ValueError, match=reason) as error:
        architecture(folder).from_pretrained(folder)
    assert f"written by frankenstein_hf 99.0.0, this is {fhf.__version__}: upgrade to use it." in str(error.value)


def test_weights_of_a_newer_layout_are_refused_with_both_versions(changed):
    folder = changed(frankenstein_version="99.0.0")
    weights = load_file(folder / "model.safetensors")
    weights = {name.replace("q_proj", "query"): tensor for name, tensor in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing \[.*q_proj.*without a place \[.*query.*") as error:
        architecture(folder).from_pretrained(folder)
    assert "99.0.0" in str(error.value) and "upgrade" in str(error.value)
    folder.rename(folder.with_name("same"))
    with pytest.raises(ValueError) as error:  # of today's version: no word of upgrading
        architecture(changed()).from_pretrained(folder, config=fhf.FrankensteinConfig(layer_pattern="gla"))
    assert "upgrade" not in str(error.value)


def test_an_unknown_mixer_of_todays_version_is_just_unknown(changed):
    folder = changed(layer_pattern=["hyperdelta", "swa", "standard"])
    with pytest.raises(ValueError, match="Unknown mixer 'hyperdelta'") as error:
        architecture(folder).from_pretrained(folder)
    assert "upgrade" not in str(error.value)
