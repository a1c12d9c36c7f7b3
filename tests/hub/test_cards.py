"""Model cards: what they say, and that they survive every route by which transformers writes its own."""

import dataclasses
import importlib
import re
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers.utils.hub
from huggingface_hub import ModelCard
from huggingface_hub.errors import EntryNotFoundError
from transformers import Trainer, TrainingArguments
from transformers.pipelines import SUPPORTED_TASKS

from frankenstein_hf.after_import import after_import
from frankenstein_hf.hub.cards import TASKS, decode_state, render
from frankenstein_hf.modeling.hub_bundle import HEADS
from frankenstein_hf.training.results import Results
from tests.tiny import tiny_config, tiny_model, tokens

BY_HAND = "---\nlicense: mit\n---\n# My model\r\n\r\nI wrote this myself.\n"
CODE = {"modeling_frankenstein.py", "configuration_frankenstein.py", "modeling_mixers_gated_gla.py"}


@dataclasses.dataclass
class StubHub:
    """Stands in for HfApi: keeps the files of every upload."""

    uploads: list[dict[str, str]] = dataclasses.field(default_factory=list)
    card: str | None = None  # README.md already on the Hub

    def create_repo(self, repo_id: str, **_: Any) -> Any:
        return SimpleNamespace(repo_id=repo_id)

    def create_commit(self, repo_id: str, operations: list[Any], **_: Any) -> None:
        self._keep({op.path_in_repo: Path(op.path_or_fileobj) for op in operations})

    def upload_folder(self, folder_path: str, run_as_future: bool = False, **_: Any) -> Any:
        self._keep({path.name: path for path in Path(folder_path).iterdir() if path.is_file()})
        done: Future = Future()
        done.set_result(None)
        return done if run_as_future else None

    def _keep(self, files: dict[str, Path]) -> None:
        self.uploads.append({name: path.read_bytes().decode(errors="replace") for name, path in files.items()})

    @property
    def last_card(self) -> str:
        return self.uploads[-1]["README.md"]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StubHub:
    stub = StubHub()

    def download(*args: Any, **kwargs: Any) -> str:
        if stub.card is None:
            raise EntryNotFoundError("no README.md")
        path = tmp_path / "downloaded.md"
        path.write_bytes(stub.card.encode())
        return str(path)

    monkeypatch.setattr(transformers.utils.hub, "_hf_api", stub)
    monkeypatch.setattr("huggingface_hub.repocard.hf_hub_download", download)
    return stub


def make_trainer(directory: Path, **arguments: Any) -> Trainer:
    rows = [{"input_ids": row, "labels": row} for row in tokens(4, 8)]
    settings = TrainingArguments(str(directory), max_steps=2, report_to="none", use_cpu=True, **arguments)
    return Trainer(tiny_model("gla"), settings, train_dataset=rows, eval_dataset=rows)


def assert_is_ours(card: str, name: str = "me/monster") -> None:
    assert "## Layers" in card and f'from_pretrained("{name}", trust_remote_code=True)' in card
    assert {"frankenstein", "gla"} <= set(ModelCard(card).data.tags)


def test_a_card_describes_the_model(tmp_path):
    model = tiny_model(["swa", "gla", "memory", "gla"], mixer_params={"swa": {"window_size": 9}})
    model.save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "text-generation"
    assert card.data.tags == ["frankenstein", "swa", "gla", "memory"]
    assert card.data.license is None
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in card.text.splitlines() if line[:3] in "| 0| 1| 2"
    ]
    layers = {row[1]: row for row in rows if len(row) == 6 and row[0] != "layers"}
    assert layers["`gla`"][0] == "1, 3" and "2312.06635" in layers["`gla`"][5]
    assert "window_size=9" in layers["`swa`"][2]
    weights = sum(parameter.numel() for parameter in model.model.layers[1].mixer.parameters())
    assert layers["`gla`"][3] == f"{weights:,}"
    assert f"| parameters | {model.num_parameters():,} |" in card.text
    assert "`memory` looks up token ids" in card.text and "causal" in card.text
    assert not re.search(r"\{\{|\{%|Undefined|None", card.text)


