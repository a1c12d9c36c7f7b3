"""`TrainingArguments(optim="frankenstein_<name>")` with transformers' own `Trainer`.

transformers keeps the names in a closed enumeration and the functions behind them in a private table; both are extended
when their modules are imported, which may be never.
"""

import typing
from types import ModuleType
from typing import Any

from transformers.utils import logging

from ..after_import import after_import
from ..configuration.component import did_you_mean

logger = logging.get_logger(__name__)

PREFIX = "frankenstein_"


def register_with_trainer() -> None:
    """Extend transformers now or as soon as its modules are imported; safe to repeat."""
    after_import("transformers.training_args", _add_names)
    after_import("transformers.trainer_optimizer", _add_handlers)


def _add_names(training_args: ModuleType) -> None:
    from .spec import OPTIMIZERS

    enumeration: Any = training_args.OptimizerNames
    for name in OPTIMIZERS.names():
        value = PREFIX + name
        if value in enumeration._value2member_map_:
            continue
        member = str.__new__(enumeration, value)
        member._name_, member._value_ = value.upper(), value
        enumeration._member_map_[member._name_] = member
        enumeration._value2member_map_[value] = member
        enumeration._member_names_.append(member._name_)


def _add_handlers(trainer_optimizer: ModuleType) -> None:
    from .spec import OPTIMIZERS

    for name in OPTIMIZERS.names():
        trainer_optimizer._OPTIMIZER_HANDLERS[trainer_optimizer.OptimizerNames(PREFIX + name)] = _handler


def _handler(context: Any) -> tuple[Any, dict[str, Any]]:
    """What `Trainer` asks for the factory and its arguments.

    The learning rate is `args.learning_rate` and the weight decay `args.weight_decay`; betas and eps come from the
    arguments where these differ from transformers' defaults, else from the method. `optim_args` wins over all:
    "momentum=0.95,betas=0.9:0.95,adamw_lr=1e-3,embeddings.lr=0.1"; a stabilizer joins by one of its parameters:
    "qk_clip.tau=100".
    """
    from .create import trainer_optimizer
    from .grouping import ROLES
    from .spec import OPTIMIZERS, STABILIZERS

    args = context.args
    name = getattr(args.optim, "value", args.optim).removeprefix(PREFIX)
    types = OPTIMIZERS.get(name).params.types()
    values: dict[str, Any] = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
    if types.get("betas") == tuple[float, float] and (args.adam_beta1, args.adam_beta2) != (0.9, 0.999):
        values["betas"] = (args.adam_beta1, args.adam_beta2)
    if types.get("eps") is float and args.adam_epsilon != 1e-8:
        values["eps"] = args.adam_epsilon
    default = OPTIMIZERS.get(name).params().lr
    if args.learning_rate == type(args).learning_rate and default >= 20 * args.learning_rate:
        logger.warning_once(
            f"{name} trains with learning_rate={args.learning_rate}, the default of {type(args).__name__}. Its own "
            f"default is {default}: set learning_rate to choose."
        )
    groups: dict[str, dict[str, Any]] = {}
    stabilizers: dict[str, dict[str, Any]] = {}
    owners = (*ROLES, *STABILIZERS.names())
    for key, text in context.optim_args.items():
        owner, _, own = key.rpartition(".")
        if owner and owner not in owners:
            raise ValueError(f"optim_args: unknown {owner!r} in {key!r}" + did_you_mean(owner, owners))
        if key == "stabilizers" or key in STABILIZERS:
            raise ValueError(
                f"optim_args: a stabilizer joins by one of its parameters, as in 'qk_clip.tau=100' or 'quack.tau=1', "
                f"not by {key}={text!r}."
            )
        value = _parse(text, types.get(own, tuple[float, float] if own == "betas" else float), key)
        among = stabilizers if owner in STABILIZERS else groups
        (among.setdefault(owner, {}) if owner else values)[own] = value
    return trainer_optimizer(name, groups=groups or None, stabilizers=stabilizers or None, **values)


def _parse(text: str, annotation: Any, key: str) -> Any:
    """A value of `optim_args`: numbers, true or false, none, words; tuples with colons between."""
    lowered = text.lower()
    choices = typing.get_args(annotation) if typing.get_origin(annotation) is not tuple else ()
    if ":" in text or typing.get_origin(annotation) is tuple:
        return tuple(float(part) for part in text.split(":"))
    if lowered in ("true", "false"):
        return lowered == "true"
    if lowered == "none" and type(None) in choices:
        return None
    wanted = {annotation, *choices}
    for cast in (int, float):
        if cast in wanted:
            try:
                return cast(text)
            except ValueError:
                continue
    if str in wanted:
        return text
    raise ValueError(f"optim_args: {key}={text!r} cannot be read as {annotation}.")
