"""What each key of a configuration may be.

Keys of our own carry their type and range in their field (`setting`); this module adds the keys of transformers' base
class, the few that need more than a range, and the words for keys that exist elsewhere and mean nothing here.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any

from transformers import GenerationConfig
from transformers.configuration_utils import PreTrainedConfig

from .component import backend_names
from .labels import NUM_LABELS, read_labels
from .registries import KINDS, MIXERS, Kind
from .values import checked, did_you_mean, shown

DTYPES = ("float32", "bfloat16", "float16", "float64")

# Keys of transformers' base class, or that it writes into a file: type and range.
_TEXT, _PATH = str | None, str | os.PathLike | None
_PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")
TRANSFORMERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "_name_or_path": (_PATH, {}),
    "architectures": (list[str] | None, {}),
    "auto_map": (dict | None, {}),
    "base_model_name_or_path": (_PATH, {}),
    "custom_pipelines": (dict | None, {}),
    "name_or_path": (_PATH, {}),
    "num_labels": NUM_LABELS,
    "output_attentions": (bool | None, {}),
    "output_hidden_states": (bool | None, {}),
    "problem_type": (_TEXT, {"choices": _PROBLEMS}),
    "return_dict": (bool | None, {}),
    "task_specific_params": (dict | None, {}),
    "tokenizer_class": (_TEXT, {}),
    "transformers_version": (_TEXT, {}),
    "transformers_weights": (_TEXT, {}),
    "partial_rotary_factor": (float | None, {"above": 0, "maximum": 1}),
    "rope_theta": (float | None, {"above": 1, "maximum": 1e12}),
}
# Keys read by a function of their own, here or in the class.
_READ = "attn_implementation dtype id2label label2id layer_types model_type per_layer_config quantization_config "
_READ += "rope_scaling torch_dtype"
# Keys that say something only by their default: what else is allowed, and what to do instead.
WITHOUT_EFFECT: dict[str, tuple[tuple[Any, ...], str]] = {
    "chunk_size_feed_forward": ((0, None), "the feed-forward block is not computed in chunks"),
    "experts_implementation": ((None, "eager"), "there are no experts"),
    "is_decoder": ((None,), "set is_causal=True, or take FrankensteinForCausalLM"),
    "is_encoder_decoder": ((False, None), "these models have no second stack"),
    "use_bidirectional_attention": ((None,), "set is_causal=False, or take FrankensteinForMaskedLM"),
}
# Private names that transformers passes through a configuration.
PRIVATE = frozenset({"_attn_implementation_internal", "_experts_implementation_internal", "_commit_hash"})
# Set by transformers on a finished configuration, never read from a file.
_RUNTIME = "base_model_ep_plan base_model_fsdp_plan base_model_pp_plan base_model_tp_plan distributed_config "
_RUNTIME += "fusion_config ignore_keys_at_rope_validation skip"
RUNTIME = frozenset(_RUNTIME.split())
# What other families call our keys.
KEY_ALIASES = {
    "mixer": "layer_pattern", "mixers": "layer_pattern", "pattern": "layer_pattern", "block_types": "layer_pattern",
    "layers_block_type": "layer_pattern", "attention_type": "layer_pattern", "attn_layers": "layer_pattern",
    "num_layers": "num_hidden_layers", "n_layer": "num_hidden_layers", "n_layers": "num_hidden_layers",
    "depth": "num_hidden_layers", "d_model": "hidden_size", "n_embd": "hidden_size", "dim": "hidden_size",
    "embed_dim": "hidden_size", "width": "hidden_size", "n_head": "num_attention_heads",
    "n_heads": "num_attention_heads", "num_heads": "num_attention_heads", "n_kv_heads": "num_key_value_heads",
    "d_ff": "intermediate_size", "ffn_dim": "intermediate_size", "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings", "max_seq_len": "max_position_embeddings",
    "activation_function": "hidden_act", "dropout": "hidden_dropout", "hidden_dropout_prob": "hidden_dropout",
    "attention_probs_dropout_prob": "attention_dropout", "layer_norm_eps": "rms_norm_eps", "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings", "sliding_window": "mixer_params", "window_size": "mixer_params",
}  # fmt: skip


@cache
def generation_defaults() -> dict[str, Any]:
    """Settings of `generate` that transformers once kept in configurations, with their defaults."""
    defaults = GenerationConfig._get_default_generation_params()
    return {key: value for key, value in defaults.items() if key != "use_cache"}


def fields_of(cls: type) -> dict[str, dataclasses.Field]:
    """The fields a configuration class declares beyond transformers' base class, by name."""
    base = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    return {field.name: field for field in dataclasses.fields(cls) if field.name not in base}


