"""Rotary position embeddings with transformers' `rope_parameters`, for heads of any width."""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .ops.numerics import at_least_fp32


def rotary_frequencies(config: Any, width: int, device: torch.device, length: int | None) -> tuple[Tensor, float]:
    """Inverse frequencies [rotated width / 2] and the factor on cos and sin, for heads of `width` channels.

    Args:
        config: Gives `rope_parameters` and `max_position_embeddings`.
        width: Head width; if it is odd, or `partial_rotary_factor` says so, the last channels are not rotated.
        device: Where to put the frequencies.
        length: Longest position + 1, for scaling types that depend on it.
    """
    parameters = config.rope_parameters
    rope_type = parameters.get("rope_type", "default")
    if rope_type == "default":
        rotated = int(width * parameters.get("partial_rotary_factor", 1.0)) // 2 * 2
        exponents = torch.arange(0, rotated, 2, device=device, dtype=torch.float) / max(rotated, 1)
        return parameters["rope_theta"] ** -exponents, 1.0
    sized = copy.copy(config)
    sized.__dict__["head_dim"] = width // 2 * 2  # past the check of values: it may be 0
    return ROPE_INIT_FUNCTIONS[rope_type](sized, device, seq_len=length)


class RotaryEmbedding:
    """cos and sin for any head width; keeps no buffers, so nothing can be lost between saving and loading."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __call__(self, positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Positions [B, T] -> cos, sin [B, T, rotated width] in fp32."""
        parameters = self.config.rope_parameters
        depends_on_length = parameters.get("rope_type", "default") in ("dynamic", "longrope")
        length = int(positions.max()) + 1 if depends_on_length else None
        frequencies, factor = rotary_frequencies(self.config, width, positions.device, length)
        angles = positions[..., None].float() * frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos() * factor, angles.sin() * factor


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first channels of `x` [B, H, T, W] by cos, sin [B or 1, T, w], w ≤ W; computed in at least fp32."""
    if x.shape[-1] < 2:
        return x
    cos, sin = cos[:, None], sin[:, None]
    rotated, rest = at_least_fp32(x[..., : cos.shape[-1]]), x[..., cos.shape[-1] :]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat([-second, first], dim=-1) * sin
    rotated = rotated.to(x.dtype)
    return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated
