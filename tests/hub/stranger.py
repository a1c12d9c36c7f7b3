"""Loads checkpoints where the package is absent; run by `test_bundle.py` as `python -I stranger.py FOLDER`.

Reads `FOLDER/expected.pt`, writes what it finds to `FOLDER/found.json`. Everything happens in one process because
importing torch and transformers costs seconds.
"""

import importlib.abc
import json
import sys
from pathlib import Path
from typing import Any


class NotInstalled(importlib.abc.MetaPathFinder):
    """Makes the package impossible to import, however it is installed."""

    def find_spec(self, fullname, path, target=None):
        if fullname.partition(".")[0] in ("frankenstein_hf", "modeling", "configuration"):
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


sys.meta_path.insert(0, NotInstalled())

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, pipeline  # noqa: E402

torch.set_num_threads(1)
folder = Path(sys.argv[1])
expected = torch.load(folder / "expected.pt")
found: dict[str, Any] = {}
trust: dict[str, Any] = {"trust_remote_code": True}


def files(name: str) -> dict[str, str]:
    return {path.name: path.read_text() for path in (folder / name).glob("*.py")}


with torch.no_grad():
    found["heads"] = {}
    for auto_name, (batch, outputs) in expected["heads"].items():
        found["heads"][auto_name] = {}
        for name, wanted in zip(("masked", auto_name), outputs):
            torch.manual_seed(0)
            model = getattr(transformers, auto_name).from_pretrained(folder / name, num_labels=3, **trust)
            output = model(**batch)[: len(wanted)]
            found["heads"][auto_name][name] = all(torch.equal(a, b) for a, b in zip(output, wanted))

    causal = AutoModelForCausalLM.from_pretrained(folder / "causal", **trust)
    ids = causal.generate(expected["input_ids"], max_new_tokens=5, do_sample=False)
    found["generate"] = torch.equal(ids, expected["generate"])
    found["module"] = type(causal).__module__

    generate = pipeline("text-generation", str(folder / "causal"), **trust)
    found["text-generation"] = generate("t5 t6", max_new_tokens=3, do_sample=False)[0]["generated_text"]
    fill = pipeline("fill-mask", str(folder / "masked"), **trust)
    found["fill-mask"] = [answer["token_str"] for answer in fill("t5 [MASK] t7", top_k=2)]

    masked = AutoModelForMaskedLM.from_pretrained(folder / "masked", **trust)
    masked.config.mask_token_id = int(expected["input_ids"][0, 3])
    found["generate_masked"] = torch.equal(
        masked.generate_masked(expected["input_ids"], temperature=0), expected["generate_masked"]
    )

    for task, auto_name in (
        ("text-classification", "AutoModelForSequenceClassification"),
        ("token-classification", "AutoModelForTokenClassification"),
    ):
        answers = pipeline(task, str(folder / auto_name), **trust)(["t5 t6", "t7"])
        found[task] = json.loads(json.dumps(answers, default=float))

    causal.save_pretrained(folder / "again")
    found["same files"] = files("again") == files("causal")
    found["card"] = (folder / "again" / "README.md").exists()
    again = AutoModelForCausalLM.from_pretrained(folder / "again", **trust)
    found["again"] = torch.equal(again(expected["input_ids"]).logits, causal(expected["input_ids"]).logits)

    causal.save_pretrained(folder / "no_code", save_code=False)
    found["no_code"] = sorted(path.name for path in (folder / "no_code").iterdir())
    found["no_code auto_map"] = "auto_map" in json.loads((folder / "no_code" / "config.json").read_text())

    own = found["own"] = {}  # a mixer from outside the package, whose file came along
    ids = expected["input_ids"]
    for name, auto in (("own", AutoModelForCausalLM), ("own_masked", AutoModelForMaskedLM)):
        model = auto.from_pretrained(folder / name, **trust)
        own[name] = torch.equal(model(ids, attention_mask=(ids > 3).long()).logits, expected[name])
        if name == "own":
            generated = (model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=use) for use in (True, False))
            own["generate"] = torch.equal(*generated)
        model.save_pretrained(folder / f"{name}_again")
        own["same files"] = own.get("same files", True) and files(f"{name}_again") == files(name)
    try:
        AutoConfig.from_pretrained(folder / "own", mixer_params={"min_gru": {"expansion": 17}}, **trust)
    except ValueError as error:
        own["checked"] = "'min_gru': parameter 'expansion'" in str(error)

    config = AutoConfig.from_pretrained(folder / "causal", **trust)
    config.layer_pattern, config.num_hidden_layers = [config.layer_pattern[0]], 1
    other = AutoModelForCausalLM.from_config(config, **trust)
    other.save_pretrained(folder / "other")
    other = AutoModelForCausalLM.from_pretrained(folder / "other", **trust)
    found["other pattern"] = other.config.mixer_names

    # a repository of the Hub, as its cache lays it out
    hub = AutoModelForMaskedLM.from_pretrained("me/monster-1.0", **trust)
    hub.save_pretrained(folder / "hub_again")
    found["hub"] = AutoModel.from_pretrained(folder / "hub_again", **trust).config.mixer_names

    alone = AutoModelForMaskedLM.from_pretrained(folder / "alone", **trust)
    alone.save_pretrained(folder / "alone_again")
    found["alone"] = AutoModel.from_pretrained(folder / "alone_again", **trust).config.mixer_names

found["bare modules"] = [name for name in sys.modules if name.partition(".")[0] in ("modeling", "configuration")]
(folder / "found.json").write_text(json.dumps(found))
