"""`to_transformers`: a model of this family as one of transformers' own, where every layer can be said there."""

from typing import Any

import torch

from ..configuration.configuration_frankenstein import FrankensteinConfig
from ..configuration.values import shown
from .host import HOSTS, Host
from .importing import joined, our_names, stack_prefix

# Keys of ours that are notes, or settings of training that a host may not have.
_NOTES = "_name_or_path architectures auto_map dtype frankenstein_version transformers_version is_causal layer_pattern "
_NOTES += (
    "mixer_params per_layer_config layer_types use_cache label_smoothing problem_type fixed_cross_entropy model_type"
)


def to_transformers(model: Any, host: str | None = None) -> Any:
    """A model of this family as one of transformers' own: the same function, with the same weights, copied.

    Args:
        model: Of this family, with or without a head.
        host: `model_type` of the family it shall become; by default that which it was imported from in this process,
            else the first that can express it.

    Raises:
        ValueError: No family can express it; the message says which layers and which options stand in the way.
    """
    config = getattr(model, "config", None)
    if not isinstance(config, FrankensteinConfig):
        raise ValueError(f"to_transformers takes a model of this family, got {type(model).__name__}.")
    report = model.__dict__.get("_transfer_report")
    names = [host] if host is not None else list(HOSTS)
    if host is None and report is not None:
        names = [report.host, *(name for name in names if name != report.host)]
    head = type(model).__name__
    if not (able := [name for name in names if head in HOSTS[name].heads.values()]):
        raise ValueError(f"None of {', '.join(names)} has a head like {head}; export another head, or the stack alone.")
    names = able
    refused: dict[str, list[str]] = {}
    for name in names:
        refused[name] = differences(HOSTS[name], model)
        if not refused[name]:
            return _converted(HOSTS[name], model)
    nearest = min(refused, key=lambda name: len(refused[name]))
    raise ValueError(
        f"No family of transformers can express this model ({', '.join(names)} were tried). {nearest!r} cannot say: "
        f"{'; '.join(refused[nearest])}."
    )


def differences(host: Host, model: Any) -> list[str]:
    """What of a model the host's configuration cannot say: written and read back, it would be something else."""
    config = model.config
    able = {"standard", "swa"}
    if strange := {i: name for i, name in enumerate(config.mixer_names) if name not in able}:
        by_mixer = {name: [str(i) for i, other in strange.items() if other == name] for name in strange.values()}
        return [f"{name!r} in layer {', '.join(layers)}" for name, layers in by_mixer.items()]
    try:
        again = FrankensteinConfig(**host.read_config(host.write_config(config)))
    except (ValueError, TypeError) as error:
        return [str(error)]
    found = []
    pairs = zip(config.mixer_names, again.mixer_names, strict=False)
    for i, (name, other) in enumerate(pairs):
        if name != other or config.params_for(i) != again.params_for(i):
            found.append(f"{name!r} with {config.params_for(i)} in layer {i}")
    for name in host.zeros:
        if name in model.state_dict() and bool(model.state_dict()[name].any()):
            found.append(f"{name}, which is not zero")
    notes = set(_NOTES.split())
    before, after = _plain(config), _plain(again)
    for key in sorted((before.keys() | after.keys()) - notes):
        if before.get(key) != after.get(key):
            found.append(f"{key}={shown(before.get(key))} (it would be {shown(after.get(key))})")
    return found


def _plain(config: FrankensteinConfig) -> dict[str, Any]:
    """A configuration with defaults written out that two ways of saying the same share."""
    values = config.to_dict()
    if values["attention_output_bias"] is None:
        values["attention_output_bias"] = values["attention_bias"]
    for key, value in values.items():
        values[key] = value or None if key.endswith("_params") else value
    return values


def _converted(host: Host, model: Any) -> Any:
    head = next(theirs for theirs, ours in host.heads.items() if ours == type(model).__name__)
    with torch.device("meta"):
        result = host.model_class(head)._from_config(host.write_config(model.config), dtype=model.dtype)
    state, bare = model.state_dict(), model.base_model is model
    prefix, heads = stack_prefix(host), model.config.num_attention_heads
    filled = {}
    for name in result.state_dict():
        ours = our_names(host, name, prefix)
        assert ours is not None, name
        parts = [state[part.removeprefix("model.") if bare else part].detach() for part in ours.parts]
        filled[name] = joined(parts, ours, heads)
    return _filled(result, filled, model)


def _filled(result: Any, filled: dict[str, torch.Tensor], model: Any) -> Any:
    result.to_empty(device="cpu")
    result.load_state_dict(filled)
    for name, buffer in result.named_buffers():
        if name not in filled:
            buffer._is_hf_initialized = False
    for parameter in result.parameters():
        parameter._is_hf_initialized = True
    result.initialize_weights()  # buffers that are computed and not saved
    result.tie_weights()
    if hasattr(result, "generation_config") and hasattr(model, "generation_config"):
        result.generation_config = type(result.generation_config).from_dict(model.generation_config.to_dict())
    return result.train(model.training)