def known_keys(cls: type) -> set[str]:
    """Every key the constructor of a configuration class accepts."""
    names = {*fields_of(cls), *TRANSFORMERS, *_READ.split(), *WITHOUT_EFFECT, *PRIVATE, *generation_defaults()}
    return names | set(cls.attribute_map)  # type: ignore[attr-defined]


def unknown_key(cls: type, key: str, value: object) -> str:
    """The message about a key nobody knows."""
    message = f"Unknown config key {key!r}" + did_you_mean(key, fields_of(cls), KEY_ALIASES)
    if KEY_ALIASES.get(key) == "mixer_params":
        message += " A window belongs to a mixer: mixer_params={'swa': {'window_size': 128}}."
    elif KEY_ALIASES.get(key) == "layer_pattern":
        message += f" Write layer_pattern={value!r}." if value in MIXERS else " For example layer_pattern=['gla']."
    return message


def check_key(cls: type, key: str, value: object) -> None:
    """Raise ValueError unless `value` alone, without regard to other keys, is one that `key` can have."""
    field = fields_of(cls).get(key)
    if key in READERS:
        READERS[key](key, value)
    elif key in TRANSFORMERS:
        checked(key, value, *TRANSFORMERS[key])
        if isinstance(value, (dict, list)):
            _writable(key, value)
    elif field is not None:
        checked(key, value, field.type, field.metadata, field.default)
    elif key in WITHOUT_EFFECT:
        allowed, remedy = WITHOUT_EFFECT[key]
        if not any(type(value) is type(other) and value == other for other in allowed):
            raise ValueError(f"{key}={shown(value)} would have no effect: {remedy}.")
    elif key in generation_defaults():
        default = generation_defaults()[key]
        if value is not None and not (type(value) is type(default) and value == default):
            raise ValueError(
                f"{key}={shown(value)} would have no effect here: it is a setting of generate(). Pass it there, or set "
                f"model.generation_config.{key}."
            )


# ---------------------------------------------------------------------- keys with more than a range


def read_pattern(value: object) -> list[str] | None:
    """`layer_pattern` as a list of names: of one, of several between commas, or of a JSON list, as programs read it.

    Raises:
        ValueError: Anything else, or a name no mixer has.
    """
    if value is None:
        return None
    names: Any = value
    if isinstance(value, str):
        if value.lstrip().startswith("["):
            try:
                names = json.loads(value)
            except ValueError:
                names = None
        else:
            names = [name.strip() for name in value.split(",") if name.strip()]
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"layer_pattern={shown(value)}: layer_pattern must be a mixer's name or a list of names. For example "
            "layer_pattern=['gla', 'standard']."
        )
    if not names:
        raise ValueError(f"layer_pattern is empty ({shown(value)}); give a mixer name or a list of them.")
    for name in [name for name in names if name not in MIXERS]:
        _named(f"layer_pattern={shown(value)}", MIXERS.get, name)
    return list(names)


