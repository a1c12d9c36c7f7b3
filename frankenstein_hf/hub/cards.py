"""Model cards: rendered from `hub_cards/`, and merged with what transformers and its `Trainer` write.

A card is ours to write when it is absent, ours and unedited, or transformers' or Trainer's automatic text. Of those the
metadata is kept and completed, and Trainer's results and hyperparameters become the section "Training". Any other card
was written by a person and stays as it is.
"""

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.utils import validate_repo_id, yaml_dump
from torch import nn

from ..cache_sizes import layer_caches
from ..configuration.registries import MIXERS
from ..configuration.stack import FRANKENSTEIN_VERSION
from ..modeling.census import options, parameter_census
from ..modeling.hub_bundle import HEADS, read_card
from ..modeling.implementations import is_third_party
from .foreign import Markdown, code, environment, markdown

if TYPE_CHECKING:
    from ..training.results import Results

TEMPLATES = Path(__file__).parent.parent / "hub_cards"

# What the Hub and `pipeline()` call the task of each head, and what the card calls the model.
TASKS = {
    "AutoModel": ("feature-extraction", "model without a head"),
    "AutoModelForCausalLM": ("text-generation", "causal language model"),
    "AutoModelForMaskedLM": ("fill-mask", "masked language model"),
    "AutoModelForSequenceClassification": ("text-classification", "sequence classifier"),
    "AutoModelForTokenClassification": ("token-classification", "token classifier"),
    "AutoModelForQuestionAnswering": ("question-answering", "extractive question-answering model"),
    "AutoModelForMultipleChoice": ("multiple-choice", "multiple-choice model"),
}

# Tasks whose cards show `pipeline()` at work; transformers has none for the others.
PIPELINES = ("text-generation", "fill-mask", "text-classification", "token-classification")

# What PEFT calls the task of each head; it knows no masked language models.
PEFT_TASKS = {
    "AutoModel": "FEATURE_EXTRACTION",
    "AutoModelForCausalLM": "CAUSAL_LM",
    "AutoModelForSequenceClassification": "SEQ_CLS",
    "AutoModelForTokenClassification": "TOKEN_CLS",
    "AutoModelForQuestionAnswering": "QUESTION_ANS",
}

OWNER = "YOUR-NAME"  # stands in examples for the owner of a model whose name on the Hub is not known
OUR_EXAMPLE = re.compile(r'\.from_pretrained\("([\w.-]+/[\w.-]+)"')
OUR_MARK = re.compile(r"<!-- frankenstein_hf card ([0-9a-f]{12}): [^\n]* -->\n")
OUR_RESULTS = "\n## Results\n"
OUR_TRAINING = "\n## Training\n"
TRAINER_MARK = "generated automatically according to the information the Trainer had access to"
# Trainer's empty sections: filled in, they are somebody's work.
TRAINER_STOCK = "".join(
    f"\n## {title}\n\nMore information needed\n"
    for title in ("Model description", "Intended uses & limitations", "Training and evaluation data")
)
TRAINER_PROCEDURE = "\n## Training procedure\n"
TRANSFORMERS_TEXT = (
    "This is the model card of a 🤗 transformers model that has been pushed on the Hub. "
    "This model card has been automatically generated."
)


class Card(NamedTuple):
    """A model card: the YAML block on top and the text below it."""

    metadata: dict[str, Any]
    body: str


def render(
    model: Any,
    directory: str | os.PathLike,
    repo_id: str | None = None,
    before: str | None = None,
    results: "Results | None" = None,
) -> None:
    """Write README.md for `model`; see `modeling.hub_bundle.render_card`.

    `results` of a training program become a section and the `model-index`, and the checkpoint it started from the
    `base_model`, if it is one of the Hub; all stay when the card is written again.
    """
    path = Path(directory) / "README.md"
    current, earlier = parse_card(read_card(directory) or ""), parse_card(before or "")
    if not is_generated(earlier):
        _replace(path, before or "")
        return
    if not is_generated(current):
        return
    known = [earlier.metadata, current.metadata]
    start = model.config._name_or_path
    name = hub_name(directory, repo_id or named_before(current.body) or named_before(earlier.body))
    shown = results.text(start) if results else results_section(current.body) or results_section(earlier.body)
    if results:
        known.append({"model-index": results.model_index(name), **results.metadata()})
        if start:
            known.append({"base_model": start})
        else:  # of an earlier run
            known = [{key: value for key, value in old.items() if key != "base_model"} for old in known]
    elif results_section(earlier.body):  # rather than what Trainer makes of it
        known.append({"model-index": earlier.metadata.get("model-index")})
    metadata = _metadata(model, *known)
    training = training_section(current.body) or training_section(earlier.body)
    text = _body(model, Path(directory), name, metadata, shown, training)
    digest = _digest(text)
    mark = f"<!-- frankenstein_hf card {digest}: written when the model is saved; once edited, it is left alone. -->"
    _replace(path, f"---\n{yaml_dump(metadata, sort_keys=False)}---\n{mark}\n\n{text}\n")