@pytest.mark.parametrize("auto_name", sorted(HEADS))
def test_the_task_follows_the_head(auto_name, tmp_path):
    model = getattr(transformers, auto_name).from_config(tiny_config("gla"))
    model.save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    task = card.data.pipeline_tag
    assert task == TASKS[auto_name][0] and f"model = {auto_name}.from_pretrained(" in card.text
    assert ("does not generate" in card.text) is ("decode state" not in card.text) is (not model.is_causal)
    assert (f'pipeline("{task}"' in card.text) is (task in SUPPORTED_TASKS and task != "feature-extraction")
    assert ("shared with the head" in card.text) is (model.get_output_embeddings() is not None)


def test_the_decode_state_on_the_card_is_what_the_caches_hold():
    model = tiny_model(["standard", "gqa", "swa", "gla", "mamba", "memory"])
    constant, per_token = decode_state(model.config)

    def floats(length: int) -> int:
        cache = model(tokens(1, length), use_cache=True).cache
        tensors = [x for layer in cache.layers for x in (*getattr(layer, "states", {}).values(), *_key_values(layer))]
        return sum(x.numel() for x in tensors if x.is_floating_point())

    assert floats(40) - floats(30) == 10 * per_token
    assert floats(30) - 30 * per_token == pytest.approx(constant, rel=0.02)


def _key_values(layer: Any) -> list[Any]:
    return [x for name in ("keys", "values") if (x := getattr(layer, name, None)) is not None]


def test_saving_again_changes_nothing_and_follows_the_model(tmp_path):
    tiny_model("gla").save_pretrained(tmp_path)
    first = (tmp_path / "README.md").read_text()
    tiny_model("gla").save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == first
    tiny_model("swa").save_pretrained(tmp_path)
    assert ModelCard.load(tmp_path / "README.md").data.tags == ["frankenstein", "swa"]


@pytest.mark.parametrize("text", [BY_HAND, "---\nlicense: [\n---\n", "plain \xff text", "edited"])
def test_a_card_written_by_hand_stays_byte_for_byte(text, tmp_path, hub):
    path = tmp_path / "README.md"
    if text == "edited":  # one of ours that somebody improved
        tiny_model("gla").save_pretrained(tmp_path)
        text = path.read_text().replace("## Limits", "## Limits\n\n- It is fond of lakes.")
    written = text.encode("latin-1" if "\xff" in text else "utf-8")
    path.write_bytes(written)
    tiny_model("gla").save_pretrained(tmp_path)
    assert path.read_bytes() == written
    tiny_model("gla").save_pretrained(tmp_path, push_to_hub=True, repo_id="me/monster")
    assert path.read_bytes() == written
    make_trainer(tmp_path).create_model_card()
    assert path.read_bytes() == written