def _named(key: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function returns; its ValueError says in addition which key was read."""
    try:
        return function(*arguments)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def check_mixer_params(key: str, value: object, pattern: Iterable[str] = ()) -> None:
    """Raise ValueError unless `value` is a dict of parameters by mixer name; see `Params.from_dict`."""
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{key}={shown(value)}: {key} must be a dict of parameters by mixer. For example "
            f"{key}={{'swa': {{'window_size': 128}}}}."
        )
    for name, params in value.items():
        owners = [spec.name for spec in MIXERS if name in spec.params.types()]
        if name not in MIXERS and owners:
            owner = next((mixer for mixer in pattern if mixer in owners), owners[0])
            raise ValueError(
                f"{key}={shown(value)}: {name!r} is a parameter of a mixer, and {key} are sorted by mixer. Write "
                f"{key}={{{owner!r}: {{{name!r}: {params!r}}}}}."
            )
        spec = _named(f"{key}={shown(value)}", MIXERS.get, name)
        _named(f"{key}={shown(value)}", spec.params.from_dict, params, name)


def check_per_layer(cls: type, value: object, allowed: Iterable[str], num_layers: int) -> None:
    """Raise ValueError unless `per_layer_config` is a dict of layer number -> dict of keys a layer may have alone."""
    if value is None:
        return
    shape = "per_layer_config={0: {'mixer_params': {'swa': {'window_size': 64}}}}"
    if not isinstance(value, Mapping):
        raise ValueError(f"per_layer_config={shown(value)}: it must be a dict by layer. For example {shape}.")
    seen = set()
    for layer, overrides in value.items():
        number = int(layer) if isinstance(layer, str) and layer.isascii() and layer.isdigit() else layer
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < num_layers or number in seen:
            raise ValueError(
                f"per_layer_config={shown(value)}: {layer!r} is no layer, or one that is there already; layers are "
                f"whole numbers from 0 to {num_layers - 1}, each once."
            )
        seen.add(number)
        if not isinstance(overrides, Mapping):
            raise ValueError(
                f"per_layer_config={shown(value)}: what belongs to layer {layer!r} must be a dict. Example: {shape}."
            )
        for key, own in overrides.items():
            if key not in set(allowed):
                raise ValueError(
                    f"per_layer_config={shown(value)}: per_layer_config cannot change {key} of layer {layer}; it can "
                    f"change {', '.join(sorted(allowed))}."
                )
            if own is None:
                raise ValueError(f"per_layer_config[{layer!r}] has {key}=None; leave it out or give a value.")
            _named(f"per_layer_config[{layer!r}]", check_key, cls, key, own)


def _writable(key: str, value: object) -> None:
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key}={shown(value)} cannot be written to a JSON file: {error}.") from None


def read_dtype(key: str, value: Any) -> str | None:
    """The name of a dtype given by name or as torch's object; None for None."""
    name = str(value).removeprefix("torch.") if isinstance(value, str) or type(value).__name__ == "dtype" else value
    if name is not None and (not isinstance(name, str) or name not in DTYPES):
        raise ValueError(f"{key}={shown(value)}: {key} must be one of {', '.join(DTYPES)}" + did_you_mean(name, DTYPES))
    return name


def _check_quantization(key: str, value: Any) -> None:
    if isinstance(value, dict):
        _writable(key, value)
    elif value is not None and not callable(getattr(value, "to_dict", None)):
        raise ValueError(f"{key}={shown(value)}: {key} must be a dict or one of transformers' quantization configs.")


def _check_backend(key: str, value: Any) -> None:
    if isinstance(value, dict) and set(value) == {""} and isinstance(value[""], str):
        value = value[""]
    if value is None:
        return
    mixer = str(value).removeprefix("frankenstein_")
    parts = str(value).removeprefix("paged|")
    if isinstance(value, str) and (value.count("/") == 1 or mixer in MIXERS or parts.startswith("flash_attention_")):
        return  # a kernel of the Hub, a mixer, a kernel that is another package
    if isinstance(value, str) and parts not in backend_names():
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # slow to import, so only where it decides

        if parts in ALL_ATTENTION_FUNCTIONS.valid_keys():
            return
    if not isinstance(value, str) or parts not in backend_names():
        allowed = {"eager", "sdpa", "flex_attention", "triton", *MIXERS.names()}
        raise ValueError(f"Unknown {key} {shown(value)}" + did_you_mean(value, allowed))


def _check_component(kind: Kind, key: str, value: Any) -> None:
    if not isinstance(value, str) or (value not in kind.registry and value not in kind.fallback):
        aliases = {alias: spec.name for spec in kind.registry for alias in spec.aliases}
        raise ValueError(
            f"Unknown {key} {shown(value)}" + did_you_mean(value, {*kind.registry.names(), *kind.fallback}, aliases)
        )


READERS: dict[str, Callable[[str, Any], Any]] = {
    "attn_implementation": _check_backend,
    "dtype": read_dtype,
    **{kind.field: partial(_check_component, kind) for kind in KINDS.values()},
    "id2label": lambda key, value: read_labels({key: value}),
    "label2id": lambda key, value: read_labels({key: value}),
    "layer_pattern": lambda key, value: read_pattern(value),
    "mixer_params": check_mixer_params,
    "quantization_config": _check_quantization,
    "torch_dtype": read_dtype,
}
