"""`FrankensteinConfig`: the configuration of every text model of the family."""

from huggingface_hub.dataclasses import strict

from .labels import check_problem
from .stack import StackConfig, checked_keys
from .validation import check_special_tokens
from .values import setting


@checked_keys
@strict
class FrankensteinConfig(StackConfig):
    """Configuration of a Frankenstein text model: transformers' usual names, and a sequence mixer per layer.

    What concerns the stack of layers is described in `StackConfig`.

    Args:
        vocab_size: Number of tokens.
        tie_word_embeddings: Share the embedding matrix with the language-model head.
        embedding_scale: What embeddings are multiplied by before the first layer, `inputs_embeds` too.
        logits_scaling: What the logits of a language model are divided by.
        logit_softcap: c in c·tanh(logits/c), which bounds the logits of a language model; None: no bound.
        use_cache: Return a cache from causal models.
        sparse_prediction: MaskedLM computes training logits at labelled positions only; `logits` is then
            [labelled, vocab_size]. The loss is the same.
        classifier_pooling: What a head that classifies sequences looks at: the first real token ("cls"), the last
            ("last") or the "mean" of all. None chooses "last" for causal models, "mean" for others.
        masked_lm_loss: What MaskedLM is trained with: the cross-entropy of hidden tokens, or the "score_entropy" of
            masked diffusion (SEDD, arXiv 2310.16834), which bounds the loss of whole texts.
        fixed_cross_entropy: Compute the cross-entropy of every head without cancellation, in the logits' own dtype:
            where the right class is far ahead (by 5.5 in bf16, 16.6 in fp32), the usual form loses the gradient of that
            class and keeps those of the others.
        label_smoothing: ε of (1 − ε)·cross-entropy + ε·mean over classes of −log q, for heads with class labels. Unlike
            `TrainingArguments(label_smoothing_factor=…)`, which takes the labels away from the model, it keeps the
            auxiliary losses of mixers and experts.
        classifier_dropout: Dropout before a classification head.
    """

    model_type = "frankenstein"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012  (read by Trainer as a plain list)

    vocab_size: int = setting(32000, minimum=1, maximum=2**24)
    tie_word_embeddings: bool = setting(True)
    embedding_scale: float | int = setting(1.0, above=0, maximum=1e6)
    logits_scaling: float | int = setting(1.0, above=0, maximum=1e6)
    logit_softcap: float | int | None = setting(None, above=0, maximum=1e6)
    use_cache: bool = setting(True)
    sparse_prediction: bool = setting(False)
    classifier_pooling: str | None = setting(None, choices=("cls", "mean", "last"))
    masked_lm_loss: str = setting("cross_entropy", choices=("cross_entropy", "score_entropy"))
    fixed_cross_entropy: bool = setting(False)
    label_smoothing: float | int = setting(0.0, minimum=0, below=1)
    classifier_dropout: float | int = setting(0.0, minimum=0, below=1)
    pad_token_id: int | None = setting(None, minimum=0)
    bos_token_id: int | None = setting(None, minimum=0)
    eos_token_id: int | list[int] | None = setting(None, minimum=0)
    mask_token_id: int | None = setting(None, minimum=0)
    cls_token_id: int | None = setting(None, minimum=0)
    sep_token_id: int | None = setting(None, minimum=0)

    def _check_together(self) -> None:
        super()._check_together()
        check_special_tokens(self, self.vocab_size)
        check_problem(self.problem_type, self.num_labels)
        if self.masked_lm_loss == "score_entropy":
            if self.mask_token_id is None:
                raise ValueError(
                    "masked_lm_loss='score_entropy' has to know which token is a mask; give mask_token_id too."
                )
            if self.fixed_cross_entropy or self.label_smoothing:
                raise ValueError(
                    "fixed_cross_entropy and label_smoothing change a cross-entropy, and "
                    "masked_lm_loss='score_entropy' is none; leave one of them out."
                )

    def describe(self, length: int = 4096) -> str:
        """Say in a few lines what this configuration is: layers, options, parameters by part, decode state.

        Nothing is computed or stored for it: the model is built without memory for its weights.

        Args:
            length: Tokens of the sequence whose decode state is stated, for causal models; at least 1.

        Raises:
            ValueError: `length` below 1.
        """
        from ..modeling.census import describe

        return describe(self, length)
