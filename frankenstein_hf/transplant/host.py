"""What a host is: a table of names, the meaning of every key of its configuration, and who reads and writes it.

Reading is strict. A key of the host's configuration is either carried over, or allowed a few values, or known to change
nothing; whatever else it says raises, because a conversion that is nearly right is worse than none.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from ..configuration.component import did_you_mean
from ..configuration.configuration_frankenstein import FrankensteinConfig
from ..configuration.values import shown

# Keys of any configuration of transformers that say nothing about the function.
_NOTES = "_name_or_path architectures auto_map dtype torch_dtype model_type return_dict transformers_version "
_NOTES += "output_attentions output_hidden_states _attn_implementation attn_implementation chunk_size_feed_forward"
NOTES = frozenset(_NOTES.split())
# Keys with the same name and meaning in every host that has them.
_SHARED = "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size "
_SHARED += "hidden_act max_position_embeddings initializer_range rms_norm_eps use_cache pad_token_id bos_token_id "
_SHARED += "eos_token_id tie_word_embeddings rope_parameters attention_bias mlp_bias attention_dropout problem_type"
SHARED = frozenset(_SHARED.split())
# What every host that has the key must say.
ALWAYS: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "quantization_config": (None,),
    "use_bidirectional_attention": (None, False),
    "pretraining_tp": (1, None),
}


@dataclass(frozen=True)
class Fused:
    """Several of our modules that are one module of the host, one below the other in its weight.

    Attributes:
        parts: Our modules, in the order of the rows.
        by_heads: The rows of the parts alternate from head to head.
    """

    parts: tuple[str, ...]
    by_heads: bool = False


@dataclass(frozen=True, kw_only=True)
class Host:
    """A family of transformers whose models this one can express.

    Attributes:
        model_type: What transformers calls it.
        heads: Its classes and ours, by name.
        modules: Modules of its stack and ours; a star is a layer's number.
        head_modules: Modules of its heads and ours.
        keys: Its keys that have another name here.
        always: Keys whose other values cannot be expressed, with those that can.
        without_effect: Its keys that do not change the function.
        fixed: Keys of ours that are the same for every model of the family.
        read: What its configuration says beyond `keys`, as keys of ours; raises `Obstacle` for what cannot be said.
        reads: Its keys that `read` looks at.
        write: The other way: what our configuration says beyond `keys`, as keys of the host.
        causal: Whether its models see earlier tokens only.
        partial_rotary: Whether it honours `partial_rotary_factor`.
        zeros: Tensors of ours, if there are any, that it does not have and that do nothing at zero.
    """

    model_type: str
    heads: Mapping[str, str]
    modules: Mapping[str, str | Fused]
    head_modules: Mapping[str, str] = field(default_factory=lambda: {"lm_head": "lm_head", "score": "classifier"})
    keys: Mapping[str, str] = field(default_factory=dict)
    always: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    without_effect: frozenset[str] = frozenset()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[Any], dict[str, Any]]
    reads: frozenset[str] = frozenset()
    write: Callable[[FrankensteinConfig], dict[str, Any]]
    causal: bool = True
    partial_rotary: bool = False
    zeros: tuple[str, ...] = ("classifier.bias",)

    def config_class(self) -> type:
        """transformers' configuration class."""
        from transformers import CONFIG_MAPPING

        return CONFIG_MAPPING[self.model_type]

    def model_class(self, name: str) -> Any:
        """transformers' model class of that name."""
        import transformers

        return getattr(transformers, name)

    def same_keys(self) -> dict[str, str]:
        """Its keys whose values are ours as they are."""
        declared = {field.name for field in dataclasses.fields(self.config_class())}
        taken = {*self.keys, *self.reads, *self.always, *self.without_effect}
        return {key: key for key in (SHARED & declared) - taken} | dict(self.keys)

    def read_config(self, config: Any) -> dict[str, Any]:
        """The host's configuration as keys of ours.

        Raises:
            ValueError: It says something that cannot be expressed; the message names the key.
        """
        same, written = self.same_keys(), config.to_dict()
        labels = {key: written[key] for key in ("id2label", "label2id") if written.get(key)}
        ours = {**self.fixed, **labels}
        always = {key: value for key, value in ALWAYS.items() if key not in self.without_effect} | dict(self.always)
        known = {*same, *self.reads, *self.without_effect, *NOTES, "id2label", "label2id"}
        for key, value in written.items():
            if key in same:
                ours[same[key]] = value
            elif key in always:
                if not any(type(value) is type(allowed) and value == allowed for allowed in always[key]):
                    raise self.obstacle(key, value, f"only {' or '.join(map(repr, always[key]))} can be expressed")
            elif key not in known and value not in (None, False):
                raise self.obstacle(key, value, "this converter does not know what it means")
        ours["is_causal"] = self.causal
        try:
            ours |= self.read(config)
            self._check_rotary(ours)
        except Obstacle as error:
            raise self.obstacle(error.key, getattr(config, error.key, None), error.why) from None
        return ours

    def _check_rotary(self, ours: Mapping[str, Any]) -> None:
        """Refuse a share of the head that the host would not rotate, or not rotate as we do."""
        factor = (ours.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0)
        if factor != 1.0 and not self.partial_rotary:
            raise Obstacle("rope_parameters", "this family rotates whole heads")
        width = ours.get("head_dim") or ours["hidden_size"] // ours["num_attention_heads"]
        if int(width * factor) % 2:
            raise Obstacle("rope_parameters", f"an odd number of channels, {int(width * factor)}, would be rotated")

    def obstacle(self, key: str, value: Any, why: str) -> ValueError:
        """The error about a key of the host that stands in the way."""
        return ValueError(
            f"{self.model_type!r} cannot be converted: {key}={shown(value)} stands in the way, for {why}. A "
            "conversion that is nearly right would be worse than none."
        )

    def write_config(self, config: FrankensteinConfig) -> Any:
        """Our configuration as one of the host's, as far as it can say it; see `differences`."""
        # copies, for configurations write into the dicts they are given
        values = {theirs: copy.deepcopy(getattr(config, ours)) for theirs, ours in self.same_keys().items()}
        values |= {"id2label": config.id2label, "label2id": config.label2id, "dtype": config.dtype}
        return self.config_class()(**values | self.write(config))


