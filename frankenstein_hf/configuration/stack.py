"""`StackConfig`: what every model of the family is configured by, whatever goes in and comes out."""

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters
from transformers.utils import logging

from .component import Chosen, ComponentSpec, MixerSpec, Params, Round
from .keys import RUNTIME, fields_of, known_keys, read_pattern, unknown_key
from .labels import LABEL_KEYS
from .norms import NORM_PLACEMENTS
from .registries import KINDS, MIXERS
from .rope import check_rope_widths
from .validation import (
    check_family,
    check_layer_types,
    check_sizes,
    read_arguments,
    read_assignment,
)
from .values import setting, shown

logger = logging.get_logger(__name__)

FRANKENSTEIN_VERSION = "0.2.0"
MOST_LAYERS = 10_000  # at work, rounds of looped depth counted
DEFAULT_PATTERN = ("gated_deltanet", "swa", "gated_deltanet", "standard")

# Cache layers are looked up by these names; the version keeps bundles of different ages apart in one process.
STATE_LAYER_TYPE = "frankenstein_state_2"
KV_LAYER_TYPE = "frankenstein_kv_1"

# What `per_layer_config` may change for one layer.
PER_LAYER_KEYS = frozenset({"mixer_params", "intermediate_size", "hidden_act", "mlp_bias"}).union(
    *((kind.field, kind.params_field) for kind in KINDS.values() if kind.per_layer)
)


def is_newer(version: object) -> bool:
    """Whether `version`, as "1.2.3", is above this code's."""

    return isinstance(version, str) and _numbers(version) > _numbers(FRANKENSTEIN_VERSION)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


def newer_note(version: object) -> str:
    """The end of a message about a config of that `version`: what to do if it is newer than this code, else ""."""
    if not is_newer(version):
        return ""
    return f" The config was written by frankenstein_hf {version}, this is {FRANKENSTEIN_VERSION}: upgrade to use it."


@contextmanager
def _only_value_errors(cls: type, version: object) -> Iterator[None]:
    """Turn the errors of strict dataclasses (which are no ValueErrors) into ValueErrors with the same message.

    Errors of a config from a newer `version` say so.
    """
    try:
        yield
    except (ValueError, StrictDataclassError) as error:
        note = newer_note(version)
        if isinstance(error, ValueError) and not note:
            raise
        message = str(error) if isinstance(error, ValueError) else f"{cls.__name__}: {error}"
        raise ValueError(message + note) from error


def checked_keys(cls: type) -> type:
    """Let the constructor and every assignment of the configuration class `cls` read what they are given first."""
    build: Any = cls.__init__  # type: ignore[misc]
    assign: Any = cls.__setattr__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        with _only_value_errors(cls, kwargs.get("frankenstein_version")):
            if args:
                raise ValueError(f"{cls.__name__} takes keys and values, such as hidden_size=256; got {args!r}.")
            build(self, **self._read(kwargs))

    def __setattr__(self: Any, name: str, value: Any) -> None:
        with _only_value_errors(cls, self.__dict__.get("frankenstein_version")):
            for key, read in self._read_assignment(name, value).items():
                assign(self, key, read)

    __init__.__wrapped__, __setattr__.__wrapped__ = build, assign  # type: ignore[attr-defined]
    cls.__init__, cls.__setattr__ = __init__, __setattr__  # type: ignore[misc, method-assign, assignment]
    return cls


