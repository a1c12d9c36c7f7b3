"""What `rope_parameters` may say: the keys of every rotary type, each with its range."""

from collections.abc import Mapping
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .values import checked, did_you_mean, shown

DEFAULT_THETA = 10_000.0

# key -> type and range; None is taken as absent
_NUMBER, _LIST = float, list[float]
KEYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "rope_theta": (_NUMBER, {"above": 1, "maximum": 1e12}),
    "partial_rotary_factor": (_NUMBER, {"above": 0, "maximum": 1}),
    "factor": (_NUMBER, {"minimum": 1, "maximum": 1e6}),
    "original_max_position_embeddings": (int, {"minimum": 2}),
    "attention_factor": (_NUMBER, {"above": 0, "maximum": 1e3}),
    "beta_fast": (_NUMBER, {"above": 0, "maximum": 1e6}),
    "beta_slow": (_NUMBER, {"above": 0, "maximum": 1e6}),
    "mscale": (_NUMBER, {"minimum": 0, "maximum": 1e3}),
    "mscale_all_dim": (_NUMBER, {"minimum": 0, "maximum": 1e3}),
    "truncate": (bool, {}),
    "low_freq_factor": (_NUMBER, {"above": 0, "maximum": 1e6}),
    "high_freq_factor": (_NUMBER, {"above": 0, "maximum": 1e6}),
    "short_factor": (_LIST, {"above": 0, "maximum": 1e6}),
    "long_factor": (_LIST, {"above": 0, "maximum": 1e6}),
}
# rope_type -> keys it needs, keys it may have besides rope_theta and partial_rotary_factor
TYPES: dict[str, tuple[str, str]] = {
    "default": ("", ""),
    "linear": ("factor", ""),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings attention_factor beta_fast beta_slow mscale mscale_all_dim "
                       "truncate"),
    "longrope": ("short_factor long_factor", "factor original_max_position_embeddings attention_factor"),
    "llama3": ("factor low_freq_factor high_freq_factor", "original_max_position_embeddings"),
    "proportional": ("", "factor"),
}  # fmt: skip


def read_rope(value: object, max_positions: int, **legacy: Any) -> dict[str, Any]:
    """A checked copy of `rope_parameters` with its defaults filled in.

    Args:
        value: What the user wrote, or None.
        max_positions: The model's `max_position_embeddings`.
        legacy: `rope_theta` and `partial_rotary_factor` where they were given beside it, else None.

    Raises:
        ValueError: A wrong type, key or value, or keys that the rotary type does not use.
    """
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(
            f"rope_parameters={shown(value)}: rope_parameters must be a dict. For example "
            "rope_parameters={'rope_type': 'default', 'rope_theta': 10000.0}."
        )
    rope = {key: given for key, given in (value or {}).items() if given is not None}
    kind = rope.setdefault("rope_type", rope.pop("type", None) or "default")
    known = sorted(set(TYPES) & {"default", *ROPE_INIT_FUNCTIONS})
    if not isinstance(kind, str) or kind not in known:
        raise ValueError(f"Unknown rope_type {shown(kind)} in rope_parameters" + did_you_mean(kind, known))
    if "type" in rope and rope.pop("type") != kind:
        raise ValueError(f"rope_parameters say rope_type={kind!r} and type={value['type']!r}; 'type' is its old name.")  # type: ignore[index]
    for key, given in legacy.items():
        if given is not None and rope.setdefault(key, given) != given:
            raise ValueError(
                f"{key}={shown(given)} contradicts rope_parameters[{key!r}]={shown(rope[key])}; give it there only."
            )
    rope.setdefault("rope_theta", DEFAULT_THETA)
    needed, optional = (set(keys.split()) for keys in TYPES[kind])
    allowed = {"rope_type", "rope_theta", "partial_rotary_factor"} | needed | optional
    for key, given in rope.items():
        if key not in allowed:
            used = "is not a key of rope_parameters" if key not in KEYS else f"has no effect with rope_type={kind!r}"
            raise ValueError(f"rope_parameters[{key!r}]={shown(given)}: {key!r} {used}" + did_you_mean(key, allowed))
        if key != "rope_type":
            _check(f"rope_parameters[{key!r}]", key, given)
    if missing := sorted(needed - set(rope)):
        raise ValueError(f"rope_parameters with rope_type={kind!r} need {', '.join(missing)}; got {shown(value)}.")
    if kind == "dynamic" and rope.get("original_max_position_embeddings", max_positions) != max_positions:
        raise ValueError(
            f"rope_parameters['original_max_position_embeddings']={rope['original_max_position_embeddings']}: "
            f"rope_type='dynamic' stretches from max_position_embeddings={max_positions}; give no other length."
        )
    if kind != "dynamic" and "original_max_position_embeddings" in optional:
        rope.setdefault("original_max_position_embeddings", max_positions)
    _check_together(rope)
    return rope


def _check(label: str, key: str, value: object) -> None:
    annotation, limits = KEYS[key]
    checked(label, value, annotation, limits)


def _check_together(rope: dict[str, Any]) -> None:
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        fallback = {"beta_slow": 1, "beta_fast": 32}
        small, large = rope.get(low, fallback.get(low)), rope.get(high, fallback.get(high))
        if (low in rope or high in rope) and not small < large:  # type: ignore[operator]
            raise ValueError(f"rope_parameters: {low}={small} must be below {high}={large}.")


def check_rope_widths(rope: Mapping[str, Any], widths: Mapping[int, str]) -> None:
    """Raise ValueError where the rotary type cannot serve heads of these widths; each comes with whose it is."""
    kind, part = rope.get("rope_type", "default"), rope.get("partial_rotary_factor", 1.0)
    for width, owner in sorted(widths.items()):
        rotated = int(width // 2 * 2 * part)
        if kind == "dynamic" and rotated == 2:
            raise ValueError(
                f"rope_type='dynamic' cannot rotate 2 channels (heads of width {width}, {owner}; by default head_dim "
                f"is hidden_size over num_attention_heads; partial_rotary_factor={part}); "
                "use wider heads or rope_type='linear'."
            )
        for key in ("short_factor", "long_factor"):
            if key in rope and len(rope[key]) != -(-rotated // 2):
                raise ValueError(
                    f"rope_parameters[{key!r}]={shown(rope[key])} must have {-(-rotated // 2)} numbers, one for each "
                    f"pair of the {rotated} rotated channels of a head (width {width}, {owner}; head_dim is by default "
                    f"hidden_size over num_attention_heads; partial_rotary_factor={part}); it has {len(rope[key])}."
                )
