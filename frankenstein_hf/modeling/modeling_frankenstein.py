"""The Frankenstein text models: a stack of layers, each with the sequence mixer its configuration names."""

import copy
import os
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast, MaskedLMOutput
from transformers.modeling_utils import PreTrainedModel, slice_logits_to_keep
from transformers.utils import can_return_tuple, logging
from transformers.utils.deprecation import deprecate_kwarg

from ..configuration.component import did_you_mean
from ..configuration.configuration_frankenstein import (
    FRANKENSTEIN_VERSION,
    FrankensteinConfig,
    is_newer,
    newer_note,
)
from ..configuration.registries import MIXERS, NORMS
from .context import make_context, packed_starts
from .hub_bundle import auto_map, changed_since, read_card, render_card, write_bundle
from .implementations import implementation
from .layer import FrankensteinLayer
from .mixers.base import MixerExtras
from .ops.backend import TRITON, check_triton
from .positions import RotaryEmbedding

logger = logging.get_logger(__name__)

# Arguments that only transformers' attention functions read; they pass through the context.
KERNEL_KEYS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "position_ids")


def _mixer_name(backend: str | None) -> str:
    """What a mixer is called here, also where other models know it as `frankenstein_<name>`."""
    return (backend or "").removeprefix("frankenstein_")


def _without_mixer_backend(config: Any) -> Any:
    """`attn_implementation` naming a mixer means `layer_pattern=[name]`: a copy of the config that says so."""
    config.check()  # once more: what from_pretrained overrides is set after the config was built
    name = _mixer_name(config._attn_implementation)
    if name not in MIXERS:
        return config
    config = copy.deepcopy(config)
    config._attn_implementation, config.layer_pattern = None, [name]
    for layer_idx in range(config.num_hidden_layers):
        config.params_for(layer_idx)
    return config


@dataclass
class FrankensteinModelOutput(BaseModelOutputWithPast):
    """transformers' output, and what mixers return besides.

    Attributes:
        aux_loss: Sum of their auxiliary losses, None when there are none.
        max_logits: When asked for, [H] of every layer, None for mixers without such logits.
    """

    aux_loss: Tensor | None = None
    max_logits: tuple[Tensor | None, ...] | None = None

    def plus_aux_loss(self, loss: Tensor) -> Tensor:
        """A head's `loss` with that of the mixers."""
        return loss if self.aux_loss is None else loss + self.aux_loss