@strict
class StackConfig(PreTrainedConfig):
    """Base of the family's configurations: width, depth, the mixer of every layer and all parts around it.

    Every key is checked when the object is built: an unknown key, an unknown mixer or parameter, a wrong type or an
    impossible size raises `ValueError` naming the key, the value, what is allowed and the nearest valid name.

    Args:
        hidden_size: Model width D.
        num_hidden_layers: Number of layers.
        num_attention_heads: Heads H of the mixers.
        num_key_value_heads: Key/value heads of `standard`-like mixers; a divisor of `num_attention_heads`, which is
            the default.
        head_dim: Width of a head; `hidden_size / num_attention_heads` by default.
        intermediate_size: Width of the feed-forward block; by default 4·D (plain) or 8/3·D rounded up to a multiple
            of 32 (gated).
        hidden_act: Activation of the feed-forward block, a name of ours or from transformers' `ACT2FN`. "swiglu",
            "geglu", "reglu" and "maxout" choose the block's form too.
        activation_dropout: Dropout inside the feed-forward block, in [0, 1).
        feed_forward: "gated" or "plain".
        norm: Which norm every layer and the end of the stack have, such as "rms_norm" or "layer_norm".
        norm_placement: Where a layer has its norms: before mixer and feed-forward block ("pre"), behind them and
            before the sum ("post"), or both ("sandwich").
        qk_norm: Norm of queries and keys, before rotation, in the layers whose mixer takes one: "none", "rms_norm",
            "layer_norm" or "l2_norm".
        attention_scale: What dot products of queries and keys are multiplied by before the softmax, in the layers whose
            mixer takes a `qk_norm`; None: 1/√head_dim.
        residual: How layers are joined in depth: "standard" (x + F(norm(x))) or "none" (F(norm(x))).
        activation_params, feed_forward_params, norm_params, qk_norm_params, residual_params: Parameters of what the
            field names.
        num_loops: How often the middle layers are run through, one after the other as a stack, with the same weights.
        loop_begin_layers, loop_end_layers: Layers before and behind them, which are run through once.
        max_position_embeddings: Longest sequence the model is meant for.
        rope_parameters: Rotary parameters as in transformers: `rope_type`, `rope_theta` and what the type needs.
        attention_dropout, hidden_dropout: Dropout of attention weights and of each block's output, in [0, 1).
        attention_bias, mlp_bias: Whether projections have biases.
        attention_output_bias: Whether a mixer's last projection has one; None: as `attention_bias` says.
        initializer_range: Standard deviation of the initial weights.
        rms_norm_eps: Epsilon of every norm.
        is_causal: What the checkpoint was trained as; None lets the class decide (CausalLM: True, others: False).
        layer_pattern: A mixer name or a list of them, repeated over the layers; its length must divide
            `num_hidden_layers`. Default: `["gated_deltanet", "swa", "gated_deltanet", "standard"]`, repeated and cut.
        mixer_params: Parameters by mixer name, e.g. `{"swa": {"window_size": 128}}`. `per_layer_config` (native to
            transformers) replaces the dict for one layer.
        frankenstein_version: Version of this library that wrote the configuration.
    """

    hidden_size: int = setting(256, minimum=1, maximum=2**17)
    num_hidden_layers: int = setting(4, minimum=1, maximum=MOST_LAYERS)
    num_attention_heads: int = setting(4, minimum=1, maximum=2**16)
    num_key_value_heads: int | None = setting(None, minimum=1, maximum=2**16)
    head_dim: int | None = setting(None, minimum=1, maximum=2**16)
    intermediate_size: int | None = setting(None, minimum=1, maximum=2**20)
    hidden_act: str = setting("silu")
    activation_params: dict[str, Any] | None = setting(None)
    activation_dropout: float | int = setting(0.0, minimum=0, below=1)
    feed_forward: str = setting("gated")
    feed_forward_params: dict[str, Any] | None = setting(None)
    norm: str = setting("rms_norm")
    norm_params: dict[str, Any] | None = setting(None)
    norm_placement: str = setting("pre", choices=tuple(NORM_PLACEMENTS))
    qk_norm: str = setting("none")
    qk_norm_params: dict[str, Any] | None = setting(None)
    attention_scale: float | int | None = setting(None, above=0, maximum=1e6)
    residual: str = setting("standard")
    residual_params: dict[str, Any] | None = setting(None)
    num_loops: int = setting(1, minimum=1, maximum=1000)
    loop_begin_layers: int = setting(0, minimum=0)
    loop_end_layers: int = setting(0, minimum=0)
    max_position_embeddings: int = setting(2048, minimum=1)
    rope_parameters: RopeParameters | dict | None = None
    attention_dropout: float | int = setting(0.0, minimum=0, below=1)
    hidden_dropout: float | int = setting(0.0, minimum=0, below=1)
    attention_bias: bool = setting(False)
    attention_output_bias: bool | None = setting(None)
    mlp_bias: bool = setting(False)
    initializer_range: float | int = setting(0.02, above=0, maximum=100)
    rms_norm_eps: float | int = setting(1e-6, above=0, maximum=1)
    is_causal: bool | None = setting(None)
    layer_pattern: list[str] | str | None = setting(None)
    mixer_params: dict[str, dict[str, Any]] | None = setting(None)
    frankenstein_version: str = setting(FRANKENSTEIN_VERSION)

    # ------------------------------------------------------------------ reading

    @classmethod
    def _read(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The constructor's arguments, checked one by one; see `read_arguments`."""
        check_family(cls, given.get("model_type"))
        unknown = {key: value for key, value in given.items() if key not in known_keys(cls)}
        if unknown:
            message = " ".join(unknown_key(cls, key, value) for key, value in unknown.items())
            note = newer_note(given.get("frankenstein_version"))
            if not note:
                raise ValueError(message)
            logger.warning_once(f"{message}{note} Until then the keys are kept but have no effect.")
        known = {key: value for key, value in given.items() if key not in unknown}
        return read_arguments(cls, known, PER_LAYER_KEYS) | unknown

    def _read_assignment(self, name: str, value: Any) -> dict[str, Any]:
        """What the assignment `config.name = value` sets, checked; for what it can refer to see `read_assignment`."""
        if not self.__dict__.get("_post_init_done") or name.startswith("_") or name in RUNTIME:
            return {name: value}
        if name not in known_keys(type(self)) and is_newer(self.frankenstein_version):
            return {name: value}
        return read_assignment(self, name, value, PER_LAYER_KEYS)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """transformers' `from_dict`, where labels given as keywords replace all that the dict says about labels.

        `dtype="auto"` as a keyword means the dtype of the weights, which is no property of a configuration.

        Raises:
            ValueError: The dict is of another model family, or has keys or values this one refuses.
        """
        config_dict = dict(config_dict)
        if new := {key: kwargs.pop(key) for key in LABEL_KEYS if kwargs.get(key) is not None}:
            config_dict = {key: value for key, value in config_dict.items() if key not in LABEL_KEYS} | new
        if kwargs.get("dtype") == "auto":
            del kwargs["dtype"]
        return super().from_dict(config_dict, **kwargs)

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size={self.hidden_size} is not divisible by num_attention_heads="
                    f"{self.num_attention_heads}; choose a divisor or give head_dim."
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.intermediate_size is None:
            gated = self.feed_forward == "gated"
            self.intermediate_size = -(-8 * self.hidden_size // 96) * 32 if gated else 4 * self.hidden_size
        if self.layer_pattern is None:
            repeats = -(-self.num_hidden_layers // len(DEFAULT_PATTERN))
            self.layer_pattern = list(DEFAULT_PATTERN * repeats)[: self.num_hidden_layers]
        self.mixer_params = copy.deepcopy(self.mixer_params or {})
        if _numbers(self.frankenstein_version) < _numbers(FRANKENSTEIN_VERSION):
            self._upgrade(kwargs)
        self._check_pattern()
        self._check_loops()
        check_layer_types(kwargs.pop("layer_types", None), self.layer_types)
        super().__post_init__(**kwargs)
        self._check_together()

    def _upgrade(self, kwargs: dict[str, Any]) -> None:
        """Make a configuration of an earlier version say what it meant, here and in `kwargs["per_layer_config"]`."""

        def upgraded(params: Mapping[str, Any]) -> dict[str, Any]:
            return {
                name: MIXERS.get(name).params.upgraded(values, self.frankenstein_version)
                if name in MIXERS and isinstance(values, Mapping)
                else values
                for name, values in params.items()
            }

        self.mixer_params = upgraded(self.mixer_params or {})
        layers = kwargs.get("per_layer_config")
        if isinstance(layers, Mapping):
            kwargs["per_layer_config"] = {
                index: {**layer, "mixer_params": upgraded(layer["mixer_params"])} if "mixer_params" in layer else layer
                for index, layer in layers.items()
            }

    # ------------------------------------------------------------------ checking

    def check(self) -> None:
        """Check everything again, after attributes or what they hold were changed.

        Raises:
            ValueError: As the constructor does.
        """
        get = self._getattr_without_heterogeneous_validation
        written = {key: get(key) for key in fields_of(type(self))}
        if self.is_heterogeneous:
            written["per_layer_config"] = self._heterogeneity_spec.per_layer_overrides
        with _only_value_errors(type(self), self.frankenstein_version):
            read_arguments(type(self), written, PER_LAYER_KEYS)
            self._check_pattern()
            self._check_together()

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """transformers' `save_pretrained`, of what can be loaded again only; see `check`."""
        self.check()
        super().save_pretrained(save_directory, *args, **kwargs)

    def _remove_keys_not_serialized(self, d: dict[str, Any]) -> None:
        # private attributes, whoever sets them, are notes of this process
        super()._remove_keys_not_serialized(d)
        for key in [
            key for key in d if str(key).startswith("_") and key not in ("_name_or_path", "_heterogeneity_spec")
        ]:
            del d[key]

    def _check_together(self) -> None:
        """What several keys have to agree on."""
        assert self.num_key_value_heads and self.head_dim and self.rope_parameters  # filled in by now
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} must divide "
                f"num_attention_heads={self.num_attention_heads}."
            )
        self._check_loops()
        self._components()
        self._check_honoured()
        layers = self.per_layer_config if self.is_heterogeneous else [self]
        check_sizes(self, {layer.intermediate_size for layer in layers})
        widths = {self.head_dim: "head_dim"}
        for layer_idx in range(self.num_hidden_layers) if self.is_heterogeneous else self._first_layers():
            spec, params = self.component("mixer", layer_idx)
            widths.setdefault(spec.rotary_width(params, self), f"in {spec.name!r}")
        check_rope_widths(self.rope_parameters, widths)

    def _check_honoured(self) -> None:
        """Refuse what no layer's mixer can honour."""
        if self.attention_scale is not None and not any(MIXERS.get(name).qk_norm for name in self.mixer_names):
            able = sorted(spec.name for spec in MIXERS if spec.qk_norm)
            raise ValueError(
                f"attention_scale={self.attention_scale} can do nothing: no mixer of layer_pattern="
                f"{shown(list(dict.fromkeys(self.mixer_names)))} takes it. Leave it out, or use one of: "
                f"{', '.join(able)}."
            )
        layers = list(range(self.num_hidden_layers)) if self.is_heterogeneous else self._first_layers()
        for kind, how in KINDS.items():
            if not how.per_layer:
                continue
            chosen = [(self.component(kind, i).spec, self.mixer_spec_for(i)) for i in layers]
            asked = {spec.name: spec.acts_on for spec, _ in chosen if spec is not None and spec.acts_on}
            for name, needed in asked.items():
                if not any(spec is not None and spec.name == name and getattr(mixer, needed) for spec, mixer in chosen):
                    able = [spec.name for spec in MIXERS if getattr(spec, needed)]
                    raise ValueError(
                        f"{how.field}={name!r} can do nothing: no mixer it is chosen for takes it (layer_pattern="
                        f"{shown(list(dict.fromkeys(self.mixer_names)))}). Leave {how.field} out, or use one of: "
                        f"{', '.join(sorted(able))}."
                    )

    def _check_loops(self) -> None:
        at_work = self.num_hidden_layers + (self.num_loops - 1) * max(
            0, self.num_hidden_layers - self.loop_begin_layers - self.loop_end_layers
        )
        if at_work > MOST_LAYERS:
            raise ValueError(
                f"num_loops={self.num_loops} of num_hidden_layers={self.num_hidden_layers} makes {at_work} layers at "
                f"work; at most {MOST_LAYERS} are allowed."
            )
        if self.loop_begin_layers + self.loop_end_layers > self.num_hidden_layers - (self.num_loops > 1):
            raise ValueError(
                f"loop_begin_layers={self.loop_begin_layers} and loop_end_layers={self.loop_end_layers} leave none of "
                f"num_hidden_layers={self.num_hidden_layers} to repeat num_loops={self.num_loops} times."
            )

    def _first_layers(self) -> list[int]:
        """The first layer of every mixer."""
        return list({name: i for i, name in reversed(list(enumerate(self.mixer_names)))}.values())

    def _check_pattern(self) -> None:
        pattern = read_pattern(self.layer_pattern) or []
        if self.num_hidden_layers % len(pattern):
            longer = len(pattern) > self.num_hidden_layers
            raise ValueError(
                f"layer_pattern={shown(pattern)} has {len(pattern)} entries, "
                f"{'more than' if longer else 'which does not divide'} num_hidden_layers={self.num_hidden_layers}; "
                "give a pattern whose length divides it."
            )
        for name in self._getattr_without_heterogeneous_validation("mixer_params") or {}:
            if name not in pattern:
                logger.warning_once(f"mixer_params for {name!r} have no effect: layer_pattern is {pattern}.")

    @property
    def mixer_names(self) -> list[str]:
        """The mixer of every layer."""
        return [self._pattern[i % len(self._pattern)] for i in range(self.num_hidden_layers)]

    @property
    def _pattern(self) -> list[str]:
        return list(self.layer_pattern or [])

    @property
    def rounds(self) -> list[Round]:
        """The layers in the order they work in: with `num_loops` > 1 those in the middle are repeated as a stack."""
        return self.rounds_of(self.num_hidden_layers)

    def rounds_of(self, num_layers: int, at_work: int | None = None) -> list[Round]:
        """`rounds` of a stack of `num_layers`, up to the `at_work`-th layer at work if that is given."""
        first, behind = self.loop_begin_layers, num_layers - self.loop_end_layers
        shift, last = behind - first, self.num_loops - 1
        every = [
            Round(range(first), 0, False, 0),
            *(Round(range(first, behind), loop, True, loop * shift) for loop in range(self.num_loops)),
            Round(range(behind, num_layers), last, False, last * shift),
        ]
        left = num_layers + last * shift if at_work is None else at_work
        chosen = []
        for part in every:
            chosen.append(part._replace(layers=part.layers[:left]))
            left = max(0, left - len(part.layers))
        return [part for part in chosen if part.layers]

    @property
    def layer_types(self) -> list[str]:
        """Type of every cache layer, which `DynamicCache(config=…)` reads; one for each time a layer works."""
        return self.layer_types_of(self.rounds)

    def layer_types_of(self, rounds: list[Round]) -> list[str]:
        """Type of the cache layer of every layer at work in `rounds`."""
        pattern = self._pattern
        grows = [MIXERS.get(pattern[i % len(pattern)]).grows for part in rounds for i in part.layers]
        return [KV_LAYER_TYPE if grown else STATE_LAYER_TYPE for grown in grows]

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> Any:
        """transformers' way to the text part of a config; it builds caches from the decoder's.

        With looped depth that is a view in which every layer at work is a layer of its own: transformers makes as
        many cache layers as a config has hidden layers, whatever `layer_types` says.
        """
        if self.num_loops == 1 or not decoder:
            return super().get_text_config(decoder, encoder)
        view = copy.copy(self)
        at_work = [i for part in self.rounds for i in part.layers]
        pattern = [self.mixer_names[i] for i in at_work]
        unrolled = dict(num_hidden_layers=len(at_work), layer_pattern=pattern, num_loops=1)
        view.__dict__.pop("_heterogeneity_spec", None)  # what differs from layer to layer is nothing to a cache
        view.__dict__.update(unrolled, loop_begin_layers=0, loop_end_layers=0)
        return view

    def mixer_spec_for(self, layer_idx: int) -> MixerSpec:
        """The spec of the mixer in layer `layer_idx`."""
        return MIXERS.get(self._pattern[range(self.num_hidden_layers)[layer_idx] % len(self._pattern)])

    def component(self, kind: str, layer_idx: int | None = None) -> Chosen:
        """The chosen component of a `kind` ("mixer", "norm", "feed_forward", "residual" …) and its parameters.

        Args:
            kind: "mixer" or a key of `KINDS`. What has no spec, an activation of transformers', gives (None, name).
            layer_idx: The layer, for kinds that may differ from layer to layer.

        Raises:
            ValueError: An unknown name, or parameters it does not have or cannot take.
        """
        if kind == "mixer":
            assert layer_idx is not None
            return Chosen(self.mixer_spec_for(layer_idx), self.params_for(layer_idx))
        how = KINDS[kind]
        own = how.per_layer and layer_idx is not None and self.is_heterogeneous
        config: Any = self.per_layer_config[layer_idx] if own else self  # type: ignore[index]
        name, values = getattr(config, how.field), getattr(config, how.params_field) or {}
        if name in how.fallback and name not in how.registry:
            if values:
                raise ValueError(f"{how.params_field}={values}: {how.field}={name!r} has no parameters.")
            return Chosen(None, name)
        spec = how.registry.get(name, how.fallback)
        try:
            params = spec.params.from_dict(values, spec.name)
            return Chosen(spec, params.resolve(config, frozenset(values)))
        except ValueError as error:
            given = f" with {how.params_field}={shown(values)}" if values else ""
            raise ValueError(f"{how.field}={spec.name!r}{given}: {error}") from None

    def reached_components(self) -> list[ComponentSpec]:
        """Specs of all that this configuration names, mixers that only have parameters included."""
        written = self.to_dict()  # as it will be read back, whatever differs from layer to layer
        named = [*self.mixer_names, *(written.get("mixer_params") or {})]
        for overrides in (written.get("per_layer_config") or {}).values():
            named += overrides.get("mixer_params") or {}
        specs = [chosen.spec for chosen in self._components() if chosen.spec is not None]
        others = {(spec.kind, spec.name): spec for spec in specs}
        return [*(MIXERS.get(name) for name in sorted(set(named))), *others.values()]

    def _components(self) -> list[Chosen]:
        """Every component but mixers, in every layer that may have its own."""
        layers = range(self.num_hidden_layers) if self.is_heterogeneous else [0]
        return [
            self.component(kind, layer_idx)
            for kind, how in KINDS.items()
            for layer_idx in (layers if how.per_layer else [None])
        ]

    def params_for(self, layer_idx: int) -> Params:
        """The validated mixer parameters of layer `layer_idx`, `per_layer_config` taken into account."""
        spec = self.mixer_spec_for(layer_idx)
        layer_config = self.per_layer_config[layer_idx] if self.is_heterogeneous else self
        for name in layer_config.mixer_params:
            MIXERS.get(name)
        values = layer_config.mixer_params.get(spec.name, {})
        params = spec.params.from_dict(values, spec.name)
        try:
            return params.resolve(layer_config, frozenset(spec.params.named(values, spec.name)))
        except ValueError as error:
            raise ValueError(f"{spec.name!r} in layer {layer_idx}: {error}") from None

    def validate_rope(self) -> None:
        """transformers' check, with heads of odd width allowed: their last channel is not rotated."""
        even = copy.copy(self)
        even.__dict__["head_dim"] = max(2, (self.head_dim or 2) // 2 * 2)
        PreTrainedConfig.validate_rope(even)

    def validate_layer_type(self) -> None:
        """Overrides transformers' check against its closed vocabulary; ours are derived and cannot be wrong."""
