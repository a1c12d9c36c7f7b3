"""Importing the package is light, and everything it offers is there when it is used."""

import subprocess
import sys
from pathlib import Path

import pytest

import frankenstein_hf as fhf


def modules_after(code: str) -> set[str]:
    code += "\nimport sys\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_importing_loads_neither_torch_nor_transformers_nor_anything_that_needs_them():
    loaded = modules_after("import frankenstein_hf")
    assert "frankenstein_hf.auto" in loaded
    light = {"frankenstein_hf", "frankenstein_hf.auto", "frankenstein_hf.after_import"}
    assert not {name for name in loaded if name.startswith("frankenstein_hf")} - light
    assert not loaded & {"torch", "transformers", "peft", "numpy", "huggingface_hub"}


def test_the_configuration_loads_no_trainer_no_adapters_and_no_code_of_mixers_or_optimizers():
    loaded = modules_after("import frankenstein_hf\nfrom transformers import AutoConfig")
    assert "frankenstein_hf.configuration.configuration_frankenstein" in loaded
    heavy = [
        name
        for name in loaded
        if name.startswith(("frankenstein_hf.modeling", "frankenstein_hf.optim", "peft"))
        or name in ("transformers.trainer", "transformers.training_args", "transformers.models.auto.modeling_auto")
    ]
    assert not heavy


@pytest.mark.parametrize("first", ["import frankenstein_hf", "from transformers import AutoConfig"])
def test_the_configuration_is_known_to_autoconfig_in_either_order(first):
    code = f"{first}\nimport frankenstein_hf as f\nfrom transformers import AutoConfig"
    modules_after(f"{code}\nassert type(AutoConfig.for_model('frankenstein')).__name__ == 'FrankensteinConfig'")


@pytest.mark.parametrize(
    "code",
    [
        "from transformers import AutoModelForMaskedLM as A\nimport frankenstein_hf as f",
        "import frankenstein_hf as f\nfrom transformers import AutoModelForMaskedLM as A",
        "import frankenstein_hf as f\nfrom transformers import LlamaForCausalLM\n"
        "from transformers import AutoModelForMaskedLM as A",
        "import frankenstein_hf as f\nimport transformers.modeling_layers\n"
        "from transformers import AutoModelForMaskedLM as A",
    ],
)
def test_the_auto_classes_know_the_family_in_either_order(code):
    code += "\nc = f.FrankensteinConfig(vocab_size=9, hidden_size=8, num_attention_heads=2, num_hidden_layers=1,"
    code += " layer_pattern='swa')\nassert type(A.from_config(c)) is f.FrankensteinForMaskedLM"
    modules_after(code)


@pytest.mark.parametrize(
    "code", ["import frankenstein_hf as f\nf.FrankensteinForCausalLM", "from frankenstein_hf.modeling import layer"]
)
def test_models_and_their_parts_can_be_imported_first(code):
    modules_after(code)


@pytest.mark.parametrize("name", ["FrankensteinForCausalLM", "FrankensteinForTokenClassification"])
def test_models_can_be_imported_after_a_configuration_was_read(name, tmp_path):
    fhf.FrankensteinConfig(vocab_size=9).save_pretrained(tmp_path)
    code = "import frankenstein_hf as f\nfrom transformers import AutoConfig"
    code += (
        f"\nAutoConfig.from_pretrained({str(tmp_path)!r})\nf.{name}\nfrom transformers import AutoModelForCausalLM as A"
    )
    modules_after(f"{code}\nassert A._model_mapping[f.FrankensteinConfig] is f.FrankensteinForCausalLM")


@pytest.mark.parametrize("name", fhf.__all__)
def test_every_public_name_is_there(name):
    assert getattr(fhf, name) is not None and name in dir(fhf)


def test_the_names_are_written_down_once_for_readers_and_type_checkers_alike():
    source = Path(str(fhf.__file__)).read_text(encoding="utf-8")
    block = source[source.index("if TYPE_CHECKING:") : source.index("# Where each")]
    assert all(f" {name}," in block or f" {name}\n" in block for name in fhf._HOME)
    assert {*fhf._HOME, "__version__"} == set(fhf.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(fhf, "nothing")  # noqa: B009


@pytest.mark.parametrize(
    "module",
    ["modeling.layer", "modeling.ops.numerics", "modeling.modeling_frankenstein_heads", "attention_interface", "ops"],
)
def test_any_module_can_be_imported_first(module):
    code = f"import frankenstein_hf.{module}\nfrom transformers import AutoModel\nimport frankenstein_hf as f"
    modules_after(f"{code}\nassert f.FrankensteinConfig in AutoModel._model_mapping.keys()")
