"""transformers' caches of other makes: quantised keys and values, and the pages of continuous batching.

Both know keys and values of softmax attention over all tokens and nothing else, so that they serve patterns of such
mixers alone. Shapes: B batch, G key/value heads, T new tokens, S keys, W head width.
"""

from typing import Any

from torch import Tensor
from transformers import LlamaConfig
from transformers.cache_utils import Cache, QuantizedCache

from ..configuration.stack import KV_LAYER_TYPE
from .cache import MixerKVLayer
from .context import Past


def check_dense(model: Any, what: str, own_heads: bool = True) -> None:
    """Raise ValueError if `what` cannot serve all layers of the stack `model`, naming the mixers.

    Args:
        model: The stack.
        what: Begins the message.
        own_heads: Whether layers may have other key/value heads than the config says.
    """
    config = model.config
    unable = [
        name
        for name, layer in zip(config.mixer_names, model.layers)
        if not layer.mixer.plain_cache
        or not (own_heads or layer.mixer.num_key_value_heads == config.num_key_value_heads)
    ]
    if unable:
        raise ValueError(
            f"{what} serves softmax attention over all tokens, with one pair of keys and values"
            f"{'' if own_heads else ' in num_key_value_heads heads'}, and cannot hold the cache of "
            f"{', '.join(dict.fromkeys(unable))}. Use generate() with its default cache, or cache_implementation="
            "'static'."
        )


# ---------------------------------------------------------------------- quantised


class MixerQuantizedLayer(MixerKVLayer):
    """Counts tokens as the other layers do, and leaves keys and values to one of transformers' quantised layers."""

    _layer_type: str | None = None  # named below, see the static layers

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def append(self, key: Tensor, value: Tensor, keep: Tensor, all_real: bool) -> tuple[Tensor, Tensor]:
        self.count(keep, all_real)
        self.is_initialized = True
        return self.inner.update(key, value)

    def reset(self) -> None:
        """Forget everything."""
        self.inner.reset()
        self.__init__(self.inner)  # type: ignore[misc]

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing can be undone."""
        if tokens_to_remove:
            raise ValueError("A quantised cache cannot be cropped, as assisted decoding asks; use the default cache.")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select batch rows, as beam search does."""
        super().reorder_cache(beam_idx)
        self.inner.reorder_cache(beam_idx)


MixerQuantizedLayer._layer_type = KV_LAYER_TYPE


def quantized_cache(config: Any, settings: dict[str, Any] | None) -> Cache:
    """`QuantizedCache` for a pattern of dense mixers; `settings` are generate()'s `cache_config`."""
    dense = LlamaConfig(num_hidden_layers=len(config.layer_types))  # whose layers are all called full attention
    settings = {"backend": "quanto", **(settings or {}), "config": dense}
    return Cache(layers=[MixerQuantizedLayer(layer) for layer in QuantizedCache(**settings).layers])


# ---------------------------------------------------------------------- continuous batching


def is_paged(cache: Any) -> bool:
    """Whether `cache` is the one of continuous batching."""
    return hasattr(cache, "cache_allocators")


class PagedLayer:
    """What a dense mixer sees of the pages."""

    def __init__(self, cache: Any, layer_idx: int, arguments: dict[str, Any]) -> None:
        self.cache, self.layer_idx, self.arguments = cache, layer_idx, arguments

    def append(self, key: Tensor, value: Tensor, keep: Tensor, all_real: bool) -> tuple[Tensor, Tensor]:
        """Keys and values [1, G, T, W] of all requests into their pages; those each may read, [1, G, S, W]."""
        return self.cache.update(key, value, self.layer_idx, dict(self.arguments))

    def get_seq_length(self) -> int:
        """Requests are counted elsewhere."""
        return 0


class PagedLayers:
    """The pages as the layers of a cache.

    Args:
        cache: transformers' `PagedAttentionCache`.
        arguments: What else came with it: indices and lengths.
        num_layers: Of the model.
    """

    counts_elsewhere = True  # how many tokens a request has is known to the scheduler, not to the layers

    def __init__(self, cache: Any, arguments: dict[str, Any], num_layers: int) -> None:
        self.layers = [PagedLayer(cache, i, arguments) for i in range(num_layers)]


def paged_mask(attention_mask: Any, T: int) -> tuple[Tensor, Past]:
    """The 4-D mask [1, 1, T, S] of a step of continuous batching, and its keys as a past of S − T tokens."""
    if isinstance(attention_mask, dict):
        attention_mask = next(iter(attention_mask.values()))
    if attention_mask is None:
        raise ValueError("Continuous batching needs attn_implementation='sdpa' or 'eager' here, not a flash one.")
    return attention_mask, Past(attention_mask.shape[-1] - T)


class View:
    """An object with some attributes replaced; what is set goes to the object itself."""

    def __init__(self, viewed: Any, **replaced: Any) -> None:
        self.__dict__.update(_viewed=viewed, **replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._viewed, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._viewed, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._viewed(*args, **kwargs)


def paged_view(model: Any) -> Any:
    """A model of dense mixers as continuous batching knows models: all its layers are called full attention."""
    config = View(model.config, layer_types=["full_attention"] * len(model.config.layer_types))
    config.__dict__["get_text_config"] = lambda *args, **kwargs: config
    view = View(model, config=config)
    view.__dict__["eval"] = lambda: (model.eval(), view)[1]
    return view
