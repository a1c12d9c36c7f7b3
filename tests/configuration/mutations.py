"""Mutated configurations, and what becomes of each: a seeded fuzzer.

Every case is a good configuration with one or two values replaced by something a person, a script or a damaged file
might leave there. Its fate is one of

* ours: refused at construction by our own `ValueError`, whose message names the key and the value;
* works: built, saved and loaded alike, its model runs forward, backward and one cached step with finite numbers;
* ignored: accepted, but the configuration is the one without it;
* foreign: refused by an error that is not ours, or that does not name the key or the value;
* late: accepted, and wrong only when it is saved, loaded, built or run;
* slow: no answer within seconds of processor time.

The last four are faults. For many cases: `python -m tests.configuration.mutations 4000`.
"""

import collections
import copy
import dataclasses
import json
import math
import random
import resource
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging

import frankenstein_hf as fhf
from frankenstein_hf.configuration.registries import MIXERS

FAULTS = ("ignored", "foreign", "late", "slow")
REMOVED = "removed"
PACKAGE = str(Path(fhf.__file__).parent)
SECONDS, MEMORY = 4, 8 << 30

NUMBERS = [0, -1, 1, 2, 3, 7, 1.5, -0.5, 0.0, 1.0, 1e-12, 1e30, 10**6, 2**31, 10**9, 10**12, 10**30, -(10**9)]
ODD = [float("nan"), float("inf"), -float("inf"), True, False, None, "", "64", "x", "GLA", "true", b"x", "\n", "é" * 40]
NESTED = [[], [1], ["a"], [None], [[]], {}, {"a": 1}, {1: 2}, {"": {}}, (), (1, 2), [1, 2, 3], {"x": float("nan")}]
OBJECTS = [object, len, range(3), {1, 2}, 1j, torch.float16, Ellipsis]
MILD = [1, 2, 3, 4, 5, 6, 8, 12, 16, 17, 100, 0.05, 0.1, 0.3, 0.5, 0.9, 1.0, 2.0, 3.0, 10.0, True, False, None]
STRANGE = [*NUMBERS, *ODD, *NESTED, *OBJECTS]

ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 1e4},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "short_factor": [1.0] * 2, "long_factor": [2.0] * 2,
     "original_max_position_embeddings": 16},
    {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 16},
    {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
]  # fmt: skip
ROPE_KEYS = sorted({key for rope in ROPES for key in rope} | {
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "type", "mrope_section",
    "frankenstein_kv_1", "thet",
})  # fmt: skip
_FOREIGN_KEYS = """
    layer_types mlp_layer_types sliding_window mixer mixers n_layer num_layers d_model n_head dropout hiden_size
    is_decoder use_bidirectional_attention add_cross_attention num_labels dtype torch_dtype rope_theta rope_scaling
    partial_rotary_factor attn_implementation experts_implementation per_layer_config quantization_config model_type
    name_or_path tokenizer_class task_specific_params auto_map custom_pipelines transformers_weights output_attentions
    label2id id2label problem_type architectures chunk_size_feed_forward is_encoder_decoder tie_last_hidden_states
    _name_or_path _attn_implementation _private skip attribute_map pruned_heads
"""
FOREIGN_KEYS = _FOREIGN_KEYS.split()


def _value(rng: random.Random) -> Any:
    """Something strange, or a number that may well be right."""
    return copy.deepcopy(rng.choice(STRANGE if rng.random() < 0.6 else MILD))


def _base(pattern: list[str], rope: dict[str, Any]) -> dict[str, Any]:
    return dict(
        vocab_size=29,
        hidden_size=8,
        num_attention_heads=2,
        num_hidden_layers=2,
        intermediate_size=8,
        max_position_embeddings=64,
        layer_pattern=list(pattern),
        mixer_params={name: dict(MIXERS.get(name).small_params) for name in pattern},
        rope_parameters=copy.deepcopy(rope),
    )


Case = tuple[dict[str, Any], str, Any]


def cases(seed: int = 0, mixer: str | None = None) -> Iterator[Case]:
    """Endless: the arguments of the constructor, the name of the mutated key, and its value.

    Args:
        seed: Other cases for another one.
        mixer: Mutate the parameters of this one; else everything, with a few well-known mixers.
    """
    rng = random.Random(f"{seed} {mixer}")
    own = [field.name for field in dataclasses.fields(fhf.FrankensteinConfig)]
    generation = sorted(GenerationConfig._get_default_generation_params())
    places: list[Any] = [_top(own), _top(own), _top(FOREIGN_KEYS + generation), _mixer_param, _mixer_params, _rope]
    places += [_rope, _per_layer, _labels, _names]
    patterns = [["swa", "gla"], ["standard"], ["gated_deltanet"], ["mamba", "swa"]]
    while True:
        values = _base([mixer], ROPES[0]) if mixer else _base(rng.choice(patterns), rng.choice(ROPES))
        key, value = (_mixer_param if mixer else rng.choice(places))(values, rng)
        yield values, key, value


