"""PEFT on models of this family: what is adapted when nobody says, and a word about mixers left without an adapter.

PEFT looks default targets up in tables by model type; ours are the linear projections of all registered mixers, so
that any pattern is adapted. Adapters, whatever their kind, are put in by one method of PEFT, which is wrapped to see
where they went, and to keep them off heads that are trained whole. Other models notice nothing of it.
"""

import functools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from .after_import import after_import
from .configuration.configuration_frankenstein import FrankensteinConfig
from .configuration.registries import MIXERS
from .modeling.implementations import implementation

logger = logging.get_logger(__name__)

LAYER_NORMS = ["input_layernorm", "post_mixer_layernorm"]
FEED_FORWARD_OUTPUT = "mlp.down_proj"
NOT_ABOUT_MIXERS = ("LN_TUNING", "SHADOW", "TRAINABLE_TOKENS", "XLORA")  # kinds of adapters for other parts of a model


class MixerProjections:
    """An iterable of suffixes ("mixer.q_proj") that name the linear projections of every registered mixer.

    They are found when asked for, by building each mixer without memory: PEFT is imported more often than it is used.

    Args:
        more: Further suffixes.
    """

    def __init__(self, *more: str) -> None:
        self.more = more

    def __iter__(self) -> Iterator[str]:
        names = set(self.more)
        for spec in MIXERS:
            for params in ({}, dict(spec.small_params)):  # parameters may add projections
                config = FrankensteinConfig(
                    layer_pattern=[spec.name], num_hidden_layers=1, mixer_params={spec.name: params}
                )
                with torch.device("meta"):
                    mixer = implementation(spec)(config, 0)
                for name, module in mixer.named_modules():
                    if isinstance(module, nn.Linear):
                        names |= {f"mixer.{every}" for every in _numbered(name)}
        return iter(sorted(names))


def _numbered(name: str) -> list[str]:
    """A projection's name; of one in a list, as in "kv_b_projs.3", the names of all that the list may have."""
    stem, _, number = name.rpartition(".")
    return [f"{stem}.{i}" for i in range(64)] if number.isdigit() else [name]


def connect_peft() -> None:
    """Tell PEFT about our models as soon as it is imported; safe to repeat."""
    after_import("peft.utils.constants", _fill_tables)
    after_import("peft.tuners.tuners_utils", _watch_injection)


def _fill_tables(constants: Any) -> None:
    """Add our model type to PEFT's tables of default targets, one table a kind of adapter."""
    for name in vars(constants):
        if re.fullmatch("TRANSFORMERS_MODELS_TO_.*_TARGET_MODULES_MAPPING", name):
            getattr(constants, name)[FrankensteinConfig.model_type] = MixerProjections()
    ours = {
        "LNTUNING_TARGET_MODULES": LAYER_NORMS,
        "IA3_TARGET_MODULES": MixerProjections(FEED_FORWARD_OUTPUT),  # it scales what the feed-forward reads, too
        "IA3_FEEDFORWARD_MODULES": [FEED_FORWARD_OUTPUT],
    }
    for kind, targets in ours.items():
        getattr(constants, f"TRANSFORMERS_MODELS_TO_{kind}_MAPPING")[FrankensteinConfig.model_type] = targets


def _watch_injection(tuners_utils: Any) -> None:
    """Wrap the method that puts adapters into a model."""
    inject = tuners_utils.BaseTuner.inject_adapter
    if hasattr(inject, "__wrapped__"):
        return

    @functools.wraps(inject)
    def inject_adapter(self: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        if getattr(getattr(model, "config", None), "model_type", None) != FrankensteinConfig.model_type:
            return inject(self, model, adapter_name, *args, **kwargs)
        before = len(self.targeted_module_names)
        _spare_heads(self.peft_config[adapter_name], model)
        inject(self, model, adapter_name, *args, **kwargs)
        adapted = {*self.targeted_module_names[before:], *self.targeted_parameter_names}
        _warn_of_gaps(self.peft_config[adapter_name], model, adapted)

    tuners_utils.BaseTuner.inject_adapter = inject_adapter


def _spare_heads(config: Any, model: nn.Module) -> None:
    """Keep "all-linear" off heads that will be trained whole: PEFT adapts all but SEQ_CLS's, and then fails."""
    if getattr(config, "target_modules", None) != "all-linear" or getattr(config, "exclude_modules", ()):
        return
    whole = set(getattr(config, "modules_to_save", None) or ())
    if config.task_type in ("TOKEN_CLS", "QUESTION_ANS"):
        whole |= {name for name, module in model.named_children() if isinstance(module, nn.Linear)}
    config.exclude_modules = whole or None


def _warn_of_gaps(config: Any, model: Any, adapted: set[str]) -> None:
    """Name the mixers an adapter that is about to be trained does not touch, in the layers it was meant for."""
    kind = getattr(config.peft_type, "value", config.peft_type)
    if config.inference_mode or kind in NOT_ABOUT_MIXERS:
        return
    chosen = getattr(config, "layers_to_transform", None)
    layers = None if chosen is None else {chosen} if isinstance(chosen, int) else set(chosen)
    missed: dict[str, list[int]] = {}
    for name, module in model.named_modules():
        if not re.search(r"(^|\.)layers\.\d+\.mixer$", name) or (layers and module.layer_idx not in layers):
            continue
        if not any(target.startswith(f"{name}.") for target in adapted):
            missed.setdefault(model.config.mixer_names[module.layer_idx], []).append(module.layer_idx)
    if missed:
        listed = ", ".join(f"{name!r} (layers {', '.join(map(str, where))})" for name, where in missed.items())
        logger.warning_once(
            f"The {kind} adapter touches no projection of these mixers: {listed}. Leave target_modules out to adapt "
            "every mixer, or give target_modules='all-linear'."
        )
