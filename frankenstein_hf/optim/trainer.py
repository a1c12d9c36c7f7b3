"""`TrainingArguments(optim="frankenstein_<name>")` with transformers' own `Trainer`.

transformers keeps the names in a closed enumeration and the functions behind them in a private table; both are extended
when their modules are imported, which may be never. `Trainer.create_optimizer` is wrapped for the sake of
`optimizer_cls_and_kwargs`, which by itself goes past what a subclass of Trainer trains beside its model, and past
`hyperparameter_search`.
"""

import copy
import functools
import typing
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from ..after_import import after_import
from ..configuration.component import did_you_mean

logger = logging.get_logger(__name__)

PREFIX = "frankenstein_"


def register_with_trainer() -> None:
    """Extend transformers now or as soon as its modules are imported; safe to repeat."""
    after_import("transformers.training_args", _add_names)
    after_import("transformers.trainer_optimizer", _add_handlers)
    after_import("transformers.trainer", _complete_trainer)


def _add_names(training_args: ModuleType) -> None:
    from .spec import OPTIMIZERS

    enumeration: Any = training_args.OptimizerNames
    for name in OPTIMIZERS.names():
        value = PREFIX + name
        if value in enumeration._value2member_map_:
            continue
        member = str.__new__(enumeration, value)
        member._name_, member._value_ = value.upper(), value
        # a process that reads a pickled member may not have imported this package; reading this function does
        member.__reduce_ex__ = functools.partial(_reduce, value)
        enumeration._member_map_[member._name_] = member
        enumeration._value2member_map_[value] = member
        enumeration._member_names_.append(member._name_)


def _reduce(value: str, protocol: int) -> tuple[Any, tuple[str]]:
    return optimizer_name, (value,)


def optimizer_name(value: str) -> Any:
    """The member of transformers' `OptimizerNames`, which pickled `TrainingArguments` refer to by this function."""
    from transformers.training_args import OptimizerNames

    register_with_trainer()
    return OptimizerNames(value)


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
    factory, kwargs = trainer_optimizer(name, groups=groups or None, stabilizers=stabilizers or None, **values)
    return factory, kwargs | {"root": context.model}


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


# ---------------------------------------------------------------------- what `optimizer_cls_and_kwargs` goes past


def _complete_trainer(trainer_module: Any) -> None:
    """Wrap `create_optimizer`; Trainers with other optimizers see no difference."""
    trainer_class = trainer_module.Trainer
    create = trainer_class.create_optimizer
    if hasattr(create, "__wrapped__"):
        return

    @functools.wraps(create)
    def create_optimizer(self: Any, model: nn.Module | None = None) -> Any:
        from .create import OptimizerFactory
        from .exact_state import ExactState

        given = self.optimizer_cls_and_kwargs
        try:
            if self.optimizer is None and given is not None and given[0] is OptimizerFactory:
                own = type(self).get_optimizer_cls_and_kwargs is not trainer_class.get_optimizer_cls_and_kwargs
                kwargs = given[1] | _searched(self, given[1]["name"])
                handed = _handed_over(self, self.model if model is None else model, kwargs) if own else {}
                self.optimizer_cls_and_kwargs = OptimizerFactory, kwargs | handed
            optimizer = create(self, model)
        finally:
            self.optimizer_cls_and_kwargs = given
        if isinstance(optimizer, ExactState):
            _refuse_untrained(self, optimizer)
        return optimizer

    trainer_class.create_optimizer = create_optimizer


def _searched(trainer: Any, name: str) -> dict[str, Any]:
    """The hyperparameters of the optimizer that `hyperparameter_search` has just set, by our names.

    Raises:
        ValueError: It searches what the method does not have.
    """
    from .spec import OPTIMIZERS

    trial, args = getattr(trainer, "_trial", None), trainer.args
    if trainer.hp_search_backend is None or trial is None:
        return {}
    types = OPTIMIZERS.get(name).params.types()
    pair = types.get("betas") == tuple[float, float]
    known = {
        "learning_rate": ("lr", args.learning_rate),
        "weight_decay": ("weight_decay", args.weight_decay),
        "adam_beta1": ("betas" if pair else "", (args.adam_beta1, args.adam_beta2)),
        "adam_beta2": ("betas" if pair else "", (args.adam_beta1, args.adam_beta2)),
        "adam_epsilon": ("eps" if types.get("eps") is float else "", args.adam_epsilon),
        "optim": ("", None),
        "optim_args": ("", None),
    }
    searched = [key for key in getattr(trial, "params", trial) if key in known]
    if impossible := [key for key in searched if not known[key][0]]:
        raise ValueError(
            f"hyperparameter_search over {', '.join(impossible)} has no effect on trainer_optimizer({name!r}, …), "
            "which does not have it. Leave it out of the search, or choose the optimizer by TrainingArguments' optim."
        )
    return dict(known[key] for key in searched)


def _handed_over(trainer: Any, model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a subclass with its own `get_optimizer_cls_and_kwargs` would hand to an optimizer chosen by `optim`."""
    from .spec import OPTIMIZERS

    args, name = copy.copy(trainer.args), kwargs["name"]
    args.optim, args.optim_args = optimizer_name(PREFIX + name), None
    args.learning_rate = kwargs.get("lr", OPTIMIZERS.get(name).params().lr)
    _, theirs = trainer.get_optimizer_cls_and_kwargs(args, model)
    return {key: theirs[key] for key in ("root", "params", "optimizer_dict") if key in theirs}


def _refuse_untrained(trainer: Any, optimizer: Any) -> None:
    """Raise at the first step if something the Trainer has beside its model gets gradients, but nobody trains it."""

    if getattr(optimizer, "_checked_for", None) is trainer:  # created before, and asked for again
        return
    optimizer._checked_for, first = trainer, ["step"]

    def check(*_: Any) -> None:
        if not first:
            return
        first.clear()
        others = [value for value in vars(trainer).values() if isinstance(value, torch.optim.Optimizer)]
        trained = {id(p) for one in (optimizer, *others) for group in one.param_groups for p in group["params"]}
        trained |= {id(p) for p in trainer.model.parameters()}
        untrained = [
            name
            for name, p in _parameters_of(trainer)
            if p.requires_grad and p.grad is not None and id(p) not in trained
        ]
        if untrained:
            raise RuntimeError(
                f"{', '.join(untrained[:3])}{' …' if len(untrained) > 3 else ''}: parameters that "
                f"{type(trainer).__name__} has beside its model get gradients, but no optimizer has them. Make them "
                "part of the model, hand them over in get_optimizer_cls_and_kwargs, add them with "
                "optimizer.add_param_group after super().create_optimizer(), or freeze them with requires_grad_(False)."
            )

    optimizer.register_step_pre_hook(check)


def _parameters_of(trainer: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Of all modules among the Trainer's attributes, also in dicts and lists."""
    for key, value in vars(trainer).items():
        parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for name, module in ((key, value), *((f"{key}.{part}", module) for part, module in parts)):
            if isinstance(module, nn.Module):
                yield from ((f"{name}.{full}", p) for full, p in module.named_parameters())