def parse_card(text: str) -> Card:
    """Split a card. Metadata that cannot be read counts as text."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    match = REGEX_YAML_BLOCK.search(text)
    try:
        metadata = yaml.safe_load(match.group(2)) or {} if match else None
    except yaml.YAMLError:
        metadata = None
    return Card(metadata, text[match.end() :]) if match and isinstance(metadata, dict) else Card({}, text)


def is_generated(card: Card) -> bool:
    """Whether a program wrote the text, so that it may be written over."""
    body = card.body.strip()
    if mark := OUR_MARK.match(body + "\n"):
        return mark[1] == _digest(body[mark.end() :])
    if TRAINER_MARK in body and not body.startswith("---"):
        return TRAINER_STOCK + TRAINER_PROCEDURE in body
    if TRANSFORMERS_TEXT in body:
        stock = ModelCard.from_template(ModelCardData(), model_description=TRANSFORMERS_TEXT)
        return body == stock.text.strip()
    return not body


def training_section(body: str) -> str:
    """What Trainer wrote about the training, from its own card or from one of ours; "" when there is nothing."""
    if TRAINER_MARK in body:
        opening, _, procedure = body.partition(TRAINER_STOCK + TRAINER_PROCEDURE)
        results = re.split(r"^# .*\n", opening, maxsplit=1, flags=re.MULTILINE)[-1]
        # Trainer's words for a model that comes from no checkpoint with a name
        results = results.replace(
            "is a fine-tuned version of [](https://huggingface.co/) on", "was trained from scratch on"
        )
        results = re.sub(
            r"(?<=is a fine-tuned version of )\[(.+?)\]\(https://huggingface.co/\1\)",
            lambda found: checkpoint_link(found[1]),
            results,
            flags=re.DOTALL,
        )
        return f"{results.strip()}\n\n{procedure.strip()}"
    return body.partition(OUR_TRAINING)[2].strip() if OUR_MARK.search(body) else ""


def is_repo_id(name: str) -> bool:
    """Whether the Hub allows the name, with or without an owner."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.isascii()


def is_hub_name(name: str) -> bool:
    """Whether a checkpoint is called by a name on the Hub, rather than by a folder."""
    return is_repo_id(name) and not Path(name).exists()


def checkpoint_link(name: str, kind: str = "") -> Markdown:
    """Markdown for a checkpoint: a link to the Hub, or a folder's name without those around it.

    `kind` is "datasets/" for a data set.
    """
    if is_hub_name(name):
        return Markdown(f"[{markdown(name)}](https://huggingface.co/{kind}{name})")
    return code(os.path.basename(os.path.abspath(name)))


def hub_name(directory: str | os.PathLike, repo_id: str | None) -> str:
    """What examples call a model: its name on the Hub, owner/name, or one in which the owner is left to fill in."""
    name = repo_id if repo_id and is_repo_id(repo_id) else Path(directory).resolve().name
    name = name if "/" in name else f"{OWNER}/{name}"
    return name if is_repo_id(name) else f"{OWNER}/MODEL"


def named_before(body: str) -> str | None:
    """The name on the Hub in the examples of one of our cards."""
    found = OUR_EXAMPLE.search(body) if OUR_MARK.search(body) else None
    return found[1] if found and not found[1].startswith(f"{OWNER}/") else None


def results_section(body: str) -> str:
    """The results that a training program put into one of our cards; "" when there are none."""
    return body.partition(OUR_RESULTS)[2].partition(OUR_TRAINING)[0].strip() if OUR_MARK.search(body) else ""


def decode_state(config: Any) -> tuple[int, int]:
    """Floats that a sequence's decode state holds whatever its length (rings count as full), and per token."""
    layers = layer_caches(config)
    return sum(layer.constant for layer in layers), math.ceil(sum(layer.per_token for layer in layers))


def _digest(text: str) -> str:
    return hashlib.sha256(text.strip().encode()).hexdigest()[:12]