class FrankensteinPreTrainedModel(PreTrainedModel):
    """What all heads share: initialisation, loading, saving with code, resizing."""

    config: FrankensteinConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FrankensteinLayer"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_set_attn_implementation_cached_value = True
    _is_stateful = False  # states roll back exactly, so assisted decoding works
    is_causal = False
    save_code = True  # whether `save_pretrained` writes the code when not told; False where a mixer's cannot travel

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(_without_mixer_backend(config), *args, **kwargs)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if callable(fill := getattr(module, "init_parameters", None)):
            fill()

    # ------------------------------------------------------------------ backends

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """transformers' check, which here also knows "triton" (see `ops/backend.py`), and the mixers in its error."""
        if requested_attention == TRITON:
            return TRITON
        if _mixer_name(requested_attention) in MIXERS:
            raise ValueError(
                f"{requested_attention!r} is a mixer, which is chosen when a model is built: pass it to from_config or "
                "from_pretrained, or set layer_pattern. A built model can change its backend only (eager, sdpa, …)."
            )
        try:
            return super().get_correct_attn_implementation(requested_attention, is_init_check)
        except ValueError as error:
            raise ValueError(
                f"{error} Models of this family also take 'triton'. A mixer's name"
                f"{did_you_mean(requested_attention, MIXERS.names())}"
            ) from error

    # ------------------------------------------------------------------ loading

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """transformers' `from_pretrained`, refusing a checkpoint that does not belong to the configuration.

        Raises:
            OSError: A weight file is truncated or corrupt.
            ValueError: Weights of layers are missing from the checkpoint or have no place in the model.
        """
        with_info = kwargs.pop("output_loading_info", False)
        ignore_sizes = kwargs.pop("ignore_mismatched_sizes", False)
        try:
            loaded: Any = super().from_pretrained(
                pretrained_model_name_or_path,
                *args,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that one error can list everything that does not fit
                **kwargs,
            )
        except SafetensorError as error:
            raise OSError(
                f"A weight file of {str(pretrained_model_name_or_path)!r} is truncated or corrupt ({error}). Download "
                "or save the checkpoint again."
            ) from error
        model, info = loaded
        missing = sorted(key for key in info["missing_keys"] if "layers." in key)
        unexpected = sorted(key for key in info["unexpected_keys"] if ".mixer." in key)
        sizes = [] if ignore_sizes else [
            f"{key} ({list(saved)} saved, {list(built)} built)" for key, saved, built in info["mismatched_keys"]
        ]  # fmt: skip
        if missing or unexpected or sizes:
            raise ValueError(
                f"The checkpoint {str(pretrained_model_name_or_path)!r} does not fit the configuration (layer_pattern="
                f"{model.config.layer_pattern}, {model.config.num_hidden_layers} layers): missing "
                f"{missing or 'nothing'}, without a place {unexpected or 'nothing'}, of other sizes "
                f"{sizes or 'nothing'}. Load it with the configuration it was saved with, or pass "
                "ignore_mismatched_sizes=True if only a head is meant to be new."
                + newer_note(model.config.frankenstein_version)
            )
        return (model, info) if with_info else model

    # ------------------------------------------------------------------ saving

    def _config_to_save(self, with_code: bool) -> Any:
        config = copy.deepcopy(self.config)
        config.is_causal = self.is_causal
        if not is_newer(config.frankenstein_version):
            config.frankenstein_version = FRANKENSTEIN_VERSION
        config.__dict__["_auto_class"] = None  # else transformers adds its own copy of a bundle's code
        if with_code:
            config.auto_map = auto_map()
        elif hasattr(config, "auto_map"):
            del config.auto_map
        return config

    def save_pretrained(
        self, save_directory: str | os.PathLike, *args: Any, save_code: bool | None = None, **kwargs: Any
    ):
        """transformers' `save_pretrained`, and beside the weights the code to load them without this package.

        Args:
            save_directory: A folder, made if absent.
            save_code: Whether to write the code (flat Python files reached through `trust_remote_code=True`); by
                default the attribute `save_code`, which reaches the saves of `Trainer` too.
            args, kwargs: transformers' own.

        Raises:
            ValueError: The model has a mixer from outside this package, whose code cannot travel.
        """
        save_code = self.save_code if save_code is None else save_code
        original = self.config
        # only the saved copy says how the model was resolved; the caller's object stays as it is
        self.config = self._config_to_save(save_code)
        self.__dict__["is_remote_code"] = lambda: False  # for the same reason as `_auto_class` above
        self.__dict__["card_before"] = read_card(save_directory)  # with push_to_hub=True transformers writes over it
        try:
            if save_code and kwargs.get("is_main_process", True) and not os.path.isfile(save_directory):
                write_bundle(save_directory, self.config)
            super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            self.config = original
            del self.__dict__["is_remote_code"], self.__dict__["card_before"]
        if kwargs.get("is_main_process", True):
            render_card(self, save_directory)

    def _upload_modified_files(
        self,
        working_dir: str | os.PathLike,
        repo_id: str,
        files_timestamps: dict[str, float],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # transformers has just written a card of its own
        render_card(self, working_dir, repo_id, before=self.__dict__.get("card_before"))
        files_timestamps = changed_since(files_timestamps, working_dir, self.config)
        return super()._upload_modified_files(working_dir, repo_id, files_timestamps, *args, **kwargs)

    def create_or_update_model_card(self, output_dir: str | os.PathLike) -> None:
        """Write the model card, keeping the training sections of a card `Trainer` may have written."""
        render_card(self, output_dir)

    # ------------------------------------------------------------------ vocabulary

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Embedding:
        """transformers' method, applied to every table with a row per token, those inside mixers included."""
        old = self.get_input_embeddings().num_embeddings
        embeddings = super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
        new = embeddings.num_embeddings
        if new != old:
            for module in self.modules():
                for name in getattr(module, "vocabulary_tables", ()):
                    table = getattr(module, name)
                    setattr(module, name, self._get_resized_embeddings(table, new, mean_resizing=False))
            self.tie_weights()
        return embeddings


class FrankensteinModel(FrankensteinPreTrainedModel):
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
        self.is_causal = bool(config.is_causal if is_causal is None else is_causal)
        mode = "causal" if self.is_causal else "bidirectional"
        for name in dict.fromkeys(config.mixer_names):
            if not getattr(MIXERS.get(name), mode):
                able = [spec.name for spec in MIXERS if getattr(spec, mode)]
                raise ValueError(f"The mixer {name!r} has no {mode} form; choose one of {', '.join(sorted(able))}.")
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([FrankensteinLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = implementation(NORMS.get(config.norm))(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)
        self.gradient_checkpointing = False
        self._tied_weights_keys = self._shared_tables()
        self.post_init()

    def _shared_tables(self) -> dict[str, str]:
        """Weights of tables that mixers of several layers share, each mapped to the first layer's."""
        first: dict[str, str] = {}
        shared = {}
        for i, layer in enumerate(self.layers):
            for table in getattr(layer.mixer, "shared_tables", ()):
                weight = f"layers.{i}.mixer.{table}.weight"
                if first.setdefault(table, weight) != weight:
                    shared[weight] = first[table]
        return shared

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """transformers' map of tied weights; the stack's own do not depend on `tie_word_embeddings`."""
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        return dict(self._tied_weights_keys)

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
    ) -> FrankensteinModelOutput:
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

        Returns:
            `last_hidden_state` [B, T, D], `cache`, `hidden_states`, `attentions`, `aux_loss`, `max_logits`.

        Raises:
            ValueError: Arguments that do not fit together; the message says which and what to do.
        """
        config = self.config
        shape, device = self._check_inputs(input_ids, inputs_embeds, attention_mask)
        output_hidden_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        output_attentions = config.output_attentions if output_attentions is None else output_attentions
        if output_attentions and config._attn_implementation != "eager":
            raise ValueError(
                "output_attentions needs the weights to be materialised: build the model with "
                "attn_implementation='eager' or call model.set_attn_implementation('eager')."
            )
        if output_max_logits and cache is not None:
            raise ValueError("output_max_logits looks at whole sequences: leave out the cache.")
        if use_cache is None:
            use_cache = config.use_cache and not self.training
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            if cache is not None:
                logger.warning_once("A cache cannot be used under gradient checkpointing; it is ignored.")
            cache, use_cache = None, False
        if config._attn_implementation == TRITON and any(
            getattr(layer.mixer, "needs_kernel", False) for layer in self.layers
        ):
            check_triton(device)
        kernel_kwargs = {**kwargs, "cu_seq_lens_q": cu_seq_lens_q, "position_ids": position_ids}
        context = make_context(
            shape=shape,
            device=device,
            attention_mask=attention_mask,
            position_ids=position_ids,
            seq_idx=seq_idx,
            cu_seq_lens_q=cu_seq_lens_q,
            look_for_documents=cache is None,
            **self._past(cache),
            is_causal=self.is_causal,
            input_ids=input_ids,
            backend=config._attn_implementation,
            rotary_function=self.rotary_emb,
            output_attentions=bool(output_attentions),
            output_max_logits=output_max_logits,
            kernel_kwargs={key: kernel_kwargs[key] for key in KERNEL_KEYS if kernel_kwargs.get(key) is not None},
        )
        if use_cache and cache is None and self.is_causal and context.documents is None:
            cache = DynamicCache(config=config)
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if not context.all_real:  # whatever stands at a pad, NaN included, must not reach a product
            hidden_states = hidden_states.masked_fill(~context.keep[..., None], 0.0)
        every_hidden = [hidden_states]
        attentions: list[Tensor | None] = []
        max_logits: list[Tensor | None] = []
        aux_losses: list[Tensor] = []
        for layer in self.layers[: config.num_hidden_layers]:  # fewer while generate() drafts with an early exit
            hidden_states, extras = layer(hidden_states, context, cache=cache)
            every_hidden.append(hidden_states)
            extras = extras or MixerExtras()
            attentions.append(extras.weights)
            aux_losses.extend(extras.aux_losses)
            max_logits.append(extras.max_logits)
        hidden_states = self.norm(hidden_states)
        return FrankensteinModelOutput(
            last_hidden_state=hidden_states,
            cache=cache,
            hidden_states=(*every_hidden[:-1], hidden_states) if output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions else None,  # type: ignore[arg-type]
            aux_loss=torch.stack(aux_losses).sum() if aux_losses else None,
            max_logits=tuple(max_logits) if output_max_logits else None,
        )

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
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4:
            unable = [name for name in names if not MIXERS.get(name).native_mask]
            if unable:
                raise ValueError(
                    f"A 4-D attention_mask cannot be honoured by {', '.join(unable)}; give a 2-D mask of real tokens, "
                    "or use dense mixers only."
                )
        return (given[0].shape[0], given[0].shape[1]), given[0].device

    def _past(self, cache: Any) -> dict[str, Any]:
        """What `make_context` wants to know of a cache; an empty one gets its layers here."""
        if cache is None:
            return {"past_length": 0, "past_num_real": None, "past_keep": None, "num_places": None}
        if not self.is_causal:
            raise ValueError("A bidirectional model has no cache: later tokens change earlier outputs.")
        _fill_cache(cache, self.config)
        lengths = [layer.get_seq_length() for layer in cache.layers[: self.config.num_hidden_layers]]
        if not isinstance(lengths[0], Tensor) and any(length != lengths[0] for length in lengths):
            raise ValueError(
                f"The layers of the cache have seen different numbers of tokens ({lengths}), as after a crop that "
                "failed half-way. Start anew with an empty cache."
            )
        masks = (layer.keep for layer in cache.layers if getattr(layer, "keep", None) is not None)
        num_real = cache.layers[0].num_real
        return {
            "past_length": lengths[0],
            "past_num_real": None if num_real is None else num_real.clone(),  # which a layer may count on in place
            "past_keep": next(masks, None),
            "num_places": next((n for layer in cache.layers if (n := getattr(layer, "max_cache_len", None))), None),
        }


def _fill_cache(cache: Any, config: Any) -> None:
    """Give an empty cache built without the config its layers; refuse one made for another model."""
    if not isinstance(cache, Cache):
        raise ValueError(f"cache must be a transformers Cache such as DynamicCache(config=…), got {type(cache)}.")
    if not cache.layers:
        cache.layers, cache.layer_class_to_replicate = DynamicCache(config=config).layers, None
    kinds = [getattr(layer, "_layer_type", None) for layer in cache.layers]
    if kinds[: config.num_hidden_layers] != config.layer_types:
        raise ValueError(
            f"The cache was made for other layers ({kinds}) than this model's ({config.layer_types}); build it with "
            "DynamicCache(config=model.config). Prefix tuning, which brings keys and values of its own, has no place "
            "among states: tune prompts (PromptTuningConfig) or projections (LoraConfig) instead."
        )


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
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **for_stack(kwargs),
        )
        logits = self.lm_head(slice_logits_to_keep(output.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            if (starts := packed_starts(labels, attention_mask, position_ids, **packing)) is not None:
                labels = labels.masked_fill(starts, -100)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            loss = output.plus_aux_loss(loss)
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
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Run the model; arguments as in `FrankensteinModel.forward`, and:

        Args:
            labels: [B, T] ids to predict, −100 elsewhere. With `config.sparse_prediction`, training computes logits at
                the labelled positions only: the loss is the same, `logits` is [labelled, vocab_size].

        Returns:
            `loss`, `logits` [B, T, vocab_size], `hidden_states`, `attentions`.
        """
        kwargs.pop("use_cache", None)
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=False,
            **for_stack(kwargs),
        )
        hidden_states = output.last_hidden_state
        if labels is not None and self.config.sparse_prediction and self.training:
            labelled = (labels != -100).flatten().nonzero().squeeze(1)
            hidden_states = hidden_states.flatten(0, 1).index_select(0, labelled)
            labels = labels.flatten().index_select(0, labelled)
        logits = self.lm_head(hidden_states)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            loss = output.plus_aux_loss(loss)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=output.hidden_states, attentions=output.attentions
        )


def for_stack(kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a head passes on to its stack: all but the arguments of losses, whatever `config.return_dict` says."""
    own = {key: value for key, value in kwargs.items() if key not in ("num_items_in_batch", "shift_labels")}
    return {**own, "return_dict": True}
