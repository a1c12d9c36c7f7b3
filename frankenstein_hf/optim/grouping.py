"""Which parameter is what: roles for per-group settings, kinds for methods that treat matrices specially.

| role       | kind   | what                                                                  | decays |
|------------|--------|-----------------------------------------------------------------------|--------|
| embeddings | table  | embedding tables, also those inside mixers; output heads, tied or not | no     |
| norms      | vector | norms, biases, all 1-D tensors, decays, gates and slots of mixers     |        |
|            |        | (A_log, D, dt_bias …), depthwise convolutions                         | no     |
| attention  | matrix | all other matrices inside a sequence mixer                            | yes    |
| other      | matrix | all other matrices                                                    | yes    |

Decided by the type of the module that owns a parameter and by its shape, not by its name. Linear layers, and
convolutions that mix channels, are matrices. Parameters without such a layer are vectors inside a mixer; elsewhere
those with three or more axes are stacks of matrices (experts). A module can overrule with a class attribute
`optimizer_kinds`, e.g. `{"memory": "matrix", "slots": "vector"}`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from ..configuration.component import did_you_mean

KINDS = ("matrix", "table", "vector")
ROLES = ("embeddings", "norms", "attention", "other")
NO_DECAY = ("embeddings", "norms")

_MIXER = re.compile(r"Mixer|Attention|DeltaNet")
_NORM = re.compile(r"Norm(?!al)")


@dataclass(frozen=True)
class ParameterInfo:
    """A trainable parameter and what it is.

    Attributes:
        name: Its first name in the model.
        parameter: The parameter.
        role: "embeddings", "norms", "attention" or "other".
        kind: "matrix", "table" or "vector".
        layout: How it is a matrix: "flatten" for convolutions, "stack" otherwise (see `matrices.as_matrices`).
    """

    name: str
    parameter: nn.Parameter
    role: str
    kind: str
    layout: str


def _is_a(module: nn.Module, pattern: re.Pattern) -> bool:
    """Whether a class of the module is called so; by name, because a Hub bundle has classes of its own."""
    return any(pattern.search(cls.__name__) for cls in type(module).__mro__ if cls is not nn.Module)


def _heads(model: nn.Module) -> set[int]:
    """Ids of the parameters of output heads: the language-model head and whatever stands beside the base model."""
    inner = getattr(model, "get_base_model", lambda: model)()  # PEFT
    get_head = getattr(inner, "get_output_embeddings", lambda: None)
    head, base = get_head(), getattr(inner, "base_model", inner)
    heads = {id(p) for p in head.parameters()} if isinstance(head, nn.Module) else set()
    if isinstance(base, nn.Module) and base is not inner:
        heads |= {id(p) for p in inner.parameters()} - {id(p) for p in base.parameters()}
    return heads


def _kind(module: nn.Module, name: str, p: nn.Parameter, in_mixer: bool) -> tuple[str, str]:
    """Kind and layout from the owner's type, its place and the shape."""
    declared = getattr(module, "optimizer_kinds", {}).get(name)
    if declared is not None:
        if declared not in KINDS:
            raise ValueError(
                f"{type(module).__name__}.optimizer_kinds[{name!r}] = {declared!r}" + did_you_mean(declared, KINDS)
            )
        return declared, "stack"
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "table", "stack"
    if _is_a(module, _NORM) or p.dim() < 2:
        return "vector", "stack"
    if isinstance(module, nn.modules.conv._ConvNd):
        return ("vector", "stack") if module.groups > 1 and p.shape[1] == 1 else ("matrix", "flatten")
    linear = hasattr(module, "in_features") or type(module).__name__ == "Conv1D"  # GPT-2's
    if linear or isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
        return "matrix", "stack"
    # a parameter without a layer of its own: decays, gates, slots of a mixer; elsewhere, with three axes, experts
    experts = not in_mixer and sum(size > 1 for size in p.shape) >= 3
    return ("matrix" if experts else "vector"), "stack"


def classify(model: nn.Module) -> list[ParameterInfo]:
    """What every trainable parameter of `model` is, each once: shared ones under their first name."""
    heads = _heads(model)
    mixers = {name for name, module in model.named_modules() if _is_a(module, _MIXER)}
    infos: dict[int, ParameterInfo] = {}
    # a table shared with a Linear is a table, whichever comes first
    tables = {
        id(p)
        for module in model.modules()
        for name, p in module.named_parameters(recurse=False)
        if _kind(module, name, p, False)[0] == "table"
    }
    for path, module in model.named_modules():
        in_mixer = any(path == mixer or path.startswith(f"{mixer}.") for mixer in mixers)
        for name, p in module.named_parameters(recurse=False):
            if not p.requires_grad or id(p) in infos:
                continue
            kind, layout = _kind(module, name, p, in_mixer)
            if id(p) in tables or (id(p) in heads and p.dim() >= 2):
                kind, layout = "table", "stack"
            role = {"table": "embeddings", "vector": "norms"}.get(kind, "attention" if in_mixer else "other")
            infos[id(p)] = ParameterInfo(f"{path}.{name}" if path else name, p, role, kind, layout)
    return list(infos.values())


def split(infos: list[ParameterInfo], by_kind: bool) -> Iterator[tuple[str, list[ParameterInfo]]]:
    """(role, parameters) of every group that is not empty, in the order of `ROLES`.

    With `by_kind`, parameters of one group also share their layout: convolutions are apart from other matrices.
    """
    for role in ROLES:
        for layout in ("stack", "flatten") if by_kind else (None,):
            if chosen := [info for info in infos if info.role == role and layout in (None, info.layout)]:
                yield role, chosen