def _replace(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished.write_bytes(text.encode("utf-8", "surrogateescape"))
    unfinished.replace(path)


def _auto_class(model: Any) -> str:
    classes = {reference.partition(".")[2]: auto_name for auto_name, reference in HEADS.items()}
    return classes.get(type(model).__name__, "AutoModel")


def _metadata(model: Any, *known: dict[str, Any]) -> dict[str, Any]:
    """Ours, completed with what the `known` cards said, oldest first: license, language, datasets, results, tags."""
    tags = ["frankenstein", *dict.fromkeys(model.config.mixer_names)]
    for old in (*(metadata.get("tags") or [] for metadata in known), model.model_tags or []):
        tags += [tag for tag in ([old] if isinstance(old, str) else old) if tag not in MIXERS]
    ours = {
        "library_name": "transformers",
        "pipeline_tag": TASKS[_auto_class(model)][0],
        "tags": list(dict.fromkeys(tags)),
    }
    others = {
        key: value
        for metadata in known
        for key, value in metadata.items()
        if value is not None and not (key == "base_model" and isinstance(value, str) and not is_hub_name(value))
    }
    return {**ours, **{key: value for key, value in others.items() if key not in ours}}


def _body(model: Any, directory: Path, name: str, metadata: dict[str, Any], results: str, training: str) -> str:
    config, auto_class = model.config, _auto_class(model)
    base = getattr(model, model.base_model_prefix, model)
    specs = [config.mixer_spec_for(layer_idx) for layer_idx in range(config.num_hidden_layers)]
    constant, per_token = decode_state(config)
    is_placeholder = name.startswith(f"{OWNER}/")
    text = (
        environment(TEMPLATES)
        .get_template("model_card.md")
        .render(
            config=config,
            name=name,
            title=directory.resolve().name if is_placeholder else name.split("/")[-1],
            is_placeholder=is_placeholder,
            about=[
                (label, key, _listed(metadata.get(key)))
                for label, key in (("licence", "license"), ("languages", "language"))
            ],
            auto_class=auto_class,
            task=TASKS[auto_class][0],
            kind=TASKS[auto_class][1],
            has_lm_head=model.get_output_embeddings() is not None,
            has_pipeline=TASKS[auto_class][0] in PIPELINES,
            is_causal=model.is_causal,
            layers=_layers(config, specs, base.layers),
            carries_code=_carries_code(directory),
            own=Markdown(", ".join(sorted({code(spec.name) for spec in specs if is_third_party(spec)}))),
            options="; ".join(options(config)),
            census=parameter_census(model),
            dtype=str(model.dtype).removeprefix("torch."),
            state_constant=constant,
            state_per_token=per_token,
            target_modules=target_modules(base.layers),
            peft_task=PEFT_TASKS.get(auto_class),
            needs_ids=sorted({spec.name for spec in specs if spec.needs_input_ids}),
            version=FRANKENSTEIN_VERSION,
            versions=f"frankenstein_hf {FRANKENSTEIN_VERSION}, transformers {transformers.__version__}, "
            f"torch {torch.__version__}",
            results=Markdown(results),
            training=Markdown(training),
        )
    )
    return text.strip()


def target_modules(layers: Iterable[Any]) -> list[str]:
    """The linear projections of these layers' mixers, as PEFT's `target_modules` names them."""
    names = {
        f"mixer.{name}"
        for layer in layers
        for name, module in layer.mixer.named_modules()
        if isinstance(module, nn.Linear)
    }
    return sorted(names)


def _listed(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value or "")


def _carries_code(directory: Path) -> bool:
    """Whether the checkpoint says that its code lies beside it."""
    config_file = directory / "config.json"
    return config_file.is_file() and "auto_map" in json.loads(config_file.read_text(encoding="utf-8"))


def _layers(config: Any, specs: list[Any], layers: Iterable[Any]) -> list[dict[str, Any]]:
    """One row for each mixer with its settings: which layers have it, and how many weights in each."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for layer_idx, (spec, layer) in enumerate(zip(specs, layers)):
        settings = ", ".join(f"{k}={v}" for k, v in dataclasses.asdict(config.params_for(layer_idx)).items())
        row = rows.setdefault((spec.name, settings), {"name": spec.name, "settings": settings or "–", "numbers": []})
        ours = not is_third_party(spec)  # whose descriptions may have code in them
        row |= {
            key: Markdown(getattr(spec, key).replace("|", "\\|")) if ours else getattr(spec, key)
            for key in ("summary", "reference")
        }
        row["numbers"].append(layer_idx)
        row["weights"] = sum(parameter.numel() for parameter in layer.mixer.parameters())
    return [{**row, "numbers": ", ".join(map(str, row["numbers"]))} for row in rows.values()]
