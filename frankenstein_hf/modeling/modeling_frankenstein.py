"""The Frankenstein text models: a stack of layers, each with the sequence mixer its configuration names."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast, MaskedLMOutput
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import can_return_tuple, logging
from transformers.utils.deprecation import deprecate_kwarg

from ..configuration.registries import MIXERS
from .arguments import KERNEL_KEYS, check_keywords, for_stack, looked_up
from .cache import whole_call
from .context import Batch, Past, make_context, packed_starts
from .foreign_caches import PagedLayers, check_dense, is_paged, paged_mask, paged_view, quantized_cache
from .losses import score_entropy_loss
from .masked_generation import check_arguments, fill_masks
from .pretrained import FrankensteinPreTrainedModel
from .stack import StackModel, StackOutput

logger = logging.get_logger(__name__)


# Trainer takes the labels away for label_smoothing_factor and compute_loss_func
PACKED_WITHOUT_LABELS = (
    "Packed documents are trained on without `labels`: whoever computes the loss (label_smoothing_factor and "
    "compute_loss_func of Trainer do) has to leave out the first token of every document, or it is predicted from the "
    "document before. Put -100 there, as frankenstein_hf.data.CausalLMCollator and transformers' "
    "DataCollatorWithFlattening do."
)


class FrankensteinModel(StackModel):
    """The stack without a head: token ids or embeddings in, hidden states out.

    Args:
        config: A `FrankensteinConfig`.
        is_causal: Whether later tokens are invisible; by default what the config says, else False.

    Raises:
        ValueError: A mixer of the pattern does not support the mode.
    """

    def __init__(self, config: Any, is_causal: bool | None = None) -> None:
        super().__init__(config)
        config = self.config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.build_stack(is_causal)
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        output_max_logits: bool = False,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> StackOutput:
        """Run the stack.

        Args:
            input_ids: [B, T] token ids.
            attention_mask: [B, T] or [B, past + T], nonzero at real tokens; or 4-D, [B or 1, H or 1, T, past + T], and
                bool (True = visible) or additive, which only dense mixers can honour.
            position_ids: [B or 1, T]. They only say where packed documents start; positions are counted in real tokens.
                With a 4-D mask they are taken as they are.
            cache: A cache an earlier call returned, or an empty `DynamicCache`; its former name
                `past_key_values` is accepted too.
            inputs_embeds: [B, T, D] instead of `input_ids`; beside them when a mixer needs ids.
            use_cache: Return a cache (causal models only). By default the config's value outside training.
            output_hidden_states: Return the embeddings and every layer's output; the last one is normed.
            output_attentions: Return the weights of every layer that has them (backend "eager"), None for the others.
            output_max_logits: Return the largest attention logit of every head between visible tokens (mixers whose
                spec has `logits`), at the cost of computing the logits once more; not with a cache.
            seq_idx: [B, T] document numbers of packed rows.
            cu_seq_lens_q: [documents + 1] borders of a packed batch of one.
            kwargs: Accepted for the other models' sake: `token_type_ids` is ignored, kernel arguments are passed on.
                Others are an error unless they are None.

        Returns:
            `last_hidden_state` [B, T, D], `cache`, `hidden_states`, `attentions`, `aux_losses` (and their sum,
            `aux_loss`), `metrics`, `max_logits`.

        Raises:
            ValueError: Arguments that do not fit together; the message says which and what to do.
            TypeError: An argument nobody knows.
        """
        config = self.config
        if not is_paged(cache):  # continuous batching passes all that it knows of its batch
            check_keywords(kwargs)
        shape, device = self._check_inputs(input_ids, inputs_embeds, attention_mask)
        output_attentions = config.output_attentions if output_attentions is None else output_attentions
        self.check_backend(device, bool(output_attentions))
        if output_max_logits and cache is not None:
            raise ValueError("output_max_logits looks at whole sequences: leave out the cache.")
        past: Past | None
        cache, use_cache = self.wants_cache(cache, use_cache)
        if paged := is_paged(cache):
            attention_mask, past = paged_mask(attention_mask, shape[1])
            cache = PagedLayers(  # type: ignore[assignment]
                cache, {**kwargs, "cu_seq_lens_q": cu_seq_lens_q}, len(self.layers)
            )
            seq_idx = cu_seq_lens_q = None  # the mask says it
        else:
            past = self.prepare_cache(cache)
        kernel_kwargs = {**kwargs, "cu_seq_lens_q": cu_seq_lens_q, "position_ids": position_ids}
        context = make_context(
            Batch(shape, device, attention_mask, position_ids, seq_idx, cu_seq_lens_q, input_ids),
            past,
            is_causal=self.is_causal,
            backend=config._attn_implementation,
            rotary_function=self.rotary_emb,
            output_attentions=bool(output_attentions),
            output_max_logits=output_max_logits,
            kernel_kwargs={
                key: kernel_kwargs[key] for key in KERNEL_KEYS if not paged and kernel_kwargs.get(key) is not None
            },
        )
        if use_cache and cache is None and self.is_causal and context.documents is None:
            cache = DynamicCache(config=config)
        if output_hidden_states is None:
            output_hidden_states = bool(config.output_hidden_states)
        embeddings = self._embed(input_ids) if inputs_embeds is None else inputs_embeds
        if config.embedding_scale != 1.0:
            embeddings = embeddings * config.embedding_scale
        return self.run_stack(embeddings, context, cache, output_hidden_states=output_hidden_states)

    def _embed(self, input_ids: Any) -> Tensor:
        return looked_up("input_ids", input_ids, self.config.vocab_size, lambda: self.embed_tokens(input_ids))

    def _check_inputs(
        self, input_ids: Tensor | None, inputs_embeds: Tensor | None, attention_mask: Any
    ) -> tuple[tuple[int, int], torch.device]:
        """(B, T) and the device; raises ValueError for inputs the pattern cannot work with."""
        names = dict.fromkeys(self.config.mixer_names)
        given = [x for x in (input_ids, inputs_embeds) if x is not None]
        both_needed = any(MIXERS.get(name).needs_input_ids for name in names)
        if not given or (len(given) == 2 and not both_needed):
            raise ValueError(f"Give exactly one of input_ids and inputs_embeds; got {'both' if given else 'neither'}.")
        if given[0].dim() != (3 if input_ids is None else 2):
            raise ValueError(
                f"input_ids must be [batch, tokens] and inputs_embeds [batch, tokens, {self.config.hidden_size}]; "
                f"got {list(given[0].shape)}."
            )
        expected = (*given[0].shape[:2], self.config.hidden_size)
        if inputs_embeds is not None and tuple(inputs_embeds.shape) != expected:
            raise ValueError(
                f"inputs_embeds must be {list(expected)}"
                f"{' as input_ids say' if len(given) == 2 else ''}, got {list(inputs_embeds.shape)}."
            )
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4:
            unable = [name for name in names if not MIXERS.get(name).native_mask]
            if unable:
                raise ValueError(
                    f"A 4-D attention_mask cannot be honoured by {', '.join(unable)}; give a 2-D mask of real tokens, "
                    "or use dense mixers only."
                )
        return (given[0].shape[0], given[0].shape[1]), given[0].device


class FrankensteinForCausalLM(FrankensteinPreTrainedModel, GenerationMixin):
    """Next-token prediction: the stack, causal, with a language-model head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    is_causal = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = FrankensteinModel(self.config, is_causal=True)
        self.vocab_size = self.config.vocab_size
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)
        self.post_init()

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        wanted = generation_config.cache_implementation == "quantized" and generation_config.use_cache is not False
        if wanted and model_kwargs.get("cache") is None:
            check_dense(self.model, "A quantized cache")
            model_kwargs["cache"] = quantized_cache(self.config, generation_config.cache_config)
            return None
        return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' method, which `generate_batch` and serving go through; for patterns of dense mixers.

        Raises:
            ValueError: A mixer whose cache pages cannot hold; the message names it.
        """
        check_dense(self.model, "Continuous batching (generate_batch, paged attention)", own_heads=False)
        return super().init_continuous_batching.__func__(paged_view(self), *args, **kwargs)  # type: ignore[attr-defined]

    @staticmethod
    def create_masks_for_generate(
        config: Any, inputs_embeds: Tensor, attention_mask: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor | None:
        """`generate()` hands the 2-D mask on; the model derives visibility from it and from the cache."""
        return attention_mask

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Run the model; arguments as in `FrankensteinModel.forward`, and:

        Args:
            labels: [B, T] ids of the tokens themselves (the shift happens here), −100 where there is no loss. Across
                the border of packed documents nothing is predicted.
            token_type_ids: Ignored; tokenizers made for other models return them.
            logits_to_keep: Compute logits for the last so many tokens only (0: all), or at the given positions.

        Returns:
            `loss`, `logits` [B, T, vocab_size], `cache`, `hidden_states`, `attentions`.
        """
        packing = {key: kwargs.get(key) for key in ("seq_idx", "cu_seq_lens_q")}
        with whole_call(cache):
            output = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                cache=cache,
                inputs_embeds=inputs_embeds,
                use_cache=use_cache,
                **for_stack(kwargs),
            )
            logits = self._logits(slice_logits_to_keep(output.last_hidden_state, logits_to_keep))
            loss = None
            hidden_states = output.last_hidden_state
            batch = Batch.like(hidden_states, attention_mask=attention_mask, position_ids=position_ids, **packing)
            if labels is None and self.training and cache is None and packed_starts(batch) is not None:
                logger.warning_once(PACKED_WITHOUT_LABELS)
            if labels is not None:
                if (starts := packed_starts(batch)) is not None:
                    labels = labels.masked_fill(starts, -100)
                loss = self._vocabulary_loss(logits, labels, kwargs)
                shifted = kwargs.get("shift_labels", labels[:, 1:])
                loss = output.plus_aux_loss(loss, self.training, shifted, kwargs.get("num_items_in_batch"))
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=output.cache,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )


