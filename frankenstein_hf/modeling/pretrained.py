"""What all models of the family share: initialising, choosing a backend, loading, saving, resizing."""

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from ..configuration.component import did_you_mean
from ..configuration.configuration_frankenstein import FrankensteinConfig
from ..configuration.registries import MIXERS
from ..configuration.stack import FRANKENSTEIN_VERSION, is_newer, newer_note
from ..configuration.validation import check_special_tokens
from .arguments import looked_up
from .hub_bundle import auto_map, changed_since, read_card, render_card, write_bundle
from .implementations import implementation
from .losses import loss_for
from .ops.backend import TRITON, check_triton


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
        for name in ("init_parameters", "init_options"):
            if callable(fill := getattr(module, name, None)):
                fill()

    @property
    def loss_function(self) -> Callable[..., Tensor]:
        """The one that was assigned, else transformers' for this head, or ours if the configuration asks for more."""
        return self._loss_function if hasattr(self, "_loss_function") else loss_for(self.loss_type, self.config)

    @loss_function.setter
    def loss_function(self, value: Callable[..., Tensor]) -> None:
        self._loss_function = value

    def _logits(self, hidden_states: Tensor) -> Tensor:
        """[…, D] through the language-model head: […, vocab_size], scaled and bounded as the configuration says."""
        config, logits = self.config, self.lm_head(hidden_states)
        if config.logits_scaling != 1.0:
            logits = logits / config.logits_scaling
        if config.logit_softcap is not None:
            logits = torch.tanh(logits / config.logit_softcap) * config.logit_softcap
        return logits

    def _vocabulary_loss(self, logits: Tensor, labels: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """transformers' loss of a language model, with an error of our own for labels outside the vocabulary."""
        size = self.config.vocab_size
        return looked_up(
            "labels", labels, size, lambda: self.loss_function(logits=logits, labels=labels, vocab_size=size, **kwargs)
        )

    # ------------------------------------------------------------------ backends

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """transformers' check, which here also knows "triton" (see `ops/backend.py`), and the mixers in its error."""
        if requested_attention == TRITON:
            kernels = [implementation(MIXERS.get(name)) for name in dict.fromkeys(self.config.mixer_names)]
            if any(getattr(mixer, "needs_kernel", False) for mixer in kernels):
                check_triton(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
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
                f"{error} Models of this family also take 'triton' and, while they are built, the name of a mixer"
                f"{did_you_mean(requested_attention, MIXERS.names())}"
            ) from error

    # ------------------------------------------------------------------ loading

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """transformers' `from_pretrained`, refusing a checkpoint that does not belong to the configuration.

        Raises:
            OSError: A weight file is truncated or corrupt.
            ValueError: Weights of the stack are missing from the checkpoint or have no place in the model; only a head
                may be new, or left behind.
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
        missing = sorted(key for key in info["missing_keys"] if model._of_stack(key))
        unexpected = sorted(key for key in info["unexpected_keys"] if model._of_stack(key))
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

    def _of_stack(self, key: str) -> bool:
        """Whether the weight `key` is one of the stack and not of a head, in this class's names or the stack's own."""
        prefix = f"{self.base_model_prefix}."
        parts = {name for name, _ in self.base_model.named_children()}
        return key.startswith(prefix) or key.partition(".")[0] in parts

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
            ValueError: The model has a mixer from outside this package, whose code cannot travel; the message says why.
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
        """transformers' method, applied to every table with a row per token, those inside mixers included.

        Raises:
            ValueError: A special token of the configuration would lie outside the vocabulary.
        """
        if new_num_tokens:
            check_special_tokens(self.config, new_num_tokens)
        old = self.get_input_embeddings().num_embeddings
        embeddings = super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
        new = embeddings.num_embeddings
        if new != old:
            self._pin_vocabulary_params()
            for module in self.modules():
                for name in getattr(module, "vocabulary_tables", ()):
                    table = getattr(module, name)
                    setattr(module, name, self._get_resized_embeddings(table, new, mean_resizing=False))
            self.tie_weights()
        return embeddings

    def _pin_vocabulary_params(self) -> None:
        """Write into the config what mixers have derived from the vocabulary that the weights were made for.

        Raises:
            ValueError: A layer's own parameters, in `per_layer_config`, leave such a number to the vocabulary.
        """
        for module in self.modules():
            if not hasattr(module, "vocabulary_params"):
                continue
            mixer: Any = module
            name, pinned = self.config.mixer_spec_for(mixer.layer_idx).name, mixer.vocabulary_params()
            params = self.config.mixer_params or {}
            self.config.mixer_params = {**params, name: {**params.get(name, {}), **pinned}}
            for key, value in pinned.items():
                if getattr(self.config.params_for(mixer.layer_idx), key) != value:
                    raise ValueError(
                        f"{key} of {name!r} in layer {mixer.layer_idx} follows the vocabulary, and the vocabulary has "
                        f"changed. Write {key}={value} into its per_layer_config before resizing."
                    )
