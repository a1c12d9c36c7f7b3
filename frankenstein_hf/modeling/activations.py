"""Activation functions without weights; [..., F] -> [..., F] in the dtype of the input.

Those of the negative side see min(x, 0) only: the branch that is not taken must not overflow, or its gradient is NaN.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from .implementations import implementation


def make_activation(config: Any, layer_idx: int, width: int) -> nn.Module:
    """The activation `config` names for a layer, over `width` channels."""
    spec, params = config.component("activation", layer_idx)
    if spec is None:
        return ACT2FN[params]
    return implementation(spec)(width, **vars(params))


class Elementwise(nn.Module):
    """Base: the parameters of the spec are attributes.

    Args:
        width: Channels F, which only those with weights need.
        params: Parameters of the spec.
    """

    def __init__(self, width: int, **params: Any) -> None:
        super().__init__()
        self.__dict__.update(params)

    def __getattr__(self, name: str) -> Any:  # for type checkers: attributes come from the spec
        return super().__getattr__(name)


class SiLU(Elementwise):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x)


class Swish(Elementwise):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x) if self.beta == 1 else x * torch.sigmoid(self.beta * x)


class GELU(Elementwise):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class GELUTanh(Elementwise):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


class ReLU(Elementwise):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x)


class Sigmoid(Elementwise):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)


class Tanh(Elementwise):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class Identity(Elementwise):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Mish(Elementwise):
    def forward(self, x: Tensor) -> Tensor:
        return F.mish(x)


class LeakyReLU(Elementwise):
    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, self.slope)


class ReLU6(Elementwise):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(x)


class Hardswish(Elementwise):
    def forward(self, x: Tensor) -> Tensor:
        return F.hardswish(x)


class Arctan(Elementwise):
    def forward(self, x: Tensor) -> Tensor:
        return torch.arctan(x)


class Softsign(Elementwise):
    def forward(self, x: Tensor) -> Tensor:
        return F.softsign(x)


class Softplus(Elementwise):
    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(x)


class ELU(Elementwise):
    def forward(self, x: Tensor) -> Tensor:
        return F.elu(x, self.alpha)


class SELU(Elementwise):
    def forward(self, x: Tensor) -> Tensor:
        return F.selu(x)


class CELU(Elementwise):
    def forward(self, x: Tensor) -> Tensor:
        return F.celu(x, self.alpha)


class VReLU(Elementwise):
    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


class BReLU(Elementwise):
    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(0, self.threshold)


class LiSHT(Elementwise):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tanh(x)


class AbsReLU(Elementwise):
    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x >= 0, x, -self.a * x)


class NLReLU(Elementwise):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log1p(self.beta * F.relu(x))


class Hexpo(Elementwise):
    def forward(self, x: Tensor) -> Tensor:
        above, below = x.clamp_min(0), x.clamp_max(0)
        if self.form == "linear":
            return self.a * above + self.c * below
        return self.c * torch.expm1(below / self.d) - self.a * torch.expm1(-above / self.b)


class PTanh(Elementwise):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        return torch.where(x >= 0, y, self.a * y)


class DisReLU(Elementwise):
    def forward(self, x: Tensor) -> Tensor:
        if self.form == "shifted":
            return F.relu(x - (self.delta or 0.0))
        return x.clamp_min(-0.05 if self.delta is None else -self.delta)


class ELiSH(Elementwise):
    def gate(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x >= 0, x, torch.expm1(x.clamp_max(0))) * self.gate(x)


class HardELiSH(ELiSH):
    def gate(self, x: Tensor) -> Tensor:
        return F.relu6(x + 3) / 6 if self.hard_sigmoid == "relu6" else ((x + 1) / 2).clamp(0, 1)
