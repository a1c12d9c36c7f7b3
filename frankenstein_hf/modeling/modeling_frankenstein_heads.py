"""The heads that classify: whole sequences, tokens, answer spans and choices.

Shapes: B batch, T tokens, C choices, D model width, L labels.

Each builds its stack explicitly, bidirectional unless the checkpoint is causal. What counts as a pad is what
`attention_mask` says, on either side and inside, for `input_ids` and `inputs_embeds` alike.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import (
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import can_return_tuple

from .arguments import for_stack
from .context import Batch, packed_starts
from .losses import IGNORED
from .modeling_frankenstein import FrankensteinModel
from .ops.numerics import at_least_fp32
from .pretrained import FrankensteinPreTrainedModel
from .stack import StackOutput


class FrankensteinClassifier(FrankensteinPreTrainedModel):
    """What the classifying heads share: the stack in the checkpoint's mode, and the reading of its arguments."""

    def __init__(self, config: Any) -> None:
        super().__init__(copy.deepcopy(config))  # transformers' loss writes the problem type it infers into it
        self.model = FrankensteinModel(self.config)
        self.is_causal = self.model.is_causal
        self.num_labels = config.num_labels

    def _encode(self, arguments: dict[str, Any], one_answer_a_row: bool = True) -> tuple[StackOutput, Tensor, Tensor]:
        """The stack's output, its last hidden states [B, T, D], and which tokens are real, [B, T]."""
        for name in ("cache", "past_key_values"):
            if arguments.get(name) is not None:
                raise ValueError(f"{type(self).__name__} reads whole sequences: give all tokens at once and no {name}.")
        output = self.model(**for_stack(arguments, use_cache=False))
        if arguments["input_ids"] is not None:  # other models look for the pad token; here only the mask counts
            self.warn_if_padding_and_no_attention_mask(arguments["input_ids"], arguments["attention_mask"])
        hidden_states = output.last_hidden_state
        names = ("attention_mask", "position_ids", "seq_idx", "cu_seq_lens_q")
        batch = Batch.like(hidden_states, **{name: arguments.get(name) for name in names})
        if one_answer_a_row and packed_starts(batch) is not None:
            raise ValueError(
                f"{type(self).__name__} gives one answer a row, but a row holds several packed documents (seq_idx, "
                "cu_seq_lens_q or restarting position_ids): give each document a row of its own."
            )
        mask = batch.attention_mask
        if mask is None or mask.dim() != 2:
            keep = torch.ones(hidden_states.shape[:2], dtype=torch.bool, device=hidden_states.device)
        else:
            keep = mask.to(device=hidden_states.device, dtype=torch.bool)
        return output, hidden_states, keep

    def _pool(self, hidden_states: Tensor, keep: Tensor) -> Tensor:
        """[B, T, D] -> [B, D] over real tokens, as `classifier_pooling` says; finite where a row has none."""
        pooling = self.config.classifier_pooling or ("last" if self.is_causal else "mean")
        if pooling == "mean":
            summed = at_least_fp32(hidden_states.masked_fill(~keep[..., None], 0)).sum(1)
            return (summed / keep.sum(1, keepdim=True).clamp_min(1)).to(hidden_states.dtype)
        places = torch.arange(keep.shape[1], device=keep.device)
        if pooling == "cls":
            place = torch.where(keep, places, keep.shape[1] - 1).amin(1)
        else:
            place = torch.where(keep, places, 0).amax(1)
        return hidden_states[torch.arange(keep.shape[0], device=keep.device), place]


class FrankensteinForSequenceClassification(FrankensteinClassifier):
    """One label, several labels or one number (or several) for a sequence; see `config.problem_type`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.dropout = nn.Dropout(self.config.classifier_dropout)
        self.classifier = nn.Linear(self.config.hidden_size, self.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Run the model; arguments as in `FrankensteinModel.forward` but for packed rows and a cache, and:

        Args:
            labels: By `config.problem_type`: "single_label_classification" [B] whole numbers below `num_labels`, −100
                to leave a row out; "multi_label_classification" [B, L] numbers in [0, 1]; "regression" [B, L], or [B]
                for one label. Where the config says nothing it is inferred from the first labels, as everywhere in
                transformers: one label means regression, integers a single label, else several. Beware that `Trainer`
                leaves regression targets of exactly −100 out when it counts the labels of accumulated batches.

        Returns:
            `loss`, `logits` [B, L], `hidden_states`, `attentions`.

        Raises:
            ValueError: Packed rows, or labels that do not fit the problem type.
        """
        arguments = dict(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, inputs_embeds=inputs_embeds
        )
        output, hidden_states, keep = self._encode(arguments | kwargs)
        logits = self.classifier(self.dropout(self._pool(hidden_states, keep)))
        loss = None
        if labels is not None:
            loss = self._loss(logits, labels, kwargs.get("num_items_in_batch"))
            loss = output.plus_aux_loss(loss, self.training, labels, kwargs.get("num_items_in_batch"))
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=output.hidden_states, attentions=output.attentions
        )

    def _loss(self, logits: Tensor, labels: Tensor, num_items_in_batch: Any) -> Tensor:
        problem_type = self._problem_type(labels)
        labels = _fitting_labels(labels, logits, problem_type)
        arguments = dict(labels=labels, logits=logits, pooled_logits=at_least_fp32(logits), config=self.config)
        if problem_type == "single_label_classification":
            return self.loss_function(**arguments, num_items_in_batch=num_items_in_batch)
        # transformers' other losses are means over the labels of this call, whatever Trainer has counted
        loss = self.loss_function(**arguments)
        return loss if num_items_in_batch is None else loss * labels.numel() / num_items_in_batch

    def _problem_type(self, labels: Tensor) -> str:
        if self.config.problem_type is not None:
            return self.config.problem_type
        if self.num_labels == 1:
            return "regression"
        integers = labels.dtype in (torch.long, torch.int)
        return "single_label_classification" if integers else "multi_label_classification"


