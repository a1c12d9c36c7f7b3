"""Several linear maps of one input as one matrix product, without touching the modules that hold the weights.

One large product is faster than several small ones, above all for single tokens. The modules stay what they are:
`state_dict` keys, adapters, hooks and quantised replacements see nothing of this. Whatever is more than a plain
`nn.Linear` is called as a module, all of them then.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FEW_TOKENS = 16  # up to here joining the weights would cost more than several products do


def is_plain(module: nn.Module) -> bool:
    """Whether calling the module is F.linear with its weight and bias, and nobody watches the call."""
    return (
        type(module) is nn.Linear
        and type(module.weight) in (nn.Parameter, Tensor)
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
        and "forward" not in module.__dict__
    )


def joint_linear(owner: nn.Module, names: tuple[str, ...], x: Tensor) -> Tensor:
    """What `owner`'s linear maps called `names` return for x [..., D], side by side.

    Joint weights are never kept: a change of the weights through `.data`, or by a fused optimizer, leaves no trace that
    would tell that they are out of date.
    """
    linears = [getattr(owner, name) for name in names]
    if len(linears) == 1:
        return linears[0](x)
    if torch.compiler.is_compiling() or _few(x) or not all(is_plain(linear) for linear in linears):
        return torch.cat([linear(x) for linear in linears], dim=-1)
    return F.linear(x, *_joined(linears))


def _few(x: Tensor) -> bool:
    """Not asked while a graph is traced, which would hold for few tokens, or for many, only."""
    return not torch.is_grad_enabled() and x.numel() <= FEW_TOKENS * x.shape[-1]


def _joined(linears: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    weight = torch.cat([linear.weight for linear in linears])
    if all(linear.bias is None for linear in linears):
        return weight, None
    return weight, torch.cat(
        [linear.weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias for linear in linears]
    )
