"""`FrankensteinConfig`: the configuration of every text model of the family."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import GenerationConfig
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters
from transformers.utils import logging

from .activations import GATED_FORMS
from .component import Chosen, ComponentSpec, MixerSpec, Params, Round, did_you_mean
from .norms import NORM_PLACEMENTS
from .registries import KINDS, MIXERS

logger = logging.get_logger(__name__)

FRANKENSTEIN_VERSION = "0.1.0"
DEFAULT_PATTERN = ("gated_deltanet", "swa", "gated_deltanet", "standard")

# Cache layers are looked up by these names; the version keeps bundles of different ages apart in one process.
STATE_LAYER_TYPE = "frankenstein_state_1"
KV_LAYER_TYPE = "frankenstein_kv_1"

# Keys transformers itself writes into, or passes through, a configuration.
_TRANSFORMERS_KEYS = (
    "_attn_implementation_internal _commit_hash _experts_implementation_internal _name_or_path architectures "
    "attn_implementation auto_map base_model_name_or_path custom_pipelines dtype experts_implementation "
    "id2label is_decoder label2id layer_types model_type name_or_path num_labels output_attentions "
    "partial_rotary_factor per_layer_config quantization_config rope_scaling rope_theta task_specific_params "
    "tokenizer_class torch_dtype transformers_version transformers_weights use_bidirectional_attention"
)
TRANSFORMERS_KEYS = frozenset(_TRANSFORMERS_KEYS.split())


# What `per_layer_config` may change for one layer.
PER_LAYER_KEYS = frozenset({"mixer_params", "intermediate_size", "hidden_act", "mlp_bias"}).union(
    *((kind.field, kind.params_field) for kind in KINDS.values() if kind.per_layer)
)


def is_newer(version: object) -> bool:
    """Whether `version`, as "1.2.3", is above this code's."""

    def key(text: str) -> list[int]:
        return [int(part) for part in text.split(".") if part.isdigit()]

    return isinstance(version, str) and key(version) > key(FRANKENSTEIN_VERSION)


def newer_note(version: object) -> str:
    """The end of a message about a config of that `version`: what to do if it is newer than this code, else ""."""
    if not is_newer(version):
        return ""
    return f" The config was written by frankenstein_hf {version}, this is {FRANKENSTEIN_VERSION}: upgrade to use it."


def _raising_value_errors(cls: type) -> type:
    """Turn the strict-dataclass errors of `cls` (which are no ValueErrors) into ValueErrors with the same message.

    Errors of a config from a newer version say so.
    """

    def translated(method: Callable) -> Callable:
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                method(self, *args, **kwargs)
            except (ValueError, StrictDataclassError, KeyError) as error:  # KeyError: a rotary parameter is missing
                note = newer_note(kwargs.get("frankenstein_version"))
                if isinstance(error, ValueError) and not note:
                    raise
                message = str(error) if isinstance(error, ValueError) else f"{cls.__name__}: {error}"
                raise ValueError(message + note) from error

        wrapper.__wrapped__ = method  # type: ignore[attr-defined]
        return wrapper

    cls.__init__ = translated(cls.__init__)  # type: ignore[misc]
    cls.__setattr__ = translated(cls.__setattr__)  # type: ignore[method-assign]
    return cls