def test_metadata_added_by_hand_stays(tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: en\ntags:\n- mine\n---\n")
    tiny_model("gla").save_pretrained(tmp_path)
    make_trainer(tmp_path).create_model_card()
    card = ModelCard.load(tmp_path / "README.md")
    assert (card.data.license, card.data.language) == ("apache-2.0", "en")
    assert {"mine", "gla", "generated_from_trainer"} <= set(card.data.tags)


def test_model_push_to_hub_carries_code_and_card(hub):
    model = tiny_model("gla")
    model.push_to_hub("me/monster", tags=["mine"])
    assert CODE | {"config.json", "model.safetensors"} <= set(hub.uploads[-1])
    assert_is_ours(hub.last_card)
    assert "mine" in ModelCard(hub.last_card).data.tags
    hub.card = hub.last_card.replace("library_name", "license: mit\nlibrary_name", 1)
    model.push_to_hub("me/monster")
    assert ModelCard(hub.last_card).data.license == "mit"
    assert_is_ours(hub.last_card)


def test_model_push_to_hub_keeps_a_card_written_on_the_hub(hub):
    hub.card = BY_HAND
    tiny_model("gla").push_to_hub("me/monster")
    assert "I wrote this myself." in hub.last_card and "## Layers" not in hub.last_card


def test_save_pretrained_with_push_carries_code_and_card(hub, tmp_path):
    for _ in range(2):  # the second time every file is there already
        tiny_model("gla").save_pretrained(tmp_path, push_to_hub=True, repo_id="me/monster")
        assert set(hub.uploads[-1]) >= CODE
        assert_is_ours(hub.last_card)
    tiny_model("gla").save_pretrained(tmp_path / "bare", push_to_hub=True, repo_id="me/monster", save_code=False)
    assert not any(name.endswith(".py") for name in hub.uploads[-1])


def test_trainer_push_to_hub_carries_code_card_and_results(hub, tmp_path):
    trainer = make_trainer(
        tmp_path, push_to_hub=True, hub_model_id="me/monster", save_steps=1, eval_strategy="steps", eval_steps=1
    )
    trainer.train()
    assert hub.uploads, "pushes during training"
    for upload in hub.uploads:
        assert set(upload) >= CODE
        assert_is_ours(upload["README.md"])
    trainer.push_to_hub(dataset_tags="me/lakes", dataset="lakes", tasks="text-generation", license="mit")
    card = hub.last_card
    assert set(hub.uploads[-1]) >= CODE
    assert_is_ours(card)
    metadata = ModelCard(card).data.to_dict()
    assert metadata["datasets"] == ["me/lakes"] and metadata["license"] == "mit" and "model-index" in metadata
    assert "generated_from_trainer" in metadata["tags"]
    assert "trained from scratch on the lakes dataset" in card and "[](https://huggingface.co/)" not in card
    assert "- learning_rate:" in card and re.search(r"\| Training Loss \|", card) and re.search(r"- Loss: \d", card)
    assert "More information needed" not in card
    hub.card = card
    trainer.model.push_to_hub("me/monster")  # another route: the results stay
    assert hub.last_card == card


def test_a_checkpoint_of_the_hub_is_the_base_model_and_a_folder_is_not(hub, tmp_path):
    model = tiny_model("gla")
    model.save_pretrained(tmp_path)
    metrics = {"data": {"origin": "lakes"}, "after": {"loss": 1.0}}
    found = Results(metrics, "unigram", "guessing", "text-generation", "lakes", None, None)
    for start, expected in (("me/monster", "me/monster"), ("", None), (str(tmp_path), None)):
        model.config._name_or_path = start
        render(model, tmp_path, results=found)
        model.save_pretrained(tmp_path)  # again, without results
        card = ModelCard.load(tmp_path / "README.md")
        assert card.data.base_model == expected and "Trained on `lakes`." in card.text
        assert ("started from the checkpoint" in card.text) is bool(start) and str(tmp_path) not in card.content
    trainer = make_trainer(tmp_path, push_to_hub=True, hub_model_id="me/monster")
    trainer.push_to_hub(finetuned_from=str(tmp_path))
    assert f"is a fine-tuned version of `{tmp_path.name}` on" in hub.last_card and str(tmp_path) not in hub.last_card
    assert ModelCard(hub.last_card).data.base_model is None


def test_create_model_card_is_trainers_own_for_other_models(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
    )
    trainer.create_model_card()
    assert "## Model description" in (tmp_path / "README.md").read_text()


def test_after_import_waits_for_the_end_of_a_module_that_is_running(tmp_path, monkeypatch):
    """Importing Trainer imports modules for which others wait, and those wait for Trainer in turn."""
    (tmp_path / "an_outer_module.py").write_text("import an_inner_module\nvalue = 1\n")
    (tmp_path / "an_inner_module.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    seen: list[int] = []
    after_import("an_outer_module", lambda module: seen.append(module.value))
    after_import(
        "an_inner_module", lambda _: after_import("an_outer_module", lambda module: seen.append(-module.value))
    )
    importlib.import_module("an_outer_module")
    assert seen == [1, -1]
    for name in ("an_outer_module", "an_inner_module"):
        monkeypatch.delitem(sys.modules, name)


def test_after_import_waits_for_the_module_and_survives_probes_and_reloads(tmp_path, monkeypatch):
    (tmp_path / "a_late_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    seen: list[int] = []

    def note(module: Any) -> None:
        seen.append(module.value)

    for _ in range(2):  # the same function twice: once is enough
        after_import("a_late_module", note)
    assert importlib.util.find_spec("a_late_module") is not None and seen == []
    module = importlib.import_module("a_late_module")
    assert seen == [1]
    after_import("a_late_module", lambda module: seen.append(2))
    assert seen == [1, 2]
    monkeypatch.delitem(sys.modules, module.__name__)


def snippets(card: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", card, re.DOTALL)


def test_the_examples_use_the_name_on_the_hub_or_one_to_fill_in(tmp_path):
    model = tiny_model("gla")
    model.save_pretrained(tmp_path / "lakes")
    card = (tmp_path / "lakes" / "README.md").read_text()
    assert 'from_pretrained("YOUR-NAME/lakes"' in card and "`YOUR-NAME/lakes` stands for the name" in card
    for given, expected in (("me/monster", "me/monster"), ("monster", "YOUR-NAME/monster")):
        render(model, tmp_path / "lakes", given)
        model.save_pretrained(tmp_path / "lakes")  # without knowing the name: it is kept
        card = (tmp_path / "lakes" / "README.md").read_text()
        if "/" in given:
            assert "YOUR-NAME" not in card
        assert (
            all(f'("{expected}"' in code for code in snippets(card) if "from_pretrained" in code) or given == "monster"
        )


def test_licence_and_languages_are_shown_or_asked_for(tmp_path):
    model = tiny_model("gla")
    model.save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.text.count("not stated; the owner adds") == 2 and card.data.license is None
    found = Results({}, "unigram", "", "text-generation", "lakes", license="mit", languages=("de", "fr"))
    render(model, tmp_path, results=found)
    model.save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert (card.data.license, card.data.language) == ("mit", ["de", "fr"])
    assert "| licence | mit |" in card.text and "| languages | de, fr |" in card.text


@pytest.mark.parametrize(
    "auto_name", ["AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForTokenClassification"]
)
def test_the_adapter_example_adapts_every_mixer_of_this_model_and_nothing_else(auto_name, tmp_path):
    from peft import get_peft_model

    model = getattr(transformers, auto_name).from_config(tiny_config(["gla", "swa", "mamba"]))
    model.save_pretrained(tmp_path)
    (code,) = (code for code in snippets((tmp_path / "README.md").read_text()) if "LoraConfig" in code)
    names: dict[str, Any] = {}
    exec(code, names)
    adapted = get_peft_model(model, names["adapter"])
    places = {name for name, _ in adapted.named_parameters() if "lora_A" in name}
    for layer in range(3):
        assert any(f"layers.{layer}.mixer." in name for name in places)
    assert all(".mixer." in name for name in places)
    every = {f"mixer.{name}" for layer in range(3) for name in ("q_proj", "in_proj")}
    assert every & set(names["adapter"].target_modules)


def test_a_card_can_be_cited(tmp_path):
    tiny_model("gla").save_pretrained(tmp_path)
    (entry,) = re.findall(r"```bibtex\n(.*?)```", (tmp_path / "README.md").read_text(), re.DOTALL)
    assert entry.count("{") == entry.count("}") and entry.startswith("@software{frankenstein_hf,")
