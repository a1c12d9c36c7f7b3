"""Losses over classes: a vocabulary, labels of sequences and tokens, places of a span, choices.

With all options off a model uses transformers' own functions. The two options here, `fixed_cross_entropy` and
`label_smoothing`, need functions of our own with the same signatures, because transformers' end in a cross-entropy that
takes neither.

Shapes: N rows, V classes.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers.loss.loss_utils import LOSS_MAPPING

from .ops.numerics import at_least_fp32

IGNORED = -100  # what transformers' losses and `num_items_in_batch` leave out
SLICE = 1 << 20  # logits worked on at a time: the copies of one slice stay in the processor's cache


class _CancellationFree(torch.autograd.Function):
    """softplus(r − z_t) of every row, r = log Σ_{j≠t} exp z_j, keeping the logits and r only."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        rest = [
            at_least_fp32(z).scatter(1, t[:, None], -torch.inf).logsumexp(1)
            for z, t in zip(*_slices(logits, targets), strict=True)
        ]
        others = torch.cat(rest) if rest else at_least_fp32(logits.new_zeros(0))
        chosen = at_least_fp32(logits.gather(1, targets[:, None])[:, 0])
        ctx.save_for_backward(logits, targets, others, chosen)
        return F.softplus(others - chosen, threshold=torch.inf)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, targets, others, chosen = ctx.saved_tensors
        # what the other classes get together, 1 − q_t, without the subtraction
        share = torch.sigmoid(others - chosen) * grad
        others = others.nan_to_num(neginf=0.0)  # no other class is possible: its share is zero
        result = torch.empty_like(logits)
        for out, z, t, r, s in zip(*_slices(result, logits, targets, others, share), strict=True):
            weights = (at_least_fp32(z) - r[:, None]).scatter_(1, t[:, None], -torch.inf).exp_().mul_(s[:, None])
            out.copy_(weights.scatter_(1, t[:, None], -s[:, None]))
        return result, None


