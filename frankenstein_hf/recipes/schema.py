"""The JSON Schema of recipes, made from the objects that a recipe builds.

It helps editors, and answers names, types and ranges before torch is imported. What several keys must agree on, only
building them says.
"""

import dataclasses
import enum
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from ..configuration.component import MixerSpec, Params
from ..configuration.configuration_frankenstein import FrankensteinConfig
from ..configuration.keys import KEY_ALIASES, fields_of
from ..configuration.registries import KINDS, MIXERS
from ..configuration.stack import PER_LAYER_KEYS, StackConfig
from ..configuration.values import choices_of
from ..optim.grouping import ROLES
from ..optim.spec import GROUP_PARAMS, OPTIMIZERS, STABILIZERS
from ..training.tasks import PROGRAMS, TASKS

FORMAT = 1
# Keys of a configuration that the data, the tokenizer or the program decides, and who that is.
DECIDED = {
    "vocab_size": "the tokenizer: tokenizer.train.vocab_size or tokenizer.from",
    "is_causal": "the task",
    "frankenstein_version": "this library",
    "sparse_prediction": "the task masked_lm",
    "num_labels": "the labels in the data",
    "id2label": "the labels in the data",
    "label2id": "the labels in the data",
    "problem_type": "the labels in the data, or data.problem_type",
    **{f"{name}_token_id": "the tokenizer" for name in ("pad", "bos", "eos", "mask", "cls", "sep")},
}
# Fields of the programs' dataclasses that a recipe says elsewhere.
ELSEWHERE = {"hub_model_id": "hub.repo_id", "hub_private_repo": "hub.private"}
# For messages about keys at the wrong place.
HOMES = {"vocab_size": "tokenizer.train.vocab_size", "learning_rate": "optimizer.lr", "optim": "optimizer.name"}
NOT_OF_RECIPES = {"mode", "input_file", "corpus_file", "top_k", "num_clusters"}  # uses of a trained model


def schema() -> dict[str, Any]:
    """The schema of every recipe, installed plugins included."""
    tasks = list(TASKS)
    sections: dict[str, Any] = {
        "format": {"const": FORMAT, "description": "Version of what recipes look like."},
        "extends": {
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
            "description": "Presets or files this recipe builds on, left to right.",
        },
        "about": {"type": "string", "description": "What the recipe is, in a line."},
        "plugins": {
            "type": "array",
            "items": {"type": "string"},
            "description": "Installed packages whose parts are used, such as 'my_mixers>=0.2'.",
        },
        "task": {
            "enum": tasks,
            "default": "masked_lm",
            "description": "What is learned: " + "; ".join(f"{name}: {task.summary}" for name, task in TASKS.items()),
        },
        "model": {"$ref": "#/$defs/model"},
        "tokenizer": _tokenizer(),
        "data": {"description": "Where the data comes from.", "type": "object"},
        "optimizer": {"$ref": "#/$defs/optimizer"},
        "training": {"description": "How it is trained.", "type": "object"},
        "evaluation": _evaluation(),
        "hub": _hub(),
        "resolved": {"type": "object", "description": "Written by a run: hashes of the data and versions."},
    }
    definitions: dict[str, Any] = {"model": _model(), "optimizer": _optimizer(), "per_layer": _per_layer()}
    definitions |= {f"mixer_{spec.name}": _params(spec.params, spec.summary) for spec in MIXERS}
    cases = []
    for name, task in TASKS.items():
        own: dict[str, Any] = {}
        for section, reference in PROGRAMS[task.program].classes.items():
            if section != "model":
                own[section] = _program_class(reference, definitions, tuple(task.decided))
        if "objective" in own:
            sections.setdefault("objective", {"description": "What the task asks in detail.", "type": "object"})
        cases.append(_case("task", name, own, name == "masked_lm"))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A recipe of frankenstein_hf",
        "type": "object",
        "properties": sections,
        "additionalProperties": False,
        "allOf": cases,
        "$defs": dict(sorted(definitions.items())),
        "x-parts": _parts(),  # for listings
        "x-decided": DECIDED,  # for messages: who decides a key that cannot be given, and where others are said
        "x-elsewhere": {**HOMES, **ELSEWHERE},
        "x-aliases": dict(sorted(KEY_ALIASES.items())),
    }


def as_text(made: dict[str, Any]) -> str:
    """The schema as the package carries it."""
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def _parts() -> dict[str, Any]:
    """What there is of each kind, and what each is."""
    registries: dict[str, Any] = {"mixers": MIXERS, "optimizers": OPTIMIZERS, "stabilizers": STABILIZERS}
    registries |= {f"{name}s": kind.registry for name, kind in KINDS.items()}
    return {kind: {spec.name: _part(spec) for spec in registry} for kind, registry in registries.items()}


def _part(spec: Any) -> dict[str, Any]:
    words = {name: getattr(spec, name) for name in ("family", "summary", "reference")}
    if isinstance(spec, MixerSpec):
        words |= {"causal": spec.causal, "bidirectional": spec.bidirectional, "decode_state": sorted(spec.cache)}
    return words


