"""Reading what a user, a file or a script writes into a configuration, before anything is made of it."""

from collections.abc import Iterable, Mapping
from typing import Any

from .activations import GATED_FORMS
from .keys import (
    check_key,
    check_mixer_params,
    check_per_layer,
    fields_of,
    generation_defaults,
    known_keys,
    read_dtype,
    read_pattern,
    unknown_key,
)
from .labels import LABEL_KEYS, check_problem, read_labels
from .registries import MIXERS
from .rope import read_rope
from .values import shown

# names of `hidden_act` that choose the form of the feed-forward block too: activation and form
FORMS = {name: (act, "gated") for name, act in GATED_FORMS.items()} | {"maxout": ("identity", "maxout")}
MOST_WEIGHTS = 1e13  # several times the largest model anybody has trained


def read_arguments(cls: type, given: Mapping[str, Any], per_layer_keys: Iterable[str]) -> dict[str, Any]:
    """Check the constructor's arguments one by one, and bring those that transformers would drop where they count.

    Args:
        cls: The configuration class.
        given: The arguments, all of known keys.
        per_layer_keys: What `per_layer_config` may change.

    Returns:
        The arguments with `rope_parameters` complete, labels in both directions and `layer_pattern` as a list; nothing
        of it shares a dict or list with `given`.

    Raises:
        ValueError: A wrong type, value, or two keys that contradict each other.
    """
    values = dict(given)
    if _is_form(values.get("hidden_act")):
        _expand_form(values)
    together = {*LABEL_KEYS, "layer_types", "mixer_params", "model_type", "per_layer_config", "rope_parameters"}
    for key, value in values.items():
        if key not in together:
            check_key(cls, key, value)
    fields = fields_of(cls)
    if "layer_pattern" in values:
        values["layer_pattern"] = read_pattern(values["layer_pattern"])
    if (types := values.get("layer_types")) is not None and _are_mixers(types):
        values["layer_pattern"] = _pattern_of_types(values.pop("layer_types"), values.get("layer_pattern"))
    check_mixer_params("mixer_params", values.get("mixer_params"), values.get("layer_pattern") or ())
    depth = values.get("num_hidden_layers", fields["num_hidden_layers"].default)
    check_per_layer(cls, values.get("per_layer_config"), per_layer_keys, depth)
    _read_rope_arguments(values, values.get("max_position_embeddings", fields["max_position_embeddings"].default))
    _read_label_arguments(values)
    old, new = values.get("torch_dtype"), values.get("dtype")
    if old is not None and new is not None and read_dtype("dtype", old) != read_dtype("dtype", new):
        raise ValueError(f"torch_dtype={old!r} contradicts dtype={new!r}; torch_dtype is its former name.")
    if values.get("output_attentions") and values.get("attn_implementation") is None:
        values["attn_implementation"] = "eager"  # as transformers does when the attribute is set
    return values


def _is_form(value: object) -> bool:
    return isinstance(value, str) and value in FORMS


def _expand_form(values: dict[str, Any]) -> None:
    """Write what a form of the feed-forward block, given as `hidden_act`, stands for."""
    name = values["hidden_act"]
    values["hidden_act"], form = FORMS[name]
    if (given := values.setdefault("feed_forward", form)) != form:
        raise ValueError(
            f"hidden_act={name!r} is a {form} feed-forward block, but feed_forward={shown(given)}; leave that out, or "
            f"choose hidden_act={values['hidden_act']!r}."
        )


def _are_mixers(types: object) -> bool:
    return isinstance(types, (list, tuple)) and bool(types) and all(name in MIXERS for name in types)


def _pattern_of_types(types: Any, pattern: list[str] | None) -> list[str]:
    """The pattern that `layer_types` with the names of mixers give, where it does not contradict `pattern`."""
    if pattern is not None and [pattern[i % len(pattern)] for i in range(len(types))] != list(types):
        raise ValueError(f"layer_types={shown(types)} contradicts layer_pattern={shown(pattern)}; give one.")
    return pattern or list(types)


def check_layer_types(types: object, derived: list[str]) -> None:
    """Raise ValueError for `layer_types` that say something else than what follows from the pattern."""
    if types is None or types == derived:
        return
    names = types if isinstance(types, (list, tuple)) else [types]
    wrong = next((name for name in names if name not in MIXERS), "")
    raise ValueError(
        f"layer_types={shown(types)} would have no effect: which mixer a layer has is said by layer_pattern, whose "
        "names layer_types may repeat. " + _unknown_mixer(wrong)
    )


def _unknown_mixer(name: object) -> str:
    try:
        MIXERS.get(name)  # type: ignore[arg-type]
    except ValueError as error:
        return str(error)
    return ""


