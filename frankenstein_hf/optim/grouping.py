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
`optimizer_kinds`, e.g. `{"memory": "matrix", "slots": "vector"}`. Of a parametrized weight (weight norm, spectral norm)
the direction counts as the weight and a magnitude as a vector.

Which modules of our own stacks are mixers is what their specs say; in other models it is those whose class is called
Attention, Mixer or DeltaNet. Beside the base model, the layers that make the output are heads; a hidden layer of a
head, whose output another layer there reads, is a matrix like any other.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.weight_norm import WeightNorm

from ..configuration.component import did_you_mean
from .matrices import LAYOUTS

KINDS = ("matrix", "table", "vector")
ROLES = ("embeddings", "norms", "attention", "other")
NO_DECAY = ("embeddings", "norms")

_OTHER_MIXERS = re.compile(r"Mixer|Attention|DeltaNet")  # of models that are not ours
_NORM = re.compile(r"Norm(?!al)")


@dataclass(frozen=True)
class ParameterInfo:
    """A trainable parameter and what it is.

    Attributes:
        name: Its first name in the model.
        parameter: The parameter.
        role: "embeddings", "norms", "attention" or "other".
        kind: "matrix", "table" or "vector".
        layout: How it is a matrix: "flatten" for convolutions, "transpose" for GPT-2's layers, "stack" otherwise (see
            `matrices.as_matrices`).
    """

    name: str
    parameter: nn.Parameter
    role: str
    kind: str
    layout: str

    @property
    def parameter_id(self) -> int:
        """What tells parameters apart."""
        return id(self.parameter)


def _is_a(module: nn.Module, pattern: re.Pattern) -> bool:
    """Whether a class of the module is called so; by name, because a Hub bundle has classes of its own."""
    return any(pattern.search(cls.__name__) for cls in type(module).__mro__ if cls is not nn.Module)


def _in_mixers(model: nn.Module) -> set[int]:
    """Ids of the modules that are, or are inside, a sequence mixer."""
    ours: set[int] = set()
    inside: set[int] = set()
    for module in model.modules():
        layers, spec_for = getattr(module, "layers", None), getattr(_config(module), "mixer_spec_for", None)
        if not isinstance(layers, nn.ModuleList) or spec_for is None:
            continue
        ours |= {id(part) for part in layers.modules()}
        for index, layer in enumerate(layers):
            if spec_for(index) is not None:
                inside |= {id(part) for part in layer.mixer.modules()}  # type: ignore[union-attr]
    for module in model.modules():
        if id(module) not in ours and _is_a(module, _OTHER_MIXERS):
            inside |= {id(part) for part in module.modules()}
    return inside


def _config(module: nn.Module) -> Any:
    return getattr(module, "config", None)


def _heads(model: nn.Module, base: nn.Module | None = None) -> set[int]:
    """Ids of the parameters of output heads: the language-model head and those that stand beside the base model.

    Args:
        model: The whole.
        base: What is beside; by default the base model of a model of transformers.
    """
    inner = getattr(model, "get_base_model", lambda: model)()  # PEFT
    output = getattr(inner, "get_output_embeddings", lambda: None)()
    heads = {id(p) for p in output.parameters()} if isinstance(output, nn.Module) else set()
    if base is None:
        base = getattr(inner, "base_model", inner)
    if not isinstance(base, nn.Module) or base is inner:
        return heads
    of_base = {id(module) for module in base.modules()}
    beside = [module for module in inner.modules() if id(module) not in of_base]
    widths = [_widths(module) for module in beside]
    hidden = {
        id(p)
        for i, module in enumerate(beside)
        if module is not output
        and widths[i][1] is not None
        # its output is what the language-model head or a later layer reads
        and widths[i][1] in (_widths(output)[0], *(wide for wide, _ in widths[i + 1 :]))
        for p in module.parameters()
    }
    return heads | ({id(p) for p in inner.parameters()} - {id(p) for p in base.parameters()} - hidden)


def _widths(module: Any) -> tuple[int | None, int | None]:
    """Numbers of inputs and outputs of a linear layer."""
    if type(module).__name__ == "Conv1D":
        return module.nx, module.nf
    return getattr(module, "in_features", None), getattr(module, "out_features", None)


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
    if _is_a(module, _NORM) or p.dim() < 2 or _is_magnitude(module, name):
        return "vector", "stack"
    if isinstance(module, nn.modules.conv._ConvNd):
        return ("vector", "stack") if module.groups > 1 and p.shape[1] == 1 else ("matrix", "flatten")
    if type(module).__name__ == "Conv1D":  # GPT-2's, [in, out]
        return "matrix", "transpose"
    if hasattr(module, "in_features") or isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
        return "matrix", "stack"
    # a parameter without a layer of its own: decays, gates, slots of a mixer; elsewhere, with three axes, experts
    experts = not in_mixer and sum(size > 1 for size in p.shape) >= 3
    return ("matrix" if experts else "vector"), "stack"


def _is_magnitude(module: nn.Module, name: str) -> bool:
    """Whether a parameter is the magnitude that `torch.nn.utils.weight_norm` has taken out of a weight."""
    hooks = module._forward_pre_hooks.values()
    return any(isinstance(hook, WeightNorm) and name == f"{hook.name}_g" for hook in hooks)


def _owned(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Every parameter's full name, owner and name there. A parametrized weight is its layer's, a magnitude nobody's."""
    modules = dict(model.named_modules())
    for path, module in modules.items():
        for name, p in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            if isinstance(module, ParametrizationList):
                layer, _, weight = path.removesuffix(".").rpartition("parametrizations.")
                magnitude = isinstance(module[0], _WeightNorm) and name == "original0"
                yield (full, nn.Module(), name, p) if magnitude else (full, modules[layer.rstrip(".")], weight, p)
            else:
                yield full, module, name, p


def classify(model: nn.Module, trained: nn.Module | None = None) -> list[ParameterInfo]:
    """What every trainable parameter of `model` is, each once: shared ones under their first name.

    Args:
        model: Any module.
        trained: A part of it, if the rest is a loss with weights of its own: that counts as a head.
    """
    heads = _heads(model) if trained is None else _heads(trained) | _heads(model, trained)
    in_mixers, infos = _in_mixers(model), dict[int, ParameterInfo]()
    # a table shared with a Linear is a table, whichever comes first
    tables = {id(p) for _, owner, name, p in _owned(model) if _kind(owner, name, p, False)[0] == "table"}
    for full, owner, name, p in _owned(model):
        if not p.requires_grad or id(p) in infos:
            continue
        in_mixer = id(owner) in in_mixers
        kind, layout = _kind(owner, name, p, in_mixer)
        if id(p) in tables or (id(p) in heads and p.dim() >= 2):
            kind, layout = "table", "stack"
        role = {"table": "embeddings", "vector": "norms"}.get(kind, "attention" if in_mixer else "other")
        infos[id(p)] = ParameterInfo(full, p, role, kind, layout)
    return list(infos.values())


def split(infos: list[ParameterInfo], by_kind: bool) -> Iterator[tuple[str, list[ParameterInfo]]]:
    """(role, parameters) of every group that is not empty, in the order of `ROLES`.

    With `by_kind`, parameters of one group also share their layout: convolutions are apart from other matrices.
    """
    for role in ROLES:
        for layout in LAYOUTS if by_kind else (None,):
            if chosen := [info for info in infos if info.role == role and layout in (None, info.layout)]:
                yield role, chosen