class FrankensteinForMaskedLM(FrankensteinPreTrainedModel):
    """Prediction of masked tokens: the stack, bidirectional unless the checkpoint is causal, with a head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if self.config.is_causal:
            logger.warning_once(
                "This checkpoint was saved by a causal model: masked tokens will be predicted from the left only. Set "
                "is_causal=False to look both ways."
            )
        self.model = FrankensteinModel(self.config)
        self.is_causal = self.model.is_causal
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        """The language-model head."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the language-model head."""
        self.lm_head = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        noise: Tensor | None = None,
        noise_rate: Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Run the model; arguments as in `FrankensteinModel.forward`, and:

        Args:
            labels: [B, T] ids to predict, −100 elsewhere. With `config.sparse_prediction`, training computes logits at
                the labelled positions only: the loss is the same, `logits` is [labelled, vocab_size]. With
                `config.masked_lm_loss="score_entropy"` ids wherever a token could have been hidden; masks are found
                in `input_ids`.
            noise, noise_rate: [B, T], for that loss: the noise σ̄ of each token's document and its speed σ′, as
                `DiffusionCollator` with `GeometricNoise` gives them.

        Returns:
            `loss`, `logits` [B, T, vocab_size], `hidden_states`, `attentions`.

        Raises:
            ValueError: Noise where the loss reads none, or none where it does.
        """
        diffuses = self.config.masked_lm_loss == "score_entropy"
        if not diffuses and (noise is not None or noise_rate is not None):
            raise ValueError("noise and noise_rate are read with config.masked_lm_loss='score_entropy' only.")
        if diffuses and labels is not None and (noise is None or noise_rate is None or input_ids is None):
            raise ValueError(
                "masked_lm_loss='score_entropy' needs input_ids, noise and noise_rate beside the labels, as "
                "DiffusionCollator(schedule=GeometricNoise()) gives them."
            )
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **for_stack(kwargs, use_cache=False),
        )
        hidden_states = output.last_hidden_state
        every_place = diffuses or not (self.config.sparse_prediction and self.training)
        if labels is not None and not every_place:
            labelled = (labels != -100).flatten().nonzero().squeeze(1)
            hidden_states = hidden_states.flatten(0, 1).index_select(0, labelled)
            labels = labels.flatten().index_select(0, labelled)
        logits = self._logits(hidden_states)
        loss = None
        if labels is not None:
            if input_ids is not None and noise is not None and noise_rate is not None:
                loss = self._score_entropy(logits, labels, input_ids, noise, noise_rate, **kwargs)
            else:
                loss = self._vocabulary_loss(logits, labels, kwargs)
            loss = output.plus_aux_loss(loss, self.training, labels, kwargs.get("num_items_in_batch"))
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=output.hidden_states, attentions=output.attentions
        )

    def _score_entropy(
        self,
        logits: Tensor,
        labels: Tensor,
        input_ids: Tensor,
        noise: Tensor,
        noise_rate: Tensor,
        num_items_in_batch: Any = None,
        **_: Any,
    ) -> Tensor:
        mask_token_id = self.config.mask_token_id
        assert mask_token_id is not None  # the configuration has refused
        counted = labels != -100
        hidden = counted & (input_ids == mask_token_id)
        items = counted.sum() if num_items_in_batch is None else num_items_in_batch
        return score_entropy_loss(
            logits[hidden], labels[hidden], noise[hidden], noise_rate[hidden], mask_token_id, items
        )

    def generate_masked(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        tokens_per_step: int = 1,
        temperature: float = 1.0,
        order: str = "top_probability",
        suppress_tokens: Iterable[int] | None = None,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Fill in the mask tokens of a text, or write one from masks alone, the surest places first.

        Each step predicts all masked places and fills `tokens_per_step` of every row; what is written stays, and what
        was given is never changed (arXiv 2502.06768).

        Args:
            input_ids: [B, T] with `config.mask_token_id` where something is to be written.
            attention_mask: [B, T]; masks at pads are left alone.
            tokens_per_step: Places of a row that are filled at once; 1 is the most careful, T the fastest.
            temperature: Of the drawing of a token; 0 takes the likeliest. The order of places does not depend on it.
            order: Which places come first: "top_probability", those whose likeliest token is likeliest; "margin",
                those where it leads the second by most; "random".
            suppress_tokens: Never written, beside the mask token; by default the special tokens of the configuration.
            generator: Of the draws, for results that repeat.
            kwargs: More arguments of `forward`, such as those of packed documents.

        Returns:
            [B, T] ids. For example `model.generate_masked(torch.full((1, 64), model.config.mask_token_id))`.

        Raises:
            ValueError: No mask token in the configuration, or an argument out of range.
        """
        if suppress_tokens is None:
            special = [getattr(self.config, f"{name}_token_id") for name in ("pad", "bos", "eos", "cls", "sep")]
            suppress_tokens = [token for token in special if isinstance(token, int)]
        never = list(suppress_tokens)
        mask_token_id = check_arguments(self.config, input_ids, tokens_per_step, temperature, order, never)
        was_training = self.training
        self.eval()
        try:
            return fill_masks(
                lambda ids: self(input_ids=ids, attention_mask=attention_mask, **kwargs).logits,
                input_ids,
                mask_token_id,
                attention_mask,
                tokens_per_step,
                temperature,
                order,
                never,
                generator,
            )
        finally:
            self.train(was_training)
