"""Sizes that defaults shrink to when a small model cannot meet them."""

from typing import Any

from transformers.utils import logging

logger = logging.get_logger(__name__)


def largest_divisor(number: int, at_most: int) -> int:
    """The largest divisor of `number` that is not above `at_most`; 1 if `at_most` is below 1."""
    return next((n for n in range(min(number, at_most), 1, -1) if number % n == 0), 1)


def divided(name: str, value: int, divisor: int, owner: str, explicit: bool) -> int:
    """`value`, which `divisor` must divide: a default is rounded down to a multiple, never below `divisor`.

    Args:
        name: Of the parameter, for messages.
        value: What was given, or the default.
        divisor: What has to divide it.
        owner: What the divisor is, for messages, e.g. "num_attention_heads".
        explicit: Whether the user wrote the value.

    Raises:
        ValueError: An explicit value is no multiple.
    """
    if value % divisor == 0:
        return value
    if explicit:
        raise ValueError(f"{name}={value} must be divisible by {owner}={divisor}.")
    rounded = max(divisor, value // divisor * divisor)
    logger.debug("%s=%d becomes %d, a multiple of %s=%d", name, value, rounded, owner, divisor)
    return rounded


def dividing(name: str, value: int, whole: int, owner: str, explicit: bool) -> int:
    """`value`, which must divide `whole`: a default shrinks to the largest divisor.

    Raises:
        ValueError: An explicit value does not divide.
    """
    if whole % value == 0:
        return value
    if explicit:
        raise ValueError(f"{name}={value} must divide {owner}={whole}.")
    shrunk = largest_divisor(whole, value)
    logger.debug("%s=%d shrinks to %d, a divisor of %s=%d", name, value, shrunk, owner, whole)
    return shrunk


def rotated_width(width: int | None, config: Any) -> int:
    """Width of a rotary part beside the heads: half a head by default, and even; 0 stays 0.

    Raises:
        ValueError: An odd width.
    """
    if width is None:
        return max(2, config.head_dim // 4 * 2)
    if width % 2:
        raise ValueError(f"rope_head_dim={width} must be even: rotary positions turn pairs of channels.")
    return width