def _top(keys: list[str]) -> Any:
    def mutate(values: dict[str, Any], rng: random.Random) -> tuple[str, Any]:
        key = rng.choice(keys)
        value = values[key] = _value(rng)
        return key, value

    return mutate


def _mixer_param(values: dict[str, Any], rng: random.Random) -> tuple[str, Any]:
    name = rng.choice(values["layer_pattern"])
    names = [field.name for field in dataclasses.fields(MIXERS.get(name).params)] or ["nothing"]
    key = rng.choice(names).rstrip("_")  # as a user writes "lambda"
    value = values["mixer_params"][name][key] = _value(rng)
    return key, value


def _mixer_params(values: dict[str, Any], rng: random.Random) -> tuple[str, Any]:
    if rng.random() < 0.5:
        value = values["mixer_params"] = copy.deepcopy(rng.choice([*STRANGE, {"swa": 3}, {"window_size": 4}]))
        return "mixer_params|swa", value
    name = rng.choice([*values["layer_pattern"], "GLA", "", 3, None])
    value = values["mixer_params"][name] = copy.deepcopy(rng.choice(STRANGE))
    return f"{name}|mixer_params", value


def _rope(values: dict[str, Any], rng: random.Random) -> tuple[str, Any]:
    rope = values["rope_parameters"]
    key = rng.choice([*rope, *rope, *ROPE_KEYS])
    if key in rope and rng.random() < 0.2:
        del rope[key]
        return key, REMOVED
    value = rope[key] = _value(rng)
    return key, value


def _per_layer(values: dict[str, Any], rng: random.Random) -> tuple[str, Any]:
    strange = _value(rng)
    layer = rng.choice([0, "1", 1, 2, -1, "x", None, 1.5, "01"])
    key = rng.choice(["intermediate_size", "hidden_act", "mlp_bias", "mixer_params", "skip", "head_dim", "layer", 3])
    shape, name = rng.choice(
        [
            (strange, "per_layer_config"),
            ({layer: strange}, "per_layer_config"),
            ({layer: {key: strange}}, f"{key}|per_layer_config"),
        ]
    )
    values["per_layer_config"] = shape
    return name, strange


def _labels(values: dict[str, Any], rng: random.Random) -> tuple[str, Any]:
    odd: list[Any] = [
        {0: "a", 1: "a"},
        {0: "a", 2: "b"},
        {"0": "a", "1": "b"},
        {"x": "a"},
        {-1: "a"},
        {0: 1},
        {0: None},
    ]
    odd += [{"a": 0, "b": 1}, {"a": 5}, ["a", "b"], {1.5: "a"}, {True: "a"}, {0: "a"}, {"a": "b"}, {"a": 1, "b": 1}]
    keys = rng.sample(["id2label", "label2id", "num_labels", "problem_type"], rng.choice([1, 1, 2]))
    for key in keys:
        value = values[key] = copy.deepcopy(rng.choice(odd + STRANGE if key != "num_labels" else NUMBERS))
    return "|".join(keys), value


def _names(values: dict[str, Any], rng: random.Random) -> tuple[str, Any]:
    names: list[Any] = ["GLA", "attention", "sliding_window", "swa,gla", "swa, gla", "", ",", "full_attention", " swa "]
    names += ["sdpa", "eager", "nope", ["nope"], [["gla"]], ["gla", 3], ["gla", None], ("gla", "swa"), {"gla": 1}, 3]
    names += [["gla"] * 3, ["gla"] * 99, "tokens", "Silu", "rope", "RMSNorm", "frankenstein_swa"]
    key = rng.choice(["layer_pattern", "layer_types", "attn_implementation", "norm", "feed_forward", "hidden_act"])
    value = values[key] = copy.deepcopy(rng.choice(names))
    return key, value


# ---------------------------------------------------------------------- what becomes of a case


class _Slow(BaseException):
    pass


def _ring(*_: Any) -> None:
    raise _Slow