@_raising_value_errors
@strict
class FrankensteinConfig(PreTrainedConfig):
    """Configuration of a Frankenstein text model: transformers' usual names, and a sequence mixer per layer.

    Every key is checked when the object is built: an unknown key, an unknown mixer or parameter, a wrong type or an
    impossible size raises `ValueError` naming the key, the value, what is allowed and the nearest valid name.

    Args:
        vocab_size: Number of tokens.
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
        residual: How layers are joined in depth: "standard" (x + F(norm(x))) or "none" (F(norm(x))).
        activation_params, feed_forward_params, norm_params, residual_params: Parameters of what the field names.
        num_loops: How often the middle layers are run through, one after the other as a stack, with the same weights.
        loop_begin_layers, loop_end_layers: Layers before and behind them, which are run through once.
        max_position_embeddings: Longest sequence the model is meant for.
        rope_parameters: Rotary parameters as in transformers: `rope_type`, `rope_theta` and what the type needs.
        attention_dropout, hidden_dropout: Dropout of attention weights and of each block's output, in [0, 1).
        attention_bias, mlp_bias: Whether projections have biases.
        initializer_range: Standard deviation of the initial weights.
        rms_norm_eps: Epsilon of every norm.
        tie_word_embeddings: Share the embedding matrix with the language-model head.
        use_cache: Return a cache from causal models.
        is_causal: What the checkpoint was trained as; None lets the class decide (CausalLM: True, others: False).
        sparse_prediction: MaskedLM computes training logits at labelled positions only; `logits` is then
            [labelled, vocab_size]. The loss is the same.
        classifier_pooling: What a head that classifies sequences looks at: the first real token ("cls"), the last
            ("last") or the "mean" of all. None chooses "last" for causal models, "mean" for others.
        classifier_dropout: Dropout before a classification head.
        layer_pattern: A mixer name or a list of them, repeated over the layers; its length must divide
            `num_hidden_layers`. Default: `["gated_deltanet", "swa", "gated_deltanet", "standard"]`, repeated and cut.
        mixer_params: Parameters by mixer name, e.g. `{"swa": {"window_size": 128}}`. `per_layer_config` (native to
            transformers) replaces the dict for one layer.
        frankenstein_version: Version of this library that wrote the configuration.
    """

    model_type = "frankenstein"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012  (read by Trainer as a plain list)

    vocab_size: int = 32000
    hidden_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    hidden_act: str = "silu"
    activation_params: dict[str, Any] | None = None
    activation_dropout: float | int = 0.0
    feed_forward: str = "gated"
    feed_forward_params: dict[str, Any] | None = None
    norm: str = "rms_norm"
    norm_params: dict[str, Any] | None = None
    norm_placement: str = "pre"
    residual: str = "standard"
    residual_params: dict[str, Any] | None = None
    num_loops: int = 1
    loop_begin_layers: int = 0
    loop_end_layers: int = 0
    max_position_embeddings: int = 2048
    rope_parameters: RopeParameters | dict | None = None
    attention_dropout: float | int = 0.0
    hidden_dropout: float | int = 0.0
    attention_bias: bool = False
    mlp_bias: bool = False
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    use_cache: bool = True
    is_causal: bool | None = None
    sparse_prediction: bool = False
    classifier_pooling: str | None = None
    classifier_dropout: float | int = 0.0
    layer_pattern: list[str] | str | None = None
    mixer_params: dict[str, dict[str, Any]] | None = None
    frankenstein_version: str = FRANKENSTEIN_VERSION
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    mask_token_id: int | None = None
    cls_token_id: int | None = None
    sep_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._reject_unknown_keys(kwargs)
        kwargs.pop("layer_types", None)  # derived from the pattern
        self._expand_forms()
        self._check_ranges()
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size={self.hidden_size} is not divisible by num_attention_heads="
                    f"{self.num_attention_heads}; choose a divisor or give head_dim."
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} must divide "
                f"num_attention_heads={self.num_attention_heads}."
            )
        if self.intermediate_size is None:
            gated = self.feed_forward == "gated"
            self.intermediate_size = -(-8 * self.hidden_size // 96) * 32 if gated else 4 * self.hidden_size
        if self.layer_pattern is None:
            repeats = -(-self.num_hidden_layers // len(DEFAULT_PATTERN))
            self.layer_pattern = list(DEFAULT_PATTERN * repeats)[: self.num_hidden_layers]
        elif isinstance(self.layer_pattern, str):
            self.layer_pattern = [self.layer_pattern]
        self.mixer_params = copy.deepcopy(self.mixer_params or {})
        self._check_pattern()
        super().__post_init__(**kwargs)
        self._check_layers()

    def _expand_forms(self) -> None:
        """`hidden_act` may name a whole form of the feed-forward block."""
        if self.hidden_act in GATED_FORMS:
            if self.feed_forward != "gated":
                raise ValueError(
                    f"hidden_act={self.hidden_act!r} is a gated feed-forward block, but feed_forward="
                    f"{self.feed_forward!r}; leave that out, or choose hidden_act={GATED_FORMS[self.hidden_act]!r}."
                )
            self.hidden_act = GATED_FORMS[self.hidden_act]
        elif self.hidden_act == "maxout":
            self.hidden_act, self.feed_forward = "identity", "maxout"

    def check(self) -> None:
        """Check everything again, after attributes were set. Raises ValueError as the constructor does."""
        self._check_ranges()
        if not self.is_heterogeneous:
            self._check_pattern()
        self._check_layers()

    def _check_layers(self) -> None:
        own = set(self._heterogeneity_spec.explicit_per_layer_attributes) if self.is_heterogeneous else set()
        if foreign := own - PER_LAYER_KEYS:
            raise ValueError(
                f"per_layer_config cannot change {', '.join(sorted(foreign))}; it can change "
                f"{', '.join(sorted(PER_LAYER_KEYS))}."
            )
        rope_type = (self.rope_parameters or {}).get("rope_type", "default")
        if rope_type != "default" and rope_type not in ROPE_INIT_FUNCTIONS:
            raise ValueError(
                f"Unknown rope_type {rope_type!r}" + did_you_mean(rope_type, {"default", *ROPE_INIT_FUNCTIONS})
            )
        for layer_idx in range(self.num_hidden_layers):
            self.params_for(layer_idx)

    def _reject_unknown_keys(self, kwargs: Mapping[str, Any]) -> None:
        fields = {field.name for field in dataclasses.fields(self)}
        known = fields | TRANSFORMERS_KEYS | set(self.attribute_map)
        known |= set(GenerationConfig._get_default_generation_params())
        unknown = [key for key in kwargs if key not in known]
        if not unknown:
            return
        message = " ".join(f"Unknown config key {key!r}" + did_you_mean(key, fields) for key in unknown)
        if note := newer_note(self.frankenstein_version):
            logger.warning_once(f"{message}{note} Until then the keys are kept but have no effect.")
        else:
            raise ValueError(message)

    def _check_ranges(self) -> None:
        sizes = "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        sizes += "intermediate_size max_position_embeddings"
        for key in sizes.split():
            if key in PER_LAYER_KEYS and self.is_heterogeneous:
                values = [getattr(layer, key) for layer in self.per_layer_config]
            else:
                values = [getattr(self, key)]
            if any(value is not None and value < 1 for value in values):
                raise ValueError(f"{key}={values[0] if len(values) == 1 else values} must be at least 1.")
        for key in ("attention_dropout", "hidden_dropout", "activation_dropout", "classifier_dropout"):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)} must be in [0, 1).")
        for key in ("initializer_range", "rms_norm_eps"):
            if not 0 < getattr(self, key) < float("inf"):
                raise ValueError(f"{key}={getattr(self, key)} must be positive and finite.")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(f"pad_token_id={self.pad_token_id} must be below vocab_size={self.vocab_size}.")
        self._components()
        if self.norm_placement not in NORM_PLACEMENTS:
            raise ValueError(
                f"Unknown norm_placement {self.norm_placement!r}" + did_you_mean(self.norm_placement, NORM_PLACEMENTS)
            )
        if self.num_loops < 1 or self.loop_begin_layers < 0 or self.loop_end_layers < 0:
            raise ValueError(
                f"num_loops={self.num_loops} must be at least 1, loop_begin_layers={self.loop_begin_layers} and "
                f"loop_end_layers={self.loop_end_layers} at least 0."
            )
        if self.num_loops > 1 and self.loop_begin_layers + self.loop_end_layers >= self.num_hidden_layers:
            raise ValueError(
                f"loop_begin_layers={self.loop_begin_layers} and loop_end_layers={self.loop_end_layers} leave none of "
                f"num_hidden_layers={self.num_hidden_layers} to repeat num_loops={self.num_loops} times."
            )
        problems = ("regression", "single_label_classification", "multi_label_classification")
        if self.problem_type not in (None, *problems):
            raise ValueError(f"Unknown problem_type {self.problem_type!r}" + did_you_mean(self.problem_type, problems))
        poolings = ("cls", "mean", "last")
        if self.classifier_pooling not in (None, *poolings):
            raise ValueError(
                f"Unknown classifier_pooling {self.classifier_pooling!r}"
                + did_you_mean(self.classifier_pooling, poolings)
            )

    def _check_pattern(self) -> None:
        pattern = [self.layer_pattern] if isinstance(self.layer_pattern, str) else self.layer_pattern
        if not pattern:
            raise ValueError("layer_pattern is empty; give a mixer name or a list of them.")
        for name in pattern:
            MIXERS.get(name)
        if self.num_hidden_layers % len(pattern):
            longer = len(pattern) > self.num_hidden_layers
            raise ValueError(
                f"layer_pattern has {len(pattern)} entries, {'more than' if longer else 'which does not divide'} "
                f"num_hidden_layers={self.num_hidden_layers}; give a pattern whose length divides it."
            )
        for name, params in (self.mixer_params or {}).items():
            spec = MIXERS.get(name)
            spec.params.from_dict(params, name)
            if name not in pattern:
                logger.warning_once(f"mixer_params for {name!r} have no effect: layer_pattern is {pattern}.")

    @property
    def mixer_names(self) -> list[str]:
        """The mixer of every layer."""
        return [self._pattern[i % len(self._pattern)] for i in range(self.num_hidden_layers)]

    @property
    def _pattern(self) -> list[str]:
        return [self.layer_pattern] if isinstance(self.layer_pattern, str) else self.layer_pattern or []

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
        return MIXERS.get(self.mixer_names[layer_idx])

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
        params = spec.params.from_dict(values, spec.name)
        try:
            return Chosen(spec, params.resolve(config, frozenset(values)))
        except ValueError as error:
            raise ValueError(f"{how.field}={spec.name!r}: {error}") from None

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
            return params.resolve(layer_config, frozenset(values))
        except ValueError as error:
            raise ValueError(f"{spec.name!r} in layer {layer_idx}: {error}") from None

    def validate_rope(self) -> None:
        """transformers' check, with heads of odd width allowed: their last channel is not rotated."""
        even = copy.copy(self)
        even.__dict__["head_dim"] = max(2, (self.head_dim or 2) // 2 * 2)
        PreTrainedConfig.validate_rope(even)

    def validate_layer_type(self) -> None:
        """Overrides transformers' check against its closed vocabulary; ours are derived and cannot be wrong."""