class Obstacle(Exception):
    """Something that a host's `read` cannot express: its key and why."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(f"{key}: {why}")
        self.key, self.why = key, why


@cache
def _hosts() -> dict[str, Host]:
    names = sorted(path.stem for path in (Path(__file__).parent / "hosts").glob("[!_]*.py"))
    hosts = [host for name in names for host in import_module(f"{__package__}.hosts.{name}").HOSTS]
    return {host.model_type: host for host in hosts}


class Hosts:
    """Every host by `model_type`, found by listing the folder on first use."""

    def __getitem__(self, model_type: str) -> Host:
        if model_type not in _hosts():
            raise ValueError(
                f"model_type={shown(model_type)} is no family that can be converted{did_you_mean(model_type, _hosts())}"
            )
        return _hosts()[model_type]

    def __iter__(self) -> Iterator[str]:
        return iter(_hosts())


HOSTS = Hosts()


# ---------------------------------------------------------------------- what several hosts share


def windows(config: Any, layers: list[bool]) -> dict[str, Any]:
    """Pattern and parameters of layers of which some slide over `config.sliding_window` keys, the query's included."""
    params = {"swa": {"window_size": config.sliding_window, "num_sinks": 0}} if any(layers) else {}
    return {"layer_pattern": ["swa" if slides else "standard" for slides in layers], "mixer_params": params}


def window_of(config: FrankensteinConfig) -> int | None:
    """The window all `swa` layers have, as a host without sinks writes it; None where there is no such layer."""
    sizes = {config.params_for(i).window_size for i, name in enumerate(config.mixer_names) if name == "swa"}  # type: ignore[attr-defined]
    return sizes.pop() if sizes else None


def layer_types(config: FrankensteinConfig) -> list[str]:
    """transformers' names of our layers; those it has no name for are called full attention."""
    return ["sliding_attention" if name == "swa" else "full_attention" for name in config.mixer_names]


def slides_by_type(config: Any) -> list[bool]:
    """Which layers `config.layer_types` says have a window."""
    for kind in config.layer_types:
        if kind not in ("sliding_attention", "full_attention"):
            raise Obstacle("layer_types", f"{kind!r} is no layer of this family")
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    if any(slides) and config.sliding_window is None:
        raise Obstacle("sliding_window", "layers with a window need its size")
    return slides


LLAMA_MODULES: dict[str, str | Fused] = {
    "embed_tokens": "embed_tokens",
    "norm": "norm",
    "layers.*.input_layernorm": "layers.*.input_layernorm",
    "layers.*.post_attention_layernorm": "layers.*.post_mixer_layernorm",
    "layers.*.self_attn.q_proj": "layers.*.mixer.q_proj",
    "layers.*.self_attn.k_proj": "layers.*.mixer.k_proj",
    "layers.*.self_attn.v_proj": "layers.*.mixer.v_proj",
    "layers.*.self_attn.o_proj": "layers.*.mixer.o_proj",
    "layers.*.mlp.gate_proj": "layers.*.mlp.gate_proj",
    "layers.*.mlp.up_proj": "layers.*.mlp.up_proj",
    "layers.*.mlp.down_proj": "layers.*.mlp.down_proj",
}
QK_NORM_MODULES: dict[str, str | Fused] = {
    "layers.*.self_attn.q_norm": "layers.*.mixer.q_norm",
    "layers.*.self_attn.k_norm": "layers.*.mixer.k_norm",
}


def decoder_heads(family: str, *heads: str) -> dict[str, str]:
    """Classes of a decoder's family and ours; by default those for language and for sequences."""
    heads = heads or ("CausalLM", "SequenceClassification")
    return {f"{family}Model": "FrankensteinModel"} | {f"{family}For{x}": f"FrankensteinFor{x}" for x in heads}
