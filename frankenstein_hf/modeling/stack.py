"""The stack of layers under every model of the family: what it is made of, and how it is run.

Shapes: B batch, T tokens, D model width, H heads.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import logging

from ..configuration.component import Round
from ..configuration.registries import MIXERS
from .cache import check_counted, check_whole, whole_call
from .context import Past, SequenceContext
from .extras import LayerExtras, summed
from .implementations import component_class
from .layer import FrankensteinLayer
from .norms import make_norm
from .ops.backend import TRITON, check_triton
from .ops.tracing import exporting, refusing
from .positions import RotaryEmbedding
from .pretrained import FrankensteinPreTrainedModel
from .residuals import Stream

logger = logging.get_logger(__name__)


@dataclass
class StackOutput(BaseModelOutputWithPast):
    """transformers' output, and what layers return besides.

    Attributes:
        aux_losses: The layers' auxiliary losses, coefficients included, summed by name; None when there are none.
        metrics: What layers report about themselves, by name, one row a layer that reports it, without gradient.
        max_logits: When asked for, [H] of every layer, None for mixers without such logits.
    """

    aux_losses: dict[str, Tensor] | None = None
    metrics: dict[str, Tensor] | None = None
    max_logits: tuple[Tensor | None, ...] | None = None

    @property
    def aux_loss(self) -> Tensor | None:
        """All auxiliary losses together, None when there are none."""
        return None if not self.aux_losses else torch.stack(list(self.aux_losses.values())).sum()

    def plus_aux_loss(self, loss: Tensor, training: bool, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        """A head's `loss` on `labels`, and in training the auxiliary losses of the layers.

        Where the loss is a sum over `num_items_in_batch` labels of several accumulated batches, each batch brings its
        share of them: the auxiliary losses are means, and would else count once a batch.
        """
        if (extra := self.aux_loss) is None or not training:
            return loss
        if num_items_in_batch is not None:
            extra = extra * (labels != -100).sum().to(extra.device) / num_items_in_batch
        return loss + extra.to(loss.device)


@dataclass
class Collected:
    """What the layers of one forward return, as far as it is asked for."""

    hidden_states: list[Tensor] | None = None
    attentions: list[Tensor | None] | None = None
    max_logits: list[Tensor | None] | None = None
    aux_losses: list[Any] = field(default_factory=list)
    metrics: dict[str, list[Tensor]] = field(default_factory=dict)
    carried: dict[str, Tensor] = field(default_factory=dict)  # from layer to layer

    def add(self, extras: LayerExtras) -> None:
        """Keep what one layer returned."""
        if self.attentions is not None:
            self.attentions.append(extras.weights)
        if self.max_logits is not None:
            self.max_logits.append(extras.max_logits)
        self.aux_losses.append(extras.aux_losses)
        self.carried = {**self.carried, **extras.carried}
        for name, value in extras.metrics.items():
            self.metrics.setdefault(name, []).append(value.detach())


@dataclass(frozen=True)
class CacheLayers:
    """The part of a cache that the layers of one round of looped depth use, so that layer i finds its own at i."""

    layers: list


class StackModel(FrankensteinPreTrainedModel):
    """Base of the models that are a stack: they build it with `build_stack` and run it with `run_stack`.

    It is no module of its own, so that its parts are `layers.N…` and `norm` of the model.
    """

    def build_stack(self, is_causal: bool | None) -> None:
        """Make the layers and the final norm.

        Args:
            is_causal: Whether later tokens are invisible; None: what the config says, else False.

        Raises:
            ValueError: A mixer of the pattern does not support the mode.
        """
        config = self.config
        self.is_causal = bool(config.is_causal if is_causal is None else is_causal)
        mode = "causal" if self.is_causal else "bidirectional"
        for name in dict.fromkeys(config.mixer_names):
            if not getattr(MIXERS.get(name), mode):
                able = [spec.name for spec in MIXERS if getattr(spec, mode)]
                raise ValueError(f"The mixer {name!r} has no {mode} form; choose one of {', '.join(sorted(able))}.")
        self.layers = nn.ModuleList([FrankensteinLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = make_norm(config)
        self.residual = component_class(config, "residual")(config)
        self.rotary_emb = RotaryEmbedding(config)
        self.gradient_checkpointing = False
        self._tied_weights_keys = self._shared_tables()

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

    def run_stack(
        self,
        embeddings: Tensor,
        context: SequenceContext,
        cache: Any = None,
        *,
        output_hidden_states: bool = False,
    ) -> StackOutput:
        """Embeddings [B, T, D] through all layers and the final norm.

        Args:
            embeddings: The first layer's input.
            context: The batch, and what layers are asked to return.
            cache: Filled by `prepare_cache`, or None.
            output_hidden_states: Keep the input of every layer and the normed output of the last.
        """
        collected = Collected(
            [] if output_hidden_states else None,
            [] if context.output_attentions else None,
            [] if context.output_max_logits else None,
        )
        if not context.all_real:  # whatever stands at a pad, NaN included, must not reach a product
            embeddings = embeddings.masked_fill(~context.keep[..., None], 0.0)
        with whole_call(cache):
            stream = self.residual.enter(embeddings)
            if not isinstance(stream, Tensor) and self.gradient_checkpointing and self.training:
                self._refuse_reentrant_checkpointing()
            for part in self._rounds():
                run = partial(self._run_round, part=part, context=context, cache=cache, collected=collected)
                stream = self.residual.loop(stream, run, part.loop) if part.looped else run(stream)
            hidden_states = self.norm(self.residual.leave(stream))
            counts_here = cache is not None and not getattr(cache, "counts_elsewhere", False)
            if counts_here and not torch.compiler.is_compiling() and context.past_length == 0:
                names = [self.config.mixer_names[i] for part in self._rounds() for i in part.layers]
                check_counted(cache, names, embeddings.shape[1])
        kept = collected.hidden_states
        return StackOutput(
            last_hidden_state=hidden_states,
            cache=cache,
            hidden_states=None if kept is None else (*kept, hidden_states),
            attentions=None if collected.attentions is None else tuple(collected.attentions),  # type: ignore[arg-type]
            aux_losses=summed(collected.aux_losses) or None,
            metrics={name: torch.stack(values) for name, values in collected.metrics.items()} or None,
            max_logits=None if collected.max_logits is None else tuple(collected.max_logits),
        )

    def _refuse_reentrant_checkpointing(self) -> None:
        how = getattr(self.layers[0]._gradient_checkpointing_func, "keywords", {})
        if how.get("use_reentrant"):
            raise ValueError(
                f"residual={self.config.residual!r} has a stream of several tensors, whose gradients reentrant "
                "checkpointing loses: set gradient_checkpointing_kwargs={'use_reentrant': False}."
            )

    def _rounds(self) -> list[Round]:
        built, wanted = len(self.layers), self.config.num_hidden_layers
        # the config says fewer layers than there are while generate() drafts with an early exit
        return self.config.rounds_of(built, None if wanted == built else wanted)

    def _run_round(
        self, stream: Stream, part: Round, context: SequenceContext, cache: Any, collected: Collected
    ) -> Stream:
        if cache is not None and part.offset:
            cache = CacheLayers(cache.layers[part.offset :])
        for i in part.layers:
            if collected.hidden_states is not None:
                collected.hidden_states.append(self.residual.view(stream))
            layer: Any = self.layers[i]
            if exporting():
                layer = refusing(layer, f"Layer {i} ({self.config.mixer_names[i]!r})", context.keep.shape)
            stream, extras = layer(stream, context, cache=cache, loop=part.loop, carried=collected.carried)
            collected.add(extras)
        return stream

    def wants_cache(self, cache: Any, use_cache: bool | None) -> tuple[Any, bool]:
        """The cache to use and whether to return one, given what the caller asked for."""
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            if cache is not None:
                logger.warning_once("A cache cannot be used under gradient checkpointing; it is ignored.")
            return None, False
        return cache, self.config.use_cache and not self.training if use_cache is None else use_cache

    def check_backend(self, device: torch.device, output_attentions: bool) -> None:
        """Raises ValueError when the backend cannot run there, or cannot return attention weights."""
        backend = self.config._attn_implementation
        if output_attentions and backend != "eager":
            raise ValueError(
                "output_attentions needs the weights to be materialised: build the model with "
                "attn_implementation='eager' or call model.set_attn_implementation('eager')."
            )
        if backend == TRITON and any(getattr(layer.mixer, "needs_kernel", False) for layer in self.layers):
            check_triton(device)

    def prepare_cache(self, cache: Any) -> Past | None:
        """What `make_context` wants to know of a cache, None without one; an empty one gets its layers here.

        Raises:
            ValueError: The model is bidirectional, or the cache was made for other layers, is out of step or broken.
        """
        if cache is None:
            return None
        if not self.is_causal:
            raise ValueError("A bidirectional model has no cache: later tokens change earlier outputs.")
        types = self.config.layer_types_of(self._rounds())
        _fill_cache(cache, self.config, types)
        check_whole(cache)
        lengths = [layer.get_seq_length() for layer in cache.layers[: len(types)]]
        if not isinstance(lengths[0], Tensor) and any(length != lengths[0] for length in lengths):
            raise ValueError(
                f"The layers of the cache have seen different numbers of tokens ({lengths}), as after a crop that "
                "failed half-way. Start anew with an empty cache."
            )
        masks = (layer.keep for layer in cache.layers if getattr(layer, "keep", None) is not None)
        num_real = cache.layers[0].num_real
        return Past(
            lengths[0],
            None if num_real is None else num_real.clone(),  # which a layer may count on in place
            next(masks, None),
            next((n for layer in cache.layers if (n := getattr(layer, "max_cache_len", None))), None),
        )


def _fill_cache(cache: Any, config: Any, types: list[str]) -> None:
    """Give an empty cache built without the config its layers; refuse one made for another model."""
    if not isinstance(cache, Cache):
        raise ValueError(f"cache must be a transformers Cache such as DynamicCache(config=…), got {type(cache)}.")
    if not cache.layers:
        cache.layers, cache.layer_class_to_replicate = DynamicCache(config=config).layers, None
    kinds = [getattr(layer, "_layer_type", None) for layer in cache.layers]
    if kinds[: len(types)] != types:
        raise ValueError(
            f"The cache was made for other layers ({kinds}) than this model's ({types}); build it with "
            "DynamicCache(config=model.config). Prefix tuning, which brings keys and values of its own, has no place "
            "among states: tune prompts (PromptTuningConfig) or projections (LoraConfig) instead."
        )