def _slices(first: Tensor, *others: Tensor) -> list[tuple[Tensor, ...]]:
    rows = max(1, SLICE // max(1, first.shape[1]))
    return [x.split(rows) for x in (first, *others)]


def cancellation_free_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """−log softmax(logits)[target] of every row, exact where the right class is far ahead.

    log Σ exp z − z_t is zero as soon as the target leads by 16.6 (fp32; 5.5 in bf16), and with it the target's
    gradient, while the other classes still get theirs: the row's gradient no longer sums to zero. Here the loss is
    softplus(log Σ_{j≠t} exp z_j − z_t), in which nothing cancels; it stays alive to a lead of 87.

    Args:
        logits: [N, V] in any floating dtype, which is not widened as a whole: statistics of rows are in at least fp32.
        targets: [N] classes, all of them from 0 to V − 1.

    Returns:
        [N] losses, at least fp32. They can be differentiated once.
    """
    return _CancellationFree.apply(logits, targets)


def class_loss(
    logits: Tensor,
    targets: Tensor,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = IGNORED,
    *,
    fixed: bool = False,
    label_smoothing: float = 0.0,
    **_: Any,
) -> Tensor:
    """Cross-entropy of N rows: their mean, or their sum over `num_items_in_batch`.

    Args:
        logits: [N, V].
        targets: [N] classes, `ignore_index` to leave a row out.
        num_items_in_batch: What `Trainer` counted over all accumulated batches.
        ignore_index: See `targets`.
        fixed: Whether to compute it as `cancellation_free_cross_entropy` does, in the logits' own dtype.
        label_smoothing: ε of (1 − ε)·(−log q_t) + ε·mean_k(−log q_k).
    """
    targets = targets.to(logits.device)
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(logits.device)
    if not fixed:
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = F.cross_entropy(
            at_least_fp32(logits),
            targets,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch
    kept = targets != ignore_index
    inside = torch.where(kept, targets, 0)
    V = logits.shape[1]
    if not torch.compiler.is_compiling() and bool(((inside < 0) | (inside >= V)).any()):
        raise IndexError(f"A target is out of bounds: classes are 0 to {V - 1}.")  # as torch's cross_entropy does
    losses = cancellation_free_cross_entropy(logits, inside)
    if label_smoothing:  # −log q_k = (−log q_t) + z_t − z_k
        wide = at_least_fp32(logits)
        losses = losses + label_smoothing * (wide.gather(1, inside[:, None])[:, 0] - wide.mean(1))
    return torch.where(kept, losses, 0).sum() / (kept.sum() if num_items_in_batch is None else num_items_in_batch)


def _next_token(
    logits: Tensor, labels: Tensor, vocab_size: int, shift_labels: Tensor | None = None, **kwargs: Any
) -> Tensor:
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    return class_loss(logits.view(-1, vocab_size), shift_labels.reshape(-1), **kwargs)


def _same_token(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    return class_loss(logits.view(-1, vocab_size), labels.view(-1), **kwargs)


def _sequence(labels: Tensor, logits: Tensor, pooled_logits: Tensor, config: Any, **kwargs: Any) -> Tensor:
    if labels.is_floating_point():
        raise ValueError(
            "fixed_cross_entropy and label_smoothing act on class labels; this head has numbers to learn (problem_type="
            f"{config.problem_type!r}). Set fixed_cross_entropy=False and label_smoothing=0."
        )
    return class_loss(logits.view(-1, config.num_labels), labels.view(-1), **kwargs)


def _token(logits: Tensor, labels: Tensor, config: Any, **kwargs: Any) -> Tensor:
    return class_loss(logits.view(-1, config.num_labels), labels.view(-1), **kwargs)


def _span(
    start_logits: Tensor, end_logits: Tensor, start_positions: Tensor, end_positions: Tensor, **kwargs: Any
) -> Tensor:
    if kwargs["label_smoothing"]:
        raise ValueError(
            f"label_smoothing={kwargs['label_smoothing']} acts on class labels; the places of an answer are none (at "
            "pads −log q has no bound). Set label_smoothing=0 to train this head."
        )
    T = start_logits.shape[1]
    pairs = ((start_logits, start_positions), (end_logits, end_positions))
    start, end = (class_loss(logits, place.clamp(0, T), ignore_index=T, **kwargs) for logits, place in pairs)
    return (start + end) / 2


def choice_loss(logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
    """Cross-entropy over the choices: the mean over rows, or their sum over `num_items_in_batch`.

    Args:
        logits: [B, C].
        labels: [B], −100 to leave a row out.
        kwargs: As `class_loss` takes them.
    """
    return class_loss(logits, labels, **kwargs)


def score_entropy_loss(
    logits: Tensor, targets: Tensor, noise: Tensor, noise_rate: Tensor, mask_token_id: int, num_items: Tensor | float
) -> Tensor:
    """Denoising score entropy of hidden tokens under absorbing noise (SEDD, arXiv 2310.16834): a bound on −log p.

    The best score of y at a hidden token is s_y = p(y) / (exp σ̄ − 1), with p what the visible tokens say of it. The
    logits are log s less what the noise alone decides, −log(exp σ̄ − 1) − log(V − 1), so that their softmax is p.

    Args:
        logits: [M, V] at the hidden tokens.
        targets: [M] the tokens themselves.
        noise: [M] σ̄ > 0.
        noise_rate: [M] σ′.
        mask_token_id: Which of the V is no token to be.
        num_items: Tokens that could have been hidden; the loss is a sum over this.

    Returns:
        Σ σ′ (Σ_{y ≠ mask} s_y − a log s_target + a (log a − 1)) / num_items with a = 1 / (exp σ̄ − 1), at least fp32.
    """
    logits = at_least_fp32(logits)
    log_a = -torch.log(torch.expm1(noise.to(logits.dtype)))
    log_scores = logits + (log_a - math.log(logits.shape[1] - 1))[:, None]
    others = log_scores.masked_fill(torch.arange(logits.shape[1], device=logits.device) == mask_token_id, -torch.inf)
    chosen = log_scores.gather(1, targets[:, None])[:, 0]
    a = log_a.exp()
    losses = others.exp().sum(1) - a * chosen + a * (log_a - 1)
    return (noise_rate.to(losses.dtype) * losses).sum() / num_items


LOSSES: dict[str, Callable[..., Any]] = {
    "ForCausalLM": _next_token,
    "ForMaskedLM": _same_token,
    "ForMultipleChoice": choice_loss,
    "ForQuestionAnswering": _span,
    "ForSequenceClassification": _sequence,
    "ForTokenClassification": _token,
}


def loss_for(loss_type: str | None, config: Any) -> Callable[..., Any]:
    """The loss function of a head: transformers' own, or ours where `config` asks for what that cannot do.

    Args:
        loss_type: transformers' name of a head's loss; None for models without one.
        config: A `FrankensteinConfig`.
    """
    options = dict(fixed=config.fixed_cross_entropy, label_smoothing=config.label_smoothing)
    name = loss_type or "ForCausalLM"
    if any(options.values()) or name not in LOSS_MAPPING:  # transformers has none for choices
        return partial(LOSSES[name], **options)
    found: Any = LOSS_MAPPING[name]
    return found