def _case(key: str, value: str, properties: Mapping[str, Any], default: bool = False) -> dict[str, Any]:
    """If `key` is `value` (or absent, and that is the default), `properties` hold."""
    asked: dict[str, Any] = {"properties": {key: {"const": value}}}
    return {"if": asked if default else {**asked, "required": [key]}, "then": {"properties": dict(properties)}}


# ---------------------------------------------------------------------- types


def typed(annotation: Any, limits: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The schema of a value of the annotated type, within limits as in `configuration.values`."""
    limits = limits or {}
    if choices := choices_of(limits):
        return {"enum": list(choices)}
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        kinds = [kind for kind in arguments if kind is not type(None) and not (kind is int and float in arguments)]
        if any(isinstance(kind, type) and issubclass(kind, enum.Enum) for kind in kinds):
            kinds = [kind for kind in kinds if kind is not str]  # its values are the words there are
        options = [typed(kind, limits) for kind in kinds]
        options = list({str(option): option for option in options}.values())
        return options[0] if len(options) == 1 else {} if {} in options else {"anyOf": options}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return {"enum": [member.value for member in annotation]}
    if origin in (list, tuple) or annotation in (list, tuple):
        kinds = [kind for kind in arguments if kind is not Ellipsis]
        found: dict[str, Any] = {"type": "array"}
        if kinds:
            found["items"] = typed(kinds[0], limits)
        if origin is tuple and Ellipsis not in arguments:
            found |= {"minItems": len(kinds), "maxItems": len(kinds)}
        return found
    if origin is dict or annotation is dict:
        return {"type": "object"}
    words = {bool: "boolean", int: "integer", float: "number", str: "string"}
    if annotation not in words:
        return {}  # a class of a library: whatever that takes
    found = {"type": words[annotation]}
    if annotation in (int, float):
        names = {"minimum": "minimum", "maximum": "maximum", "above": "exclusiveMinimum", "below": "exclusiveMaximum"}
        found |= {name: limits[own] for own, name in names.items() if math.isfinite(limits.get(own, math.inf))}
    return found


def _with(found: dict[str, Any], doc: str, default: Any = None) -> dict[str, Any]:
    default = getattr(default, "value", default)
    if isinstance(default, tuple):
        default = list(default)
    plain = isinstance(default, (bool, int, str, list, dict)) or (isinstance(default, float) and math.isfinite(default))
    return {**found, **({"default": default} if plain else {}), "description": " ".join(doc.split())}


def _object(properties: Mapping[str, Any], doc: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": dict(properties),
        "additionalProperties": False,
        "description": " ".join(doc.split()),
    }


def _params(cls: type[Params], doc: str) -> dict[str, Any]:
    hints = cls.types()
    return _object(
        {
            field.name: _with(typed(hints[field.name], field.metadata), field.metadata["doc"], field.default)
            for field in dataclasses.fields(cls)
        },
        doc,
    )


# ---------------------------------------------------------------------- sections


@cache
def config_docs() -> dict[str, str]:
    """What the docstrings of the configuration say about each field."""
    found: dict[str, str] = {}
    for cls in (StackConfig, FrankensteinConfig):
        text = inspect.cleandoc(cls.__doc__ or "").partition("Args:\n")[2]
        for names, words in re.findall(r"^    ([a-z_, ]+): (.*(?:\n {5,}.*)*)", text, flags=re.MULTILINE):
            found |= {name.strip(): " ".join(words.split()) for name in names.split(",")}
    return found


def _mixer_params() -> dict[str, Any]:
    by_mixer = {spec.name: {"$ref": f"#/$defs/mixer_{spec.name}"} for spec in sorted(MIXERS, key=lambda s: s.name)}
    return _object(by_mixer, config_docs()["mixer_params"])


def _field(name: str, field: dataclasses.Field) -> dict[str, Any]:
    kinds = {kind.field: kind for kind in KINDS.values()}
    if name == "mixer_params":
        return _mixer_params()
    if name == "layer_pattern":
        mixers = {"enum": MIXERS.names()}
        found: dict[str, Any] = {"anyOf": [{"type": "array", "items": mixers, "minItems": 1}, {"type": "string"}]}
    elif name in kinds:
        kind = kinds[name]
        found = {"enum": sorted({*kind.registry.names(), *kind.fallback, *_forms(name)})}
    else:
        found = typed(field.type, field.metadata)
    return _with(found, config_docs()[name], field.default)


def _forms(name: str) -> Iterable[str]:
    from ..configuration.activations import GATED_FORMS

    return (*GATED_FORMS, "maxout") if name == "hidden_act" else ()


def _model() -> dict[str, Any]:
    properties = {
        name: _field(name, field) for name, field in fields_of(FrankensteinConfig).items() if name not in DECIDED
    }
    properties["per_layer_config"] = {
        "type": "object",
        "additionalProperties": {"$ref": "#/$defs/per_layer"},
        "description": "Layer number -> keys that this layer has otherwise.",
    }
    properties |= {
        "from": {"type": "string", "description": "A checkpoint to continue from; then nothing else may be chosen."},
        "revision": {"type": "string", "description": "Branch, tag or commit of that checkpoint."},
        "trust_remote_code": {"type": "boolean", "description": "Run code that comes with that checkpoint."},
        "attn_implementation": {"type": "string", "description": "How mixers are computed: eager, sdpa, triton …"},
    }
    found = _object(properties, "The model: keys of FrankensteinConfig, or a checkpoint to continue from.")
    return found | {"allOf": _component_cases(FrankensteinConfig)}


def _component_cases(cls: type) -> list[dict[str, Any]]:
    """The parameters of a norm, an activation … follow from which one it is."""
    defaults = {name: field.default for name, field in fields_of(cls).items()}
    return [
        _case(
            kind.field,
            spec.name,
            {kind.params_field: _params(spec.params, spec.summary)},
            spec.name == defaults[kind.field],
        )
        for kind in KINDS.values()
        for spec in sorted(kind.registry, key=lambda spec: spec.name)
    ]


def _per_layer() -> dict[str, Any]:
    fields = fields_of(FrankensteinConfig)
    return _object(
        {name: _field(name, fields[name]) for name in sorted(PER_LAYER_KEYS)}, "What one layer has otherwise."
    )


def _tokenizer() -> dict[str, Any]:
    train = _object(
        {"vocab_size": {"type": "integer", "minimum": 1, "default": 8192, "description": "Most tokens it has."}},
        "Train a byte-level BPE tokenizer on the training data.",
    )
    name = {"type": "string", "description": "A tokenizer to use: a folder or a name on the Hub."}
    return _object({"from": name, "train": train}, "Train a tokenizer, or use one that is there.")


def _optimizer() -> dict[str, Any]:
    names = OPTIMIZERS.names()
    group = {
        name: ({"type": "array", "items": {"type": "number"}} if name == "betas" else {"type": "number"})
        | {"description": f"{name} of this group."}
        for name in GROUP_PARAMS
    }
    groups = {role: _object(group, f"Settings of the {role}.") for role in ROLES}
    stabilizers = {spec.name: _params(spec.params, spec.summary) for spec in STABILIZERS}
    common: dict[str, Any] = {
        "name": {"enum": names, "description": "Which optimizer; docs/optimizers.md lists them."},
        "groups": _object(groups, "Settings of parameters by their role."),
        "stabilizers": _object(stabilizers, "Measures against growing attention logits."),
    }
    params = {name: _params(OPTIMIZERS.get(name).params, "")["properties"] for name in names}
    every = {key for own in params.values() for key in own}
    cases = [
        {
            "if": {"properties": {"name": {"const": name}}, "required": ["name"]},
            "then": {
                "properties": params[name],
                "propertyNames": {"enum": sorted({*common, *params[name]})},
            },
        }
        for name in names
    ]
    return {
        "type": "object",
        "description": "The optimizer: arguments of create_optimizer. Without it, AdamW of torch.",
        "properties": {**{key: {} for key in sorted(every)}, **common},
        "required": ["name"],
        "additionalProperties": False,
        "allOf": cases,
    }


def _evaluation() -> dict[str, Any]:
    return _object(
        {
            "items": {
                "type": "integer",
                "minimum": 2,
                "default": 400,
                "description": "Held-out rows that `frankenstein evaluate` and `compare` score one by one.",
            }
        },
        "How finished models are evaluated.",
    )


def _hub() -> dict[str, Any]:
    return _object(
        {
            "repo_id": {"type": "string", "description": "Name on the Hub, owner/name."},
            "private": {"type": "boolean", "description": "Whether the repository is private."},
            "license": {"type": "string", "description": "Licence of the trained model: apache-2.0, mit …"},
            "language": {"type": "string", "description": "Languages of the model: en or de,fr …"},
        },
        "What the Hub is told about the model; `frankenstein push` pushes it.",
    )


def _program_class(reference: str, definitions: dict[str, Any], decided: Iterable[str]) -> dict[str, Any]:
    """The schema of a dataclass of the programs, defined once, without what the task decides."""
    left_out = {*decided, *ELSEWHERE, *NOT_OF_RECIPES}
    name = reference.partition(":")[2]
    name = "_".join([name, *sorted(decided)])
    if name not in definitions:
        from ..training.tasks import load

        cls = load(reference)
        hints = typing.get_type_hints(cls)
        fields = [field for field in dataclasses.fields(cls) if field.init and field.name not in left_out]
        definitions[name] = _object(
            {
                field.name: _with(
                    typed(hints[field.name]),
                    _words(field),
                    None if field.default is dataclasses.MISSING else field.default,
                )
                for field in fields
                if not field.name.startswith("_")
            },
            (cls.__doc__ or "").strip().splitlines()[0],
        )
    return {"$ref": f"#/$defs/{name}"}


def _words(field: dataclasses.Field) -> str:
    from ..training.help import WORDS

    words = WORDS.get(field.name) or " ".join(str(field.metadata.get("help") or "").split())
    return words or f"{field.name.replace('_', ' ').capitalize()} of transformers' Trainer."
