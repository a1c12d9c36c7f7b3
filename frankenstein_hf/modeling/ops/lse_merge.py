"""Merging softmaxes over disjoint sets of keys into the softmax over their union.

A partial softmax is its output o_p = Σ_j exp(s_j) v_j / Z_p and the logarithm of its denominator, ln Z_p. The union has
Z = Σ_p Z_p and o = Σ_p (Z_p / Z) o_p, whatever the parts were: a window and its sinks, globals, selected blocks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .numerics import at_least_fp32


def merge_partial_softmax(outputs: Sequence[Tensor], log_sum_exps: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Combine partial softmax attentions.

    Args:
        outputs: P tensors [..., D], the attention output of each part.
        log_sum_exps: P tensors [...], the log of each part's softmax denominator; -inf where a part saw nothing (its
            output there is ignored, NaN included).

    Returns:
        The output [..., D] in the dtype of the first output and its log-sum-exp [...] in at least fp32. Where no part
        saw anything: zero and -inf. Gradients are finite everywhere.

    Raises:
        ValueError: if there are no parts, not equally many of both, or shapes that do not match.
    """
    if not outputs or len(outputs) != len(log_sum_exps):
        raise ValueError(
            f"merge_partial_softmax wants as many outputs as log_sum_exps, at least one; got {len(outputs)} and "
            f"{len(log_sum_exps)}"
        )
    for output, lse in zip(outputs, log_sum_exps):
        if output.shape[:-1] != lse.shape or output.shape != outputs[0].shape:
            raise ValueError(
                "merge_partial_softmax wants outputs [..., D] of one shape and log_sum_exps [...]; got "
                f"{list(output.shape)} and {list(lse.shape)} beside {list(outputs[0].shape)}"
            )
    lses = [at_least_fp32(lse) for lse in log_sum_exps]
    with torch.no_grad():  # the reference cancels, so it needs no gradient
        reference = torch.stack(lses).amax(0)
        reference = reference.masked_fill(reference == -torch.inf, 0)
    masses = [(lse - reference).exp() for lse in lses]
    total = torch.stack(masses).sum(0)
    saw_nothing = total == 0
    safe_total = total.masked_fill(saw_nothing, 1)  # keeps 0/0 and log(0) out of the backward pass too
    merged = torch.zeros_like(at_least_fp32(outputs[0]))
    for output, lse, mass in zip(outputs, lses, masses):
        seen = at_least_fp32(output).masked_fill((lse == -torch.inf)[..., None], 0)
        merged = merged + (mass / safe_total)[..., None] * seen
    lse = (reference + safe_total.log()).masked_fill(saw_nothing, -torch.inf)
    return merged.to(outputs[0].dtype), lse