class FrankensteinForTokenClassification(FrankensteinClassifier):
    """A label for every token."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.dropout = nn.Dropout(self.config.classifier_dropout)
        self.classifier = nn.Linear(self.config.hidden_size, self.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        """Run the model; arguments as in `FrankensteinModel.forward`, packed documents included, and:

        Args:
            labels: [B, T] whole numbers below `num_labels`, −100 where there is no loss.

        Returns:
            `loss`, `logits` [B, T, L], `hidden_states`, `attentions`.

        Raises:
            ValueError: Labels of another shape, kind or range.
        """
        arguments = dict(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, inputs_embeds=inputs_embeds
        )
        output, hidden_states, _ = self._encode(arguments | kwargs, one_answer_a_row=False)
        logits = self.classifier(self.dropout(hidden_states))
        loss = None
        if labels is not None:
            labels = _class_labels(labels, logits.shape[:2], self.num_labels)
            loss = self.loss_function(logits, labels, self.config, num_items_in_batch=kwargs.get("num_items_in_batch"))
            loss = output.plus_aux_loss(loss, self.training, labels, kwargs.get("num_items_in_batch"))
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=output.hidden_states, attentions=output.attentions
        )


class FrankensteinForQuestionAnswering(FrankensteinClassifier):
    """The span of the input that answers a question: a score for every token to be its start and its end."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.qa_outputs = nn.Linear(self.config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput:
        """Run the model; arguments as in `FrankensteinModel.forward` but for packed rows and a cache, and:

        Args:
            start_positions, end_positions: [B] places in the row as given, pads counted. One at or behind T leaves
                the row out (the answer was cut off). The loss needs both.

        Returns:
            `loss`, `start_logits` and `end_logits` [B, T], `hidden_states`, `attentions`. At pads the logits are so
            low that no softmax over the row sees them.

        Raises:
            ValueError: Packed rows, or positions that are negative, at a pad or of another shape.
        """
        arguments = dict(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, inputs_embeds=inputs_embeds
        )
        output, hidden_states, keep = self._encode(arguments | kwargs)
        logits = self.qa_outputs(hidden_states)
        logits = logits.masked_fill(~keep[..., None], torch.finfo(logits.dtype).min / 2)  # a sum of two stays finite
        start_logits, end_logits = (part.contiguous() for part in logits.unbind(-1))
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(
                at_least_fp32(start_logits),
                at_least_fp32(end_logits),
                _positions("start_positions", start_positions, keep),
                _positions("end_positions", end_positions, keep),
                num_items_in_batch=kwargs.get("num_items_in_batch"),
            )
            loss = output.plus_aux_loss(loss, self.training, start_positions, kwargs.get("num_items_in_batch"))
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )


class FrankensteinForMultipleChoice(FrankensteinClassifier):
    """Which of several continuations fits: every choice is a sequence of its own and gets a score."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.loss_type = "ForMultipleChoice"  # transformers has none
        self.dropout = nn.Dropout(self.config.classifier_dropout)
        self.classifier = nn.Linear(self.config.hidden_size, 1, bias=False)  # a bias would cancel between choices
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> MultipleChoiceModelOutput:
        """Run the model on [B, C, T] (`inputs_embeds`: [B, C, T, D]); arguments else as in `FrankensteinModel.forward`.

        Args:
            input_ids, attention_mask, position_ids, inputs_embeds: With an axis of choices behind the batch;
                `position_ids` also [1, T] for all.
            labels: [B] the right choice, −100 to leave a row out.

        Returns:
            `loss`, `logits` [B, C]; `hidden_states` and `attentions` of the B·C sequences.

        Raises:
            ValueError: Inputs without the axis of choices, packed rows, or labels that do not fit.
        """
        given = input_ids if input_ids is not None else inputs_embeds
        if attention_mask is not None and attention_mask.dim() != 3:
            raise ValueError(
                f"Multiple choice takes attention_mask [batch, choices, tokens]; got {list(attention_mask.shape)}."
            )
        if position_ids is not None and position_ids.dim() == 2:  # [1, T] for all, as elsewhere
            position_ids = position_ids[:, None]
        if position_ids is not None and given is not None:
            position_ids = position_ids.expand(*given.shape[:2], -1)
        if given is not None and given.dim() != (3 if input_ids is not None else 4):
            raise ValueError(
                "Multiple choice takes input_ids [batch, choices, tokens] or inputs_embeds [batch, choices, tokens, "
                f"{self.config.hidden_size}]; got {list(given.shape)}."
            )
        arguments = dict(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, inputs_embeds=inputs_embeds
        )
        arguments["seq_idx"] = kwargs.pop("seq_idx", None)
        flat = {name: None if value is None else value.flatten(0, 1) for name, value in arguments.items()}
        output, hidden_states, keep = self._encode(flat | kwargs)
        scores = self.classifier(self.dropout(self._pool(hidden_states, keep)))
        assert given is not None  # else the stack has refused
        logits = scores.view(given.shape[:2])
        loss = None
        if labels is not None:
            labels = _class_labels(labels, logits.shape[:1], logits.shape[1])
            loss = self.loss_function(logits=logits, labels=labels, num_items_in_batch=kwargs.get("num_items_in_batch"))
            loss = output.plus_aux_loss(loss, self.training, labels, kwargs.get("num_items_in_batch"))
        return MultipleChoiceModelOutput(
            loss=loss, logits=logits, hidden_states=output.hidden_states, attentions=output.attentions
        )


# ---------------------------------------------------------------------- labels


def may_look() -> bool:
    """Whether values can be checked: looking at them would split a compiled graph."""
    return not torch.compiler.is_compiling()


def _class_labels(labels: Tensor, shape: torch.Size, num_classes: int) -> Tensor:
    """`labels` as int64 of `shape`; ValueError where a loss would stop with an error about something else."""
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels must be whole numbers (class indices), got {labels.dtype}.")
    if labels.shape not in (shape, (*shape, 1)):
        raise ValueError(f"labels must be {list(shape)}, got {list(labels.shape)}.")
    wrong = (labels != IGNORED) & ((labels < 0) | (labels >= num_classes))
    if may_look() and bool(wrong.any()):
        raise ValueError(
            f"labels must be from 0 to {num_classes - 1}, or {IGNORED} for no loss; got {labels[wrong][:5].tolist()}. "
            "The number of classes is config.num_labels (for multiple choice: the number of choices)."
        )
    return labels.reshape(shape).long()


def _fitting_labels(labels: Tensor, logits: Tensor, problem_type: str) -> Tensor:
    """Labels of a sequence classifier in the shape and dtype its loss needs."""
    B, L = logits.shape
    if problem_type == "single_label_classification":
        if labels.shape == (B, L) and L > 1:
            raise ValueError(
                f"labels of shape {[B, L]} do not name one class a row; for several labels set "
                "config.problem_type='multi_label_classification'."
            )
        return _class_labels(labels, logits.shape[:1], L)
    allowed = [(B, L), (B,)] if L == 1 else [(B, L)]
    if labels.shape not in allowed:
        raise ValueError(
            f"labels must be {' or '.join(str(list(shape)) for shape in allowed)} for config.problem_type="
            f"{problem_type!r} with {L} labels, got {list(labels.shape)}."
        )
    wrong = (labels < 0) | (labels > 1)
    if problem_type == "multi_label_classification" and may_look() and bool(wrong.any()):
        raise ValueError("labels of multi_label_classification must be in [0, 1]; there is no value for 'unknown'.")
    return labels.to(torch.promote_types(logits.dtype, torch.float32))


def _positions(name: str, positions: Tensor, keep: Tensor) -> Tensor:
    """[B] places of an answer's start or end; ValueError for those that can be nobody's answer."""
    B, T = keep.shape
    if positions.shape not in ((B,), (B, 1)) or positions.is_floating_point():
        raise ValueError(f"{name} must be [{B}] whole numbers, got {list(positions.shape)} {positions.dtype}.")
    positions = positions.reshape(B).to(keep.device).long()
    inside = positions.clamp(0, T - 1)
    wrong = (positions < 0) | ((positions < T) & ~keep.gather(1, inside[:, None])[:, 0])
    if may_look() and bool(wrong.any()):
        raise ValueError(
            f"{name} must be places of real tokens (or {T} and more to leave a row out), got "
            f"{positions[wrong][:5].tolist()}, which {'are negative or at pads' if T > 1 else 'is no real token'}."
        )
    return positions
