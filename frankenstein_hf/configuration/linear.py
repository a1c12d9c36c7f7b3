"""What the parameters of linear attention and of the delta rule share: widths of heads, and the short convolution."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from .component import Params, param


@dataclass(frozen=True, kw_only=True)
class WidthParams(Params):
    """Widths of keys and values, as published checkpoints of this family have them."""

    expand_k: float = param(1.0, "width of a query and key head in units of head_dim", minimum=1e-6, maximum=1024.0)
    expand_v: float = param(1.0, "width of a value head in units of head_dim", minimum=1e-6, maximum=1024.0)

    def key_dim(self, config: Any) -> int:
        """K, channels of a query or key head."""
        return round(self.expand_k * config.head_dim)

    def value_dim(self, config: Any) -> int:
        """V, channels of a value head."""
        return round(self.expand_v * config.head_dim)

    def resolve(self, config: Any, explicit: frozenset[str]) -> Self:
        for name in ("expand_k", "expand_v"):
            width = getattr(self, name) * config.head_dim
            if round(width) < 1 or abs(width - round(width)) > 1e-6:
                raise ValueError(
                    f"{name}={getattr(self, name)} makes heads {width:g} wide at head_dim={config.head_dim}; their "
                    "width must be a whole number, at least 1."
                )
        return self


@dataclass(frozen=True, kw_only=True)
class ConvolutionParams(Params):
    """The short convolution on q, k and v, and the activation behind it."""

    use_short_conv: bool = param(True, "short causal convolution on q, k and v")
    conv_kernel: int = param(4, "taps of the short convolution", minimum=1, maximum=1024)
    activation: str | None = param("silu", "of q, k and v, convolved or not", choices=("silu", "identity"))

    @classmethod
    def upgraded(cls, values: Mapping[str, Any], version: str) -> Mapping[str, Any]:
        # up to 0.1.0 the activation was part of the convolution
        if cls.named(values, "").get("use_short_conv", cls.use_short_conv) or "activation" in values:
            return values
        return {**values, "activation": "identity"}

    def tail_floats(self, width: int) -> int:
        """Floats of the convolution's tail over `width` channels."""
        return width * (self.conv_kernel - 1) if self.use_short_conv else 0


def linear_state_floats(params: Any, config: Any) -> int:
    """A K×V matrix per head, and the convolution's tail where there is one."""
    K, V = params.key_dim(config), params.value_dim(config)
    tail = params.tail_floats(2 * K + V) if isinstance(params, ConvolutionParams) else 0
    return config.num_attention_heads * (K * V + tail)
