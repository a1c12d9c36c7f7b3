"""Several linear maps of one input as one matrix product, without touching the modules that hold the weights.

One large product is faster than several small ones, above all for single tokens. The modules stay what they are:
`state_dict` keys, adapters, hooks and quantised replacements see nothing of this. Whatever is more than a plain
`nn.Linear` is called as a module, all of them then.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FEW_TOKENS = 16  # up to here copying the weights would cost as much as the product: the joint weight is kept


class JointWeights:
    """Joint weights kept from call to call while nothing is trained. They are never saved or copied."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, ...], tuple[Any, Tensor, Tensor | None]] = {}

    def __deepcopy__(self, memo: Any) -> "JointWeights":
        return JointWeights()

    def __reduce__(self) -> Any:
        return JointWeights, ()


def is_plain(module: nn.Module) -> bool:
    """Whether calling the module is F.linear with its weight and bias, and nobody watches the call."""
    return (
        type(module) is nn.Linear
        and type(module.weight) in (nn.Parameter, Tensor)
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
        and "forward" not in module.__dict__
    )


def joint_linear(owner: nn.Module, names: tuple[str, ...], x: Tensor, kept: JointWeights) -> Tensor:
    """What `owner`'s linear maps called `names` return for x [..., D], side by side."""
    linears = [getattr(owner, name) for name in names]
    if len(linears) == 1 or torch.compiler.is_compiling() or not all(is_plain(linear) for linear in linears):
        return torch.cat([linear(x) for linear in linears], dim=-1) if len(linears) > 1 else linears[0](x)
    if torch.is_grad_enabled() or x.numel() > FEW_TOKENS * x.shape[-1]:
        return F.linear(x, *_joined(linears))
    stamp = [(y.data_ptr(), _version(y)) for linear in linears for y in (linear.weight, linear.bias) if y is not None]
    found = kept.kept.get(names)
    if found is None or found[0] != stamp:
        found = kept.kept[names] = (stamp, *_joined(linears))
    return F.linear(x, found[1], found[2])


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version  # inference tensors do not count their changes, nor are they changed


def _joined(linears: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    weight = torch.cat([linear.weight for linear in linears])
    if all(linear.bias is None for linear in linears):
        return weight, None
    return weight, torch.cat(
        [linear.weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias for linear in linears]
    )