def fate(values: dict[str, Any], key: str, value: Any, run: bool = True) -> tuple[str, str]:
    """The fate of a case, and the error or what shows the fault."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, limits[1]))  # a case must not take the machine down
    signal.signal(signal.SIGPROF, _ring)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of processor time
    try:
        return _fate(values, key, value, run)
    except _Slow:
        return "slow", ""
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _fate(values: dict[str, Any], key: str, value: Any, run: bool) -> tuple[str, str]:
    try:
        config = fhf.FrankensteinConfig(**copy.deepcopy(values))
    except _Slow:
        raise
    except BaseException as error:
        return _whose(error, values, key, value)
    try:
        text = config.to_json_string()
        loaded = fhf.FrankensteinConfig.from_dict(json.loads(text))
        if loaded.to_json_string() != text:
            return "late", "another configuration after saving and loading"
        if run:
            _run(config)
    except _Slow:
        raise
    except BaseException as error:
        return "late", _line(error)
    if _without(values, key) == config.to_dict() and not _means_the_default(key, value, config):
        return "ignored", "the same configuration without it"
    return "works", ""


def _whose(error: BaseException, values: dict[str, Any], key: str, value: Any) -> tuple[str, str]:
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    line = _line(error)
    if type(error) is not ValueError or not last.startswith(PACKAGE):
        return "foreign", line
    if not any(name in str(error) for name in key.split("|")):
        return "foreign", "does not name the key: " + line
    if "Unknown config key" in line or "has no parameter" in line:
        return "ours", line  # whatever its value
    mutated = [values[name] for name in key.split("|") if name in values] + [value]
    if isinstance(value, dict) and any(f"[{name!r}]={inner!r}" in str(error) for name, inner in value.items()):
        return "ours", line  # names the entry that is wrong
    if value not in (REMOVED, None) and not any(text[:12] in str(error) for x in mutated for text in (repr(x), str(x))):
        return "foreign", "does not name the value: " + line
    return "ours", line


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}".replace("\n", " ")


def _without(values: dict[str, Any], key: str) -> dict[str, Any] | None:
    """The configuration of the case without its top-level `key`; None where there is none."""
    if key not in values:
        return None
    try:
        return fhf.FrankensteinConfig(**{k: copy.deepcopy(v) for k, v in values.items() if k != key}).to_dict()
    except ValueError:
        return None


def _means_the_default(key: str, value: Any, config: Any) -> bool:
    """Whether leaving the key out says the same."""
    default = GenerationConfig._get_default_generation_params().get(key, getattr(type(config), key, None))
    if key in ("attn_implementation", "_attn_implementation", "experts_implementation"):
        return True  # never saved
    if value is None or value == {} or (type(value) is type(default) and value == default):
        return True
    sentinel = object()
    now = getattr(config, key, sentinel)
    return type(now) is type(value) and now == value


def _run(config: Any) -> None:
    """Forward, backward and a cached step, if the model is small."""
    sizes = [config.vocab_size, config.hidden_size, config.num_attention_heads * config.head_dim]
    layers = config.per_layer_config if config.is_heterogeneous else [config]
    if max(*sizes, *(layer.intermediate_size for layer in layers)) > 20_000 or len(config.layer_types) > 20:
        return
    with torch.device("meta"):
        if sum(p.numel() for p in fhf.FrankensteinForMaskedLM(config).parameters()) > 3e6:
            return
    causal = all(config.mixer_spec_for(i).causal for i in range(config.num_hidden_layers))
    model = (fhf.FrankensteinForCausalLM if causal else fhf.FrankensteinForMaskedLM)(config).eval()
    params = [config.params_for(i) for i in range(config.num_hidden_layers)]
    rasters = [raster for p in params if isinstance(raster := getattr(p, "grid", None), (tuple, list))]
    x = torch.arange(math.prod(rasters[0]) if rasters else 7)[None] % config.vocab_size  # a raster wants to be whole
    output = model(x, labels=x, return_dict=True)
    output.loss.backward()
    step = model(x[:, :1], cache=output.cache, return_dict=True) if config.use_cache and causal else output
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    for tensor in (output.logits, output.loss, step.logits, *gradients):
        if not tensor.isfinite().all():
            raise ArithmeticError("not finite")
    head = fhf.FrankensteinForSequenceClassification(config)
    assert head(x, return_dict=True).logits.shape == (1, config.num_labels)


def main(number: int, seed: int) -> None:
    """Half of the cases anywhere, half on the mixers' parameters."""
    warnings.simplefilter("ignore")
    logging.set_verbosity(logging.CRITICAL)
    counts: collections.Counter = collections.Counter()
    streams = [cases(seed, name) for name in MIXERS.names()]
    streams += [cases(seed)] * len(streams)
    for i in range(number):
        values, key, value = next(streams[i % len(streams)])
        what, line = fate(values, key, value)
        counts[what] += 1
        if what in FAULTS:
            print(what, f"{key}={value!r}"[:100], values["layer_pattern"], "|", line[:220], flush=True)
    print(dict(counts), "faults:", sum(counts[what] for what in FAULTS), "of", number)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
