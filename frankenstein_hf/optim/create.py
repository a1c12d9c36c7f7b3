"""Optimizers by name: looking them up, building them for a model, handing them to transformers' `Trainer`."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..configuration.component import Params, did_you_mean
from .grouping import NO_DECAY, ROLES, ParameterInfo, classify, split
from .spec import (
    GROUP_PARAMS,
    OPTIMIZERS,
    STABILIZERS,
    AdamParams,
    OptimizerParams,
    OptimizerSpec,
    StabilizerSpec,
    load,
)

Groups = Mapping[str, Mapping[str, Any]]
Stabilizers = str | Iterable[str] | Mapping[str, Mapping[str, Any]]
HandedOver = Iterable[Mapping[str, Any]]  # parameter groups as torch takes them


def list_optimizers(family: str | None = None) -> list[str]:
    """Sorted names of the optimizers, of one family if given.

    Raises:
        ValueError: Unknown family; the message lists the known ones.
    """
    return OPTIMIZERS.names(family)


def optimizer_spec(name: str) -> OptimizerSpec:
    """What the optimizer called `name` is: parameters, defaults, state, reference.

    Raises:
        ValueError: Unknown name; the message gives the nearest one.
    """
    return OPTIMIZERS.get(name)


def list_stabilizers() -> list[str]:
    """Sorted names of what can join any optimizer as `stabilizers`."""
    return STABILIZERS.names()


def stabilizer_spec(name: str) -> StabilizerSpec:
    """What the stabilizer called `name` is: parameters, defaults, reference.

    Raises:
        ValueError: Unknown name; the message gives the nearest one.
    """
    return STABILIZERS.get(name)


def create_optimizer(
    model: nn.Module,
    name: str,
    *,
    groups: Groups | None = None,
    stabilizers: Stabilizers | None = None,
    **params: Any,
) -> Any:
    """An optimizer for every trainable parameter of `model`, grouped by role.

    Weight decay acts on the matrices only (roles "attention" and "other"), unless a group asks for its own.

    Args:
        model: Any module; see `frankenstein_hf.optim.grouping` for how roles are found.
        name: One of `list_optimizers()`.
        groups: Settings by role ("embeddings", "norms", "attention", "other"): lr, weight_decay, betas, eps.
        stabilizers: Names of `list_stabilizers()`, or a dict of names and their parameters: {"qk_clip": {"tau": 50}}.
        params: Hyperparameters of the method; see `optimizer_spec(name).params`.

    Returns:
        A `torch.optim.Optimizer` whose parameter groups carry "role" (and, for methods that treat matrices specially,
        "kind" and "layout").

    Raises:
        ValueError: An unknown name, role or hyperparameter, a value out of range, nothing to train, or a model that a
            stabilizer cannot work with.
    """
    spec = OPTIMIZERS.get(name)
    settings = spec.params.from_dict(params, name)
    return _build(model, spec, settings, stabilizers, parameter_groups(model, spec, settings, groups))


def _build(
    model: nn.Module,
    spec: OptimizerSpec,
    settings: OptimizerParams,
    stabilizers: Stabilizers | None,
    param_groups: list[dict[str, Any]],
) -> Any:
    """The optimizer of these groups, with its stabilizers."""
    chosen = [
        load(STABILIZERS.get(stabilizer).implementation)(model, wanted)
        for stabilizer, wanted in _check_stabilizers(spec, settings, stabilizers).items()
    ]
    for stabilizer in chosen:
        param_groups = stabilizer.regroup(param_groups)
    optimizer = load(spec.implementation)(param_groups, **settings.as_dict())
    for stabilizer in chosen:
        stabilizer.attach(optimizer)
    return optimizer


def _check_stabilizers(
    spec: OptimizerSpec, settings: OptimizerParams, stabilizers: Stabilizers | None
) -> dict[str, Params]:
    """The parameters of every stabilizer, those built into the optimizer first."""
    stabilizers = [stabilizers] if isinstance(stabilizers, str) else stabilizers
    if not isinstance(stabilizers, Iterable | None):
        raise ValueError(f"stabilizers must be names, or a dict of names and their parameters, got {stabilizers!r}.")
    names = [] if stabilizers is None else list(stabilizers)
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"stabilizers must be names, or a dict of names and their parameters, got {stabilizers!r}.")
    asked = stabilizers if isinstance(stabilizers, Mapping) else {name: {} for name in names}
    checked = {}
    for name in spec.stabilizers:
        if name in asked:
            raise ValueError(f"{spec.name!r} has {name!r} built in; give its parameters as the optimizer's own.")
        cls = STABILIZERS.get(name).params
        checked[name] = cls(**{field.name: getattr(settings, field.name) for field in dataclasses.fields(cls)})
    return checked | {name: STABILIZERS.get(name).params.from_dict(own, name) for name, own in asked.items()}


def parameter_groups(
    model: nn.Module,
    spec: OptimizerSpec,
    settings: OptimizerParams,
    groups: Groups | None = None,
    infos: list[ParameterInfo] | None = None,
) -> list[dict[str, Any]]:
    """torch's parameter groups for `spec`, with names, roles and the hyperparameters of each.

    Args:
        model, spec, settings, groups: See `create_optimizer`.
        infos: What is trained, if not every parameter of the model.
    """
    overrides = _check_groups(spec, settings, groups)
    infos = classify(model) if infos is None else infos
    if not infos:
        raise ValueError(f"The model has no trainable parameter for {spec.name!r}.")
    result = []
    for role, members in split(infos, spec.by_kind or bool(spec.fallback)):
        group: dict[str, Any] = {"params": [(info.name, info.parameter) for info in members], "role": role}
        if spec.by_kind or spec.fallback:
            group |= {"kind": members[0].kind, "layout": members[0].layout}
        group |= _settings_of(role, members[0], spec, settings) | overrides.get(role, {})
        result.append(group)
    return result


def _settings_of(role: str, info: ParameterInfo, spec: OptimizerSpec, settings: Any) -> dict[str, Any]:
    values = settings.as_dict()
    if info.kind in spec.fallback:
        values |= {"method": "adamw", **{key: values[f"adamw_{key}"] for key in ("lr", "betas", "eps")}}
    return values | ({"weight_decay": 0.0} if role in NO_DECAY else {})


def _check_groups(spec: OptimizerSpec, settings: OptimizerParams, groups: Groups | None) -> dict[str, dict[str, Any]]:
    """`groups` with every value checked."""
    if groups is not None and not isinstance(groups, Mapping):
        raise ValueError(f"groups must be a dict of roles and their settings, got {groups!r}.")
    checked = {}
    for role, values in (groups or {}).items():
        if role not in ROLES:
            raise ValueError(f"Unknown role {role!r}" + did_you_mean(role, ROLES))
        if not isinstance(values, Mapping):
            raise ValueError(f"groups[{role!r}] must be a dict of settings, got {values!r}.")
        falls_back = {"embeddings": "table", "norms": "vector"}.get(role, "matrix") in spec.fallback
        cls: type[OptimizerParams] = AdamParams if falls_back else spec.params
        allowed = [key for key in GROUP_PARAMS if key in cls.types()]
        for key in values:
            if key not in allowed:
                raise ValueError(
                    f"{spec.name!r}: group {role!r} cannot have its own {key!r}" + did_you_mean(key, allowed)
                )
        fields = cls.from_dict(values, f"{spec.name}, group {role!r}").as_dict()
        checked[role] = {key: fields[key] for key in values}
    return checked


def describe_groups(
    model: nn.Module,
    name: str,
    *,
    groups: Groups | None = None,
    stabilizers: Stabilizers | None = None,
    **params: Any,
) -> str:
    """Print, and return, which parameters the optimizer `name` would treat how.

    One line a group (role, method, learning rate, weight decay, tensors, numbers), then its parameters, with the
    numbers of layers collapsed: `model.layers.*.mixer.q_proj.weight ×6`.
    """
    spec = OPTIMIZERS.get(name)
    settings = spec.params.from_dict(params, name)
    param_groups, lines = parameter_groups(model, spec, settings, groups), []
    for stabilizer, wanted in _check_stabilizers(spec, settings, stabilizers).items():
        param_groups = load(STABILIZERS.get(stabilizer).implementation)(model, wanted).regroup(param_groups)
    for group in param_groups:
        tensors = [p for _, p in group["params"]]
        kind = f" ({group['kind']}, {group['layout']})" if "kind" in group else ""
        own = " ".join(f"{key}={group[key]}" for key in GROUP_PARAMS if key in group)
        lines.append(
            f"{group['role']}{kind}: {group.get('method', name)} {own}: {len(tensors)} tensors, "
            f"{sum(p.numel() for p in tensors):,} numbers"
        )
        counts: dict[tuple[str, tuple[int, ...]], int] = {}
        for full, p in group["params"]:
            key = (".".join("*" if part.isdigit() else part for part in full.split(".")), tuple(p.shape))
            counts[key] = counts.get(key, 0) + 1
        lines += [f"    {short} {list(shape)}" + (f" ×{n}" if n > 1 else "") for (short, shape), n in counts.items()]
    text = "\n".join(lines)
    print(text)
    return text


# ---------------------------------------------------------------------- transformers' Trainer


class OptimizerFactory:
    """First item of `optimizer_cls_and_kwargs`: `Trainer` calls `OptimizerFactory()(model, **kwargs)`."""

    def __call__(
        self,
        model: nn.Module,
        /,
        *,
        name: str,
        groups: Groups | None = None,
        stabilizers: Stabilizers | None = None,
        root: nn.Module | None = None,
        params: HandedOver | None = None,
        optimizer_dict: HandedOver | None = None,
        **values: Any,
    ) -> torch.optim.Optimizer:
        """`create_optimizer(model, name, groups=…, stabilizers=…, **values)`.

        Args:
            model: What the Trainer trains.
            name, groups, stabilizers, values: As for `create_optimizer`.
            root: What has `model` and more, as a loss with weights of its own.
            params, optimizer_dict: The parameter groups of a subclass of Trainer that chooses them itself. Only these
                parameters are trained; a learning rate of such a group counts, its other settings follow the roles.

        Raises:
            ValueError: As `create_optimizer`; a parameter handed over belongs to no module that is known.
        """
        spec = OPTIMIZERS.get(name)
        settings = spec.params.from_dict(values, name)
        root = model if root is None else root
        outside = root is not model and any(module is model for module in root.modules())
        infos = classify(root, model if outside else None)
        handed = params if params is not None else optimizer_dict
        if handed is None:
            return _build(model, spec, settings, stabilizers, parameter_groups(root, spec, settings, groups, infos))
        rates = {id(p): group.get("lr") for group in handed for p in group["params"]}
        if unknown := len(rates.keys() - {info.parameter_id for info in infos}):
            raise ValueError(
                f"{name!r} treats parameters by the module they belong to, but {unknown} of those that the Trainer "
                "hands over belong to no module it knows of. Make them part of the model, or of the loss module."
            )
        infos = [info for info in infos if info.parameter_id in rates]
        param_groups = parameter_groups(root, spec, settings, groups, infos)
        return _build(model, spec, settings, stabilizers, list(_with_rates(param_groups, rates)))


def _with_rates(param_groups: list[dict[str, Any]], rates: Mapping[int, float | None]) -> Iterator[dict[str, Any]]:
    """The groups, parted where parameters (by id) have learning rates of their own."""
    for group in param_groups:
        for rate in dict.fromkeys(rates[id(p)] for _, p in group["params"]):
            chosen = [(name, p) for name, p in group["params"] if rates[id(p)] == rate]
            yield {**group, "params": chosen} | ({} if rate is None else {"lr": rate})


def trainer_optimizer(
    name: str, *, groups: Groups | None = None, stabilizers: Stabilizers | None = None, **params: Any
) -> tuple[type[OptimizerFactory], dict[str, Any]]:
    """The `optimizer_cls_and_kwargs` of transformers' `Trainer`.

    `Trainer(model, args, optimizer_cls_and_kwargs=fhf.trainer_optimizer("lion", lr=3e-4), …)`. The hyperparameters are
    those given here; `TrainingArguments`' learning rate, betas and weight decay play no part, except those that
    `Trainer.hyperparameter_search` is searching. Add `callbacks=fhf.trainer_callbacks(name)` where
    `optimizer_spec(name).needs` is "callback".

    Subclasses of Trainer that hand parameter groups to their optimizer, as those of sentence-transformers do with the
    weights of the loss, have these trained.

    Args:
        name, groups, stabilizers, params: As for `create_optimizer`.

    Raises:
        ValueError: As `create_optimizer`, at once.
    """
    spec = OPTIMIZERS.get(name)
    settings = spec.params.from_dict(params, name)
    _check_groups(spec, settings, groups)
    _check_stabilizers(spec, settings, stabilizers)
    return OptimizerFactory, {"name": name, "groups": groups, "stabilizers": stabilizers, **params}


def trainer_callbacks(name: str) -> list[Any]:
    """The callbacks `Trainer` needs beside the optimizer called `name`; often none."""
    spec = OPTIMIZERS.get(name)
    return [load(spec.callback)()] if spec.callback else []
