"""Optimizers by name: `create_optimizer(model, "lion")`, grouped by role, in plain loops and in `Trainer`."""

from .create import (
    create_optimizer,
    describe_groups,
    list_optimizers,
    list_stabilizers,
    optimizer_spec,
    stabilizer_spec,
    trainer_callbacks,
    trainer_optimizer,
)

__all__ = [
    "create_optimizer",
    "describe_groups",
    "list_optimizers",
    "list_stabilizers",
    "optimizer_spec",
    "stabilizer_spec",
    "trainer_callbacks",
    "trainer_optimizer",
]
