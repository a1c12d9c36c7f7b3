"""Cache layers for transformers' `DynamicCache`: constant-size states with exact rollback, and keys and values.

A layer is born empty and filled by its mixer. `cumulative_length` counts physical tokens (pads included), `num_real`
[B] the real ones. All named tensors have the batch in dimension 0.

Rollback: while `record_past` is on, a state layer keeps the inputs each call fed into the mixer's recurrence.
`crop` only marks how far to go back; the next `read` replays the recurrence from the nearest kept state.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING, CacheLayerMixin, DynamicLayer

from ..configuration.stack import KV_LAYER_TYPE, STATE_LAYER_TYPE

States = dict[str, Tensor]
TAIL = "tail."  # begins the names of a tail's tensors among those of its layer
Advance = Callable[[States, States, Tensor | None], States]  # (inputs, states, lengths) -> states


@dataclass
class _Record:
    """One call while the past is recorded: what went in, and (first and last call only) the states before it."""

    states: States | None
    num_real: Tensor  # before the call
    inputs: States  # [R, L, …] each, real tokens first
    keep: Tensor  # [B, T] in physical order

    def map(self, function: Callable[[Tensor], Tensor]) -> "_Record":
        return _Record(
            None if self.states is None else {name: function(x) for name, x in self.states.items()},
            function(self.num_real),
            {name: function(x) for name, x in self.inputs.items()},
            function(self.keep),
        )


class _RealTokens:
    """Bookkeeping both layer kinds share.

    Attributes:
        is_broken: Whether a call raised after a layer of the cache had counted its tokens (see `whole_call`).
    """

    num_real: Tensor | None
    cumulative_length: int
    is_broken: bool

    def _count(self, keep: Tensor) -> None:
        now = keep.sum(1)
        self.num_real = now if self.num_real is None else self.num_real + now
        self.cumulative_length += keep.shape[1]

    def _target(self, tokens_to_remove: int) -> int:
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of tokens to remove (or 0), got {tokens_to_remove}.")
        target = self.cumulative_length + tokens_to_remove
        if target < 0:
            raise ValueError(f"Cannot remove {-tokens_to_remove} tokens from a cache of {self.cumulative_length}.")
        return target


class MixerStateLayer(_RealTokens, CacheLayerMixin):
    """Named tensors of bounded size of one layer: recurrent states, convolution tails, rings of keys and values.

    Attributes:
        num_places: Tokens a static cache is made for, in which no state may change its size; None elsewhere.
    """

    num_places: int | None = None
    _layer_type: str | None = STATE_LAYER_TYPE
    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.record_past = False
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.states: States = {}
        self.num_real = None
        self.cumulative_length = 0
        self.is_broken = False
        self.is_initialized = False
        self._history: list[_Record] = []
        self._replay_to: int | None = None  # physical length the stale `states` must be brought back to

    # ------------------------------------------------------------------ used by mixers

    def read(self, advance: Advance) -> States | None:
        """The states, or None when nothing has been seen.

        Args:
            advance: The mixer's recurrence `(inputs, states, lengths) -> states`; replays a pending rollback. Called
                with `states={}` to start from nothing.
        """
        if self._replay_to is not None:
            self._replay(advance)
        return self.states or None

    def write(self, states: States, inputs: States, keep: Tensor) -> None:
        """Store the states after a call.

        Args:
            states: What the next call needs.
            inputs: [R, L, …] tensors `advance` would be fed with to get there; kept while the past is recorded.
            keep: [B, T] real tokens of the call.
        """
        if self.record_past:
            for record in self._history[1:]:
                record.states = None
            num_real = self.num_real if self.num_real is not None else keep.new_zeros(keep.shape[0], dtype=torch.long)
            inputs = {name: x.detach() for name, x in inputs.items()}
            self._history.append(_Record(self.states, num_real, inputs, keep))
        self.states = states
        self._count(keep)
        self.is_initialized = True

    def named_tensors(self) -> States:
        """The states by name: what a decoding step outside Python takes and returns."""
        return dict(self.states)

    def load_tensors(self, tensors: States, keep: Tensor) -> None:
        """Become the layer whose `named_tensors` are `tensors`, after the tokens `keep` [B, S]."""
        self.reset()
        self.states = dict(tensors)
        self.is_initialized = True
        self._count(keep)

    # ------------------------------------------------------------------ rollback

    def activate_past_recording(self) -> None:
        """From here on, `crop` can restore any length."""
        if not self.record_past:
            self.record_past = True
            if self._replay_to is None:  # else the next call still needs it
                self._history = []

    def crop(self, tokens_to_remove: int) -> None:
        """Go back by `-tokens_to_remove` physical tokens (0: nothing to undo).

        Raises:
            ValueError: A positive number, or further back than `activate_past_recording`.
        """
        target = self._target(tokens_to_remove)
        if target == self.cumulative_length:
            return
        start = self.cumulative_length - sum(record.keep.shape[1] for record in self._history)
        if not self.record_past or target < start:
            raise ValueError(
                f"Cannot go back to {target} tokens: "
                + (f"recording began at {start}. " if self.record_past else "the past is not recorded. ")
                + "Call cache.activate_past_recording() before the tokens that may have to be undone."
            )
        # keep the records up to the target, the last of them cut
        length = start
        kept: list[_Record] = []
        for record in self._history:
            if length >= target and kept:
                break
            size = min(record.keep.shape[1], target - length)
            kept.append(_Record(record.states, record.num_real, record.inputs, record.keep[:, :size]))
            length += size
        self._history = kept
        last = kept[-1]
        self.cumulative_length, self.num_real = target, last.num_real + last.keep.sum(1)
        self._replay_to = target

    def _replay(self, advance: Advance) -> None:
        self._replay_to = None
        begin = max(i for i, record in enumerate(self._history) if record.states is not None)
        states: States = self._history[begin].states or {}
        for record in self._history[begin:]:
            lengths = record.keep.sum(1)
            size = int(lengths.max())
            if size:
                inputs = {name: x[:, :size] for name, x in record.inputs.items()}
                states = advance(inputs, states, lengths)
        self.states = states

    # ------------------------------------------------------------------ transformers' cache interface

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: `write` brings the tensors."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Not for keys and values."""
        raise TypeError("A MixerStateLayer holds named states, not keys and values; use read() and write().")

    def get_seq_length(self) -> int:
        """Physical tokens seen."""
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(key length, offset) of the full mask transformers would build."""
        return self.cumulative_length + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply `function` to every tensor kept, recorded ones included."""
        self.states = {name: function(x) for name, x in self.states.items()}
        self._history = [record.map(function) for record in self._history]
        if self.num_real is not None:
            self.num_real = function(self.num_real)

    def offload(self) -> None:
        """Move to the CPU."""
        self.map_tensors(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """States are small; mixers read them from wherever they are."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select batch rows, as beam search does."""
        self.map_tensors(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch row `repeats` times."""
        self.map_tensors(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given batch rows."""
        self.map_tensors(lambda x: x[indices.to(x.device)])

    def num_bytes(self) -> int:
        """Bytes of the states, recorded past not included."""
        return sum(x.numel() * x.element_size() for x in self.states.values())


class MixerKVLayer(_RealTokens, DynamicLayer):
    """transformers' growing keys and values, plus which of them are real, plus any number of named growing streams.

    A mixer with one pair of keys and values calls `append`. One that keeps something else, or several pairs, calls
    `count` once a forward and `extend` for each stream. Every stream has the batch on its first and time on its last
    axis but one. What does not grow by one entry a token (the tail of a convolution, slots that several tokens share)
    lives in `tail`, a layer of named states that is read and written as such and rolls back, reorders and moves with
    the rest; with one in use, `crop` needs the past to be recorded.
    """

    _layer_type: str | None = KV_LAYER_TYPE
    supports_early_init = False
    tail_class: type[MixerStateLayer] = MixerStateLayer

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.streams: States = {}
        self.keep: Tensor | None = None  # [B, S]; None when all are real
        self.num_real = None
        self.cumulative_length = 0
        self.is_broken = False
        self.device = None  # type: ignore[assignment]
        self.tail = self.tail_class()

    # ------------------------------------------------------------------ used by mixers

    def append(self, key: Tensor, value: Tensor, keep: Tensor, all_real: bool) -> tuple[Tensor, Tensor]:
        """Add keys and values [B, H, T, W] of the tokens `keep` [B, T] describes; returns all of them."""
        self.count(keep, all_real)
        return self.update(key, value)

    def count(self, keep: Tensor, all_real: bool) -> None:
        """Note the tokens `keep` [B, T] of this call; once a call, before `extend`."""
        if not all_real and self.keep is None:
            self.keep = keep.new_ones(keep.shape[0], self.cumulative_length)
        if self.keep is not None:
            self.keep = torch.cat([self.keep, keep], dim=1)
        self.device = keep.device
        self._count(keep)

    def extend(self, name: str, new: Tensor) -> Tensor:
        """Add `new` [B, …, T, W] of the tokens counted last to the stream `name`; returns the whole stream.

        Raises:
            ValueError: The stream does not come to one entry for every token counted.
        """
        past = self.streams.get(name)
        whole = new if past is None else torch.cat([past, new], dim=-2)
        if whole.shape[-2] != self.cumulative_length:
            raise ValueError(
                f"The stream {name!r} would hold {whole.shape[-2]} tokens of {self.cumulative_length} seen; call "
                "count() once in every forward and extend() every stream by all of its tokens."
            )
        self.is_initialized = True
        self.streams[name] = whole
        return whole

    def named_tensors(self) -> States:
        """Everything kept, by name: what a decoding step outside Python takes and returns.

        Keys, values and streams have time on their last axis but one; the names of the tail begin with "tail.".
        """
        own = {"keys": self.keys, "values": self.values, **self.streams}
        tail = {f"{TAIL}{name}": x for name, x in self.tail.named_tensors().items()}
        return {name: x for name, x in own.items() if x is not None} | tail

    def load_tensors(self, tensors: States, keep: Tensor) -> None:
        """Become the layer whose `named_tensors` are `tensors`, after the tokens `keep` [B, S]."""
        self.reset()
        streams = {name: x for name, x in tensors.items() if not name.startswith(TAIL)}
        if len(tail := {name.removeprefix(TAIL): x for name, x in tensors.items() if name.startswith(TAIL)}):
            self.tail.load_tensors(tail, keep)
        self.keys, self.values = streams.pop("keys", None), streams.pop("values", None)
        self.streams = streams
        self.keep, self.device, self.is_initialized = keep, keep.device, True
        self._count(keep)

    # ------------------------------------------------------------------ transformers' cache interface

    def _map(self, function: Callable[[Tensor], Tensor], *others: str) -> None:
        """Apply `function` to everything that grows, and to the attributes called `others`."""
        self.streams = {name: function(x) for name, x in self.streams.items()}
        for name in ("keys", "values", *others):
            if (x := getattr(self, name)) is not None:
                setattr(self, name, function(x))

    def _map_all(self, function: Callable[[Tensor], Tensor], *others: str) -> None:
        """The same, and to the tail."""
        self._map(function, *others)
        self.tail.map_tensors(function)

    def reset(self) -> None:
        """Forget everything."""
        recording = self.tail.record_past
        self.__init__()  # type: ignore[misc]
        self.tail.record_past = recording

    def activate_past_recording(self) -> None:
        """From here on, `crop` can restore any length, also of the tail."""
        self.tail.activate_past_recording()

    def get_seq_length(self) -> int:
        """Physical tokens seen."""
        return self.cumulative_length

    def _crop_tail(self, tokens_to_remove: int) -> None:
        if self.tail.is_initialized:
            self.tail.crop(tokens_to_remove)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` tokens (0: nothing to undo)."""
        target = self._target(tokens_to_remove)
        if target == self.cumulative_length or self.num_real is None:
            return
        self._crop_tail(tokens_to_remove)
        removed = self.cumulative_length - target
        real = torch.full_like(self.num_real, removed) if self.keep is None else self.keep[:, target:].sum(1)
        self.num_real = self.num_real - real
        self.keep = None if self.keep is None else self.keep[:, :target]
        self._map(lambda x: x[..., :target, :])
        self.cumulative_length = target

    def offload(self) -> None:
        """Move everything to the CPU."""
        self._map_all(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move it back."""
        if self.device is not None:
            self._map_all(lambda x: x.to(self.device, non_blocking=True))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select batch rows, as beam search does."""
        self._map_all(lambda x: x.index_select(0, beam_idx.to(x.device)), "keep", "num_real")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch row `repeats` times."""
        self._map_all(lambda x: x.repeat_interleave(repeats, dim=0), "keep", "num_real")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given batch rows."""
        self._map_all(lambda x: x[indices.to(x.device)], "keep", "num_real")

    def num_bytes(self) -> int:
        """Bytes of everything that grows, and of the tail."""
        kept = [x for x in (self.keys, self.values, *self.streams.values()) if x is not None]
        return sum(x.numel() * x.element_size() for x in kept) + self.tail.num_bytes()


class _StaticCount:
    """Counting in tensors that stay where they are: in a compiled step no number changes from call to call."""

    num_real: Tensor | None
    _length: Tensor

    @property
    def cumulative_length(self) -> Any:
        """Physical tokens seen; a tensor of no dimensions while a graph is compiled."""
        return self._length.clone() if torch.compiler.is_compiling() else int(self._length)

    @cumulative_length.setter
    def cumulative_length(self, value: Any) -> None:
        if torch.compiler.is_compiling():
            self._length.copy_(value)
        else:
            self._length = torch.tensor(value)

    def _count(self, keep: Tensor) -> None:
        now = keep.sum(1)
        if self.num_real is None or getattr(self, "record_past", False):  # records keep the old count
            self.num_real = now if self.num_real is None else self.num_real + now
        else:
            self.num_real.add_(now)
        self.cumulative_length += keep.shape[1]


class MixerStaticStateLayer(_StaticCount, MixerStateLayer):
    """States that stay where they are from call to call, as a compiled decoding step wants them."""

    _layer_type: str | None = None  # named below: transformers takes a class with a name for the growing cache's

    def __init__(self, max_cache_len: int | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.num_places = max_cache_len

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """Not while the past is recorded, whose records grow."""
        return not self.record_past

    def write(self, states: States, inputs: States, keep: Tensor) -> None:
        """Store the states after a call, in the tensors of the call before. See the base class."""
        kept = self.states
        super().write(states, inputs, keep)
        if kept and not self.record_past:
            # a rollback may have left them shorter
            same = {name: kept[name] for name, x in states.items() if kept[name].shape == x.shape}
            self.states = {name: same[name].copy_(x) if name in same else x for name, x in states.items()}


class MixerStaticKVLayer(_StaticCount, MixerKVLayer):
    """Keys, values and streams of fixed length, filled in place.

    A mixer gets all `max_cache_len` places back, and a mask that hides the empty ones.
    """

    _layer_type: str | None = None
    tail_class = MixerStaticStateLayer

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """Not while a tail records its past."""
        return not (self.tail.is_initialized and self.tail.record_past)

    def __init__(self, max_cache_len: int, **kwargs: Any) -> None:
        super().__init__()
        self.max_cache_len = max_cache_len

    def reset(self) -> None:
        """Forget everything."""
        recording = self.tail.record_past
        self.__init__(self.max_cache_len)  # type: ignore[misc]
        self.tail.record_past = recording

    def get_max_length(self) -> int:
        """Places there are."""
        return self.max_cache_len

    def append(self, key: Tensor, value: Tensor, keep: Tensor, all_real: bool) -> tuple[Tensor, Tensor]:
        self.count(keep, all_real)
        return self.extend("key", key), self.extend("value", value)

    def count(self, keep: Tensor, all_real: bool) -> None:
        start, T = self.cumulative_length, keep.shape[1]
        if not torch.compiler.is_compiling() and start + T > self.max_cache_len:
            raise ValueError(
                f"The static cache has {self.max_cache_len} places, {start} of them taken; {T} more tokens do not fit. "
                "Make it longer (max_cache_len), or use a dynamic cache."
            )
        if self.keep is None:
            self.keep = keep.new_zeros(keep.shape[0], self.max_cache_len)
        self.keep.index_copy_(1, start + torch.arange(T, device=keep.device), keep)
        self.device = keep.device
        self._count(keep)

    def extend(self, name: str, new: Tensor) -> Tensor:
        T = new.shape[-2]
        if name not in self.streams:
            self.is_initialized = True
            self.streams[name] = new.new_zeros(*new.shape[:-2], self.max_cache_len, new.shape[-1])
        places = self.cumulative_length - T + torch.arange(T, device=new.device)
        return self.streams[name].index_copy_(new.dim() - 2, places, new)

    def crop(self, tokens_to_remove: int) -> None:
        target = self._target(tokens_to_remove)
        if self.keep is None:
            return
        self._crop_tail(tokens_to_remove)
        self.keep[:, target:] = False
        self.num_real, self.cumulative_length = self.keep.sum(1), target


MixerStaticStateLayer._layer_type = STATE_LAYER_TYPE
MixerStaticKVLayer._layer_type = KV_LAYER_TYPE
STATIC_LAYER_TYPE_MAPPING.setdefault(STATE_LAYER_TYPE, MixerStaticStateLayer)
STATIC_LAYER_TYPE_MAPPING.setdefault(KV_LAYER_TYPE, MixerStaticKVLayer)


@contextmanager
def whole_call(cache: Any) -> Iterator[None]:
    """A call takes effect in all layers of `cache` (or None), or the cache says from then on that it is broken."""
    before = _tokens_counted(cache)
    try:
        yield
    except BaseException:  # an interrupt from the keyboard too
        if _tokens_counted(cache) != before:
            for layer in cache.layers:
                layer.is_broken = True
        raise


def _tokens_counted(cache: Any) -> Any:
    return sum(layer.get_seq_length() for layer in getattr(cache, "layers", ()))


def check_whole(cache: Any) -> None:
    """Raise ValueError if an earlier call with `cache` has left it broken."""
    if any(getattr(layer, "is_broken", False) for layer in cache.layers):
        raise ValueError(
            "An earlier call with this cache raised after layers had counted its tokens, so the cache is no longer "
            "that of any sequence. Start anew with an empty cache, or empty this one with cache.reset()."
        )


def check_counted(cache: Any, mixers: list[str], length: Any) -> None:
    """Raise ValueError naming the mixers whose layers have not counted a first call of `length` tokens."""
    idle = [name for name, layer in zip(mixers, cache.layers) if layer.get_seq_length() != length]
    if idle:
        raise ValueError(
            f"The mixer {idle[0]!r} keeps nothing in the cache it was given, so a next token would be computed without "
            "its past. Pass use_cache=False (generate(…, use_cache=False) too), or let it write its states: a subclass "
            "of RowMixer calls layer.read and layer.write in every `mix`."
        )


def cache_num_bytes(cache: Any) -> int:
    """Bytes all layers of a cache occupy."""
    return sum(layer.num_bytes() for layer in cache.layers)