def check_family(cls: Any, family: object) -> None:
    """Raise ValueError for a checkpoint or configuration of another model family."""
    if family not in (None, "", cls.model_type):
        raise ValueError(
            f"model_type={shown(family)}: this configuration is of another model family than {cls.model_type!r}. Load "
            f"it with transformers' AutoModel classes, or build a new {cls.__name__} with its sizes."
        )


def _read_rope_arguments(values: dict[str, Any], max_positions: int) -> None:
    scaling = values.pop("rope_scaling", None)
    rope = values.get("rope_parameters")
    if scaling is not None and rope is not None and scaling != rope:
        raise ValueError(f"rope_scaling={shown(scaling)} contradicts rope_parameters={shown(rope)}; give the latter.")
    legacy = {key: values.pop(key, None) for key in ("rope_theta", "partial_rotary_factor")}
    values["rope_parameters"] = read_rope(scaling if rope is None else rope, max_positions, **legacy)


def _read_label_arguments(values: dict[str, Any]) -> None:
    names, ids = read_labels(values)
    if names is not None:
        values.pop("num_labels", None)
        values["id2label"], values["label2id"] = names, ids
    elif values.get("num_labels") is None:
        values.pop("num_labels", None)
    number = len(names) if names is not None else values.get("num_labels")
    check_problem(values.get("problem_type"), number)


def read_assignment(config: Any, key: str, value: Any, per_layer_keys: Iterable[str]) -> dict[str, Any]:
    """Check `config.key = value` on a finished configuration.

    Returns:
        What is to be set instead: checked values by key.

    Raises:
        ValueError: A key that could be saved but not loaded, or a value that the constructor would refuse.
    """
    cls = type(config)
    if key not in known_keys(cls):
        raise ValueError(
            unknown_key(cls, key, value) + " What is not a key could be saved but not loaded again; notes of your own "
            "have their place in the dict config.task_specific_params."
        )
    if key in ("id2label", "label2id"):
        names, ids = read_labels({key: value})
        return {"id2label": names, "label2id": ids}
    if key == "layer_types":
        if not _are_mixers(value):
            check_layer_types(value, config.layer_types)
        return {"layer_pattern": list(value)} if _are_mixers(value) else {}
    if key in ("rope_parameters", "rope_scaling"):
        return {"rope_parameters": read_rope(value, config.max_position_embeddings)}
    if key in ("rope_theta", "partial_rotary_factor"):
        check_key(cls, key, value)
        return {"rope_parameters": read_rope({**config.rope_parameters, key: value}, config.max_position_embeddings)}
    if key == "per_layer_config":
        check_per_layer(cls, value, per_layer_keys, config.num_hidden_layers)
        return {key: value}
    if key == "layer_pattern":
        return {key: read_pattern(value) or config.layer_pattern}
    if key == "model_type":
        if value != cls.model_type:
            raise ValueError(f"model_type={shown(value)} cannot be set; it is {cls.model_type!r} for this class.")
        return {}
    if key == "hidden_act" and _is_form(value):
        return dict(zip(("hidden_act", "feed_forward"), FORMS[value]))
    check_key(cls, key, value)
    if key in generation_defaults():
        return {}
    if key.endswith("_token_id"):
        _check_token_id(key, value, config.vocab_size)
    return {key: value}


# ---------------------------------------------------------------------- several keys together


def check_sizes(config: Any, intermediate_sizes: Iterable[int]) -> None:
    """Raise ValueError for a model no machine holds."""
    width, depth = config.hidden_size, config.num_hidden_layers
    heads = config.num_attention_heads * config.head_dim
    mlp = max(intermediate_sizes)
    weights = getattr(config, "vocab_size", 0) * width + depth * width * (4 * heads + 3 * mlp)
    if weights > MOST_WEIGHTS:
        raise ValueError(
            f"No machine holds this model: vocab_size={config.vocab_size}, hidden_size={width}, num_hidden_layers="
            f"{depth}, num_attention_heads={config.num_attention_heads} of head_dim={config.head_dim} and "
            f"intermediate_size={mlp} come to about {weights:.0e} weights; at most {MOST_WEIGHTS:.0e} are allowed."
        )


def check_special_tokens(config: Any, vocab_size: int) -> None:
    """Raise ValueError for special tokens outside a vocabulary of this size."""
    for key in fields_of(type(config)):
        if key.endswith("_token_id"):
            _check_token_id(key, getattr(config, key), vocab_size)


def _check_token_id(key: str, value: Any, vocab_size: int) -> None:
    for number in value if isinstance(value, list) else [value]:
        if number is not None and not 0 <= number < vocab_size:
            raise ValueError(
                f"{key}={value} must be below vocab_size={vocab_size}. If it comes from a tokenizer, that has more "
                "tokens than the model: call model.resize_token_embeddings(len(tokenizer)) or give "
                "vocab_size=len(tokenizer)."
            )
