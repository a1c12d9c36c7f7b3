"""What every layer needs to know about the batch, decided once per forward: visibility, positions, documents, layout.

Shapes: B batch, T tokens of this call, S = past + T physical keys, R rows, L row length, D model width.

Pads and packed documents are dissolved here, so that mixers with states, windows or borders never meet them: they work
on `Rows`, which hold one document each, real tokens first. Dense attention keeps the layout it was given and a mask.
Positions always count real tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from .ops.tracing import exporting

RotaryFunction = Callable[[Tensor, int], tuple[Tensor, Tensor]]


@dataclass
class Rows:
    """A group of rows with one document each, real tokens first.

    Attributes:
        context: The context the rows belong to.
        index: [R, L] token of the flattened batch that stands at each place (any token behind the real ones), or None
            when the rows are the batch as given.
        lengths: [R] number of real tokens, or None when all L are real.
        num_past: [R] real tokens an earlier call has put into the cache, or None when there are none.
        size: L.
    """

    context: "SequenceContext"
    index: Tensor | None
    lengths: Tensor | None
    num_past: Tensor | None
    size: int

    def __post_init__(self) -> None:
        self._memo: dict[Any, Any] = {}  # derived lazily

    @property
    def is_causal(self) -> bool:
        """Whether later tokens are invisible."""
        return self.context.is_causal

    @property
    def keep(self) -> Tensor | None:
        """[R, L] True at real tokens; None when all are real."""
        if self.lengths is None:
            return None
        if "keep" not in self._memo:
            places = torch.arange(self.size, device=self.lengths.device)
            self._memo["keep"] = places < self.lengths[:, None]
        return self._memo["keep"]

    @property
    def positions(self) -> Tensor:
        """[R or 1, L] position of each token in its document, in real tokens."""
        device = self.context.keep.device
        places = torch.arange(self.size, device=device)[None]
        if self.lengths is not None:  # pads must not lengthen the row: some rotary scalings look at its length
            places = torch.minimum(places, (self.lengths[:, None] - 1).clamp_min(0))
        return places if self.num_past is None else places + self.num_past[:, None]

    def rotary(self, width: int) -> tuple[Tensor, Tensor]:
        """cos and sin [R or 1, L, width] for heads of any width."""
        if width not in self._memo:
            self._memo[width] = self.context.rotary_function(self.positions, width)
        return self._memo[width]

    def compact(self, x: Tensor) -> Tensor:
        """[B, T, …] -> [R, L, …]."""
        if self.index is None:
            return x
        return x.reshape(-1, *x.shape[2:]).index_select(0, self.index.flatten()).view(*self.index.shape, *x.shape[2:])

    def flip(self, x: Tensor) -> Tensor:
        """[R, L, …] with the real tokens of each row in reverse order; what lies behind them stays."""
        if self.lengths is None:
            return x.flip(1)
        if "flip" not in self._memo:
            places = torch.arange(self.size, device=x.device)[None]
            mirrored = self.lengths[:, None] - 1 - places
            row = torch.arange(x.shape[0], device=x.device)[:, None] * self.size
            self._memo["flip"] = (row + torch.where(mirrored >= 0, mirrored, places)).flatten()
        return x.reshape(-1, *x.shape[2:]).index_select(0, self._memo["flip"]).view(x.shape)

    def zero_pads(self, x: Tensor, value: float = 0.0) -> Tensor:
        """`x` [R, L, …] with everything behind the real tokens set to `value`."""
        if self.keep is None:
            return x
        return x.masked_fill(~self.keep.view(*self.keep.shape, *[1] * (x.dim() - 2)), value)


@dataclass
class SequenceContext:
    """The batch as all layers see it; build it with `make_context`.

    Attributes:
        keep: [B, T] True at real tokens.
        all_real: Whether no token of this call is a pad.
        documents: [B, T] number of the document a token belongs to within its batch row, or None when each batch row
            is one document.
        positions: [B or 1, T] position in the document, counted in real tokens, past included.
        num_past: [B] real tokens already in the cache, or None when there are none.
        past_length: Physical length of the cache; a tensor of no dimensions in a compiled step on a static one.
        past_keep: [B, past_length] True at real cached tokens, or None when all are.
        num_places: S of a static cache, whose places behind the tokens of this call are empty; None: past_length + T.
        is_causal: Whether later tokens are invisible.
        input_ids: [B, T] or None when only embeddings were given.
        custom_mask: The caller's 4-D mask, bool (True = visible) or additive, or None.
        backend: The `attn_implementation` in force.
        rotary_function: `(positions, width) -> (cos, sin)`.
        output_attentions: Whether layers should return their weights where they have them.
        output_max_logits: Whether they should return their heads' largest logits where they have some.
        kernel_kwargs: Arguments only transformers' attention functions read (`cu_seq_lens_q` …).
    """

    keep: Tensor
    all_real: bool
    documents: Tensor | None
    positions: Tensor
    num_past: Tensor | None
    past_length: int | Any
    past_keep: Tensor | None
    num_places: int | None
    is_causal: bool
    input_ids: Tensor | None
    custom_mask: Tensor | None
    backend: str
    rotary_function: RotaryFunction
    output_attentions: bool = False
    output_max_logits: bool = False
    kernel_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Derived lazily. No field: FSDP follows the fields of a layer's arguments, and rows know their context.
        self._memo: dict[Any, Any] = {}

    @property
    def num_real(self) -> Tensor:
        """[B] real tokens of each batch row, those in the cache included."""
        now = self.keep.sum(1)
        return now if self.num_past is None else now + self.num_past

    def to(self, device: torch.device | str, **kwargs: Any) -> "SequenceContext":
        """A copy with all tensors on `device`; what was derived lazily is derived again there."""
        moved: dict[str, Any] = {
            f.name: value.to(device, **kwargs)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)

    def rotary(self, width: int) -> tuple[Tensor, Tensor]:
        """cos and sin [B or 1, T, width] for heads of any width, in the native layout."""
        if ("rotary", width) not in self._memo:
            self._memo["rotary", width] = self.rotary_function(self.positions, width)
        return self._memo["rotary", width]

    def key_rotary(self, width: int, cached: bool) -> tuple[Tensor, Tensor]:
        """cos and sin [B or 1, S, width] for every key, for mixers that rotate keys when they read them.

        Args:
            width: Of the keys' heads.
            cached: Whether there is a cache, whose keys count too.

        Raises:
            ValueError: Positions of the caller's own (those that go with a 4-D mask), which no cache remembers.
        """
        if not cached:
            return self.rotary(width)
        if ("key_rotary", width) not in self._memo:
            self._memo["key_rotary", width] = self.rotary_function(self._key_positions(), width)
        return self._memo["key_rotary", width]

    def _key_positions(self) -> Tensor:
        """[B or 1, S] position of every key, cached ones included."""
        start, stop = self.past_length, self.past_length + self.keep.shape[1]
        counted = torch.arange(self._places(), device=self.keep.device)[None]
        own = self.custom_mask is not None and not torch.compiler.is_compiling()
        if own and not torch.equal(self.positions.to(counted), counted[:, start:stop].expand_as(self.positions)):
            raise ValueError(
                "This mixer rotates cached keys when it reads them, by their place in the sequence: with a cache and a "
                "4-D attention_mask, position_ids must be that place. Leave them out, or do without a cache."
            )
        if self.custom_mask is not None or (self.all_real and self.past_keep is None):
            return counted
        return (self._real_keys().cumsum(1) - 1).clamp_min(0)

    # ------------------------------------------------------------------ the native layout: masks

    def mask(self) -> Tensor | None:
        """Visibility [B, 1, T, S] for dense attention (True = visible; the caller's own mask may be additive).

        None when nothing needs masking beyond `causal_flag`. A pad sees itself only, so its row stays finite.
        """
        if "mask" not in self._memo:
            self._memo["mask"] = self._build_mask() if self.custom_mask is None else self._widened(self.custom_mask)
        return self._memo["mask"]

    @property
    def causal_flag(self) -> bool:
        """Whether the plain causal triangle is all that `mask()` leaves out (SDPA's `is_causal`)."""
        return self.mask() is None and self.is_causal and bool(self.keep.shape[1] > 1)

    def _places(self) -> int:
        """S."""
        return self.past_length + self.keep.shape[1] if self.num_places is None else self.num_places

    def _widened(self, mask: Tensor) -> Tensor:
        """The caller's mask with the empty places of a static cache hidden."""
        missing = self._places() - mask.shape[-1]
        hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        return torch.nn.functional.pad(mask, (0, missing), value=hidden) if missing else mask

    def _build_mask(self) -> Tensor | None:
        T = self.keep.shape[1]
        past, S, device = self.past_length, self._places(), self.keep.device
        plain = self.all_real and self.past_keep is None and self.documents is None and self.num_places is None
        if plain and (not self.is_causal or T == 1 or past == 0):
            return None
        places = torch.arange(T, device=device)
        visible = torch.ones(1, T, S, dtype=torch.bool, device=device)
        if self.is_causal:
            visible = visible & (torch.arange(S, device=device) <= places[:, None] + past)
        if self.documents is not None:  # only without a past
            visible = visible & (self.documents[:, :, None] == self.documents[:, None, :])
        if not self.all_real or self.past_keep is not None:
            own = torch.arange(S, device=device) == places[:, None] + past
            real = self._real_keys()
            visible = visible & real[:, None, :]
            keep = self.keep[:, :, None]
            visible = (visible & keep) | (own & ~keep)  # onnxruntime has no `where` between bools
        return visible[:, None]

    def _real_keys(self) -> Tensor:
        """[B, S] True at the places of real tokens, cached ones included."""
        (B, T), past, past_keep = self.keep.shape, self.past_length, self.past_keep
        if self.num_places is None:
            past_keep = self.keep.new_ones(B, past) if past_keep is None else past_keep
            return torch.cat([past_keep, self.keep], dim=1)
        # the cache's own mask, all places long
        past_keep = self.keep.new_zeros(B, self.num_places) if past_keep is None else past_keep
        return past_keep.index_copy(1, torch.arange(T, device=self.keep.device) + past, self.keep)

    # ------------------------------------------------------------------ the compact layout: rows

    @property
    def rows(self) -> list[Rows]:
        """The batch as rows; one group, unless documents of very different lengths would waste most of it."""
        if "rows" not in self._memo:
            self._memo["rows"] = list(self._build_rows())
        return self._memo["rows"]

    def _build_rows(self) -> Iterator[Rows]:
        B, T = self.keep.shape
        if self.documents is None:
            if self.all_real:
                yield Rows(self, None, None, self.num_past, T)
                return
            offsets = torch.arange(B, device=self.keep.device)[:, None] * T
            yield Rows(self, offsets + _real_first(self.keep), self.keep.sum(1), self.num_past, T)
            return
        rows = torch.arange(B, device=self.keep.device)[:, None]
        tokens = self.keep.flatten().nonzero().squeeze(1)  # flat index of every real token, in order
        labels = (rows * T + self.documents).flatten()[tokens]
        _, document, lengths = torch.unique_consecutive(labels, return_inverse=True, return_counts=True)
        place = torch.arange(len(tokens), device=tokens.device) - (lengths.cumsum(0) - lengths)[document]
        for members in _length_groups(lengths):
            number = torch.full_like(lengths, -1)
            number[members] = torch.arange(len(members), device=number.device)
            chosen = number[document] >= 0
            size = int(lengths[members].max())
            index = tokens.new_zeros(len(members), size)
            index[number[document[chosen]], place[chosen]] = tokens[chosen]
            yield Rows(self, index, lengths[members], None, size)

    def restore(self, outputs: list[Tensor]) -> Tensor:
        """One tensor [R, L, …] per group of `rows` -> [B, T, …]; zeros at pads that belong to no row."""
        if len(outputs) == 1 and self.rows[0].index is None:
            return outputs[0]
        flat = torch.cat([output.flatten(0, 1) for output in outputs])
        if "restore" not in self._memo:
            self._memo["restore"] = self._restore_index()
        source, lost = self._memo["restore"]
        native = flat.index_select(0, source).view(*self.keep.shape, *flat.shape[1:])
        return native if lost is None else native.masked_fill(lost.view(*lost.shape, *[1] * (native.dim() - 2)), 0)

    def _restore_index(self) -> tuple[Tensor, Tensor | None]:
        source = torch.zeros(self.keep.numel(), dtype=torch.long, device=self.keep.device)
        offset = 0
        for rows in self.rows:
            assert rows.index is not None
            places = torch.arange(rows.index.numel(), device=source.device) + offset
            if self.documents is None:  # the rows are permutations of the batch rows: pads have a place too
                source[rows.index.flatten()] = places
            else:
                real = rows.keep.flatten()  # type: ignore[union-attr]
                source[rows.index.flatten()[real]] = places[real]
            offset += rows.index.numel()
        return source, None if self.documents is None or self.all_real else ~self.keep

    def restore_weights(self, weights: list[Tensor]) -> Tensor:
        """Attention weights [R, H, L, L] of every group of rows -> [B, H, T, T]; zero across documents and at pads.

        With a past the last axis is what the mixer kept, in the mixer's own order.
        """
        if len(weights) == 1 and self.rows[0].index is None:
            return weights[0]
        if self.past_length:
            return self.restore([weight.transpose(1, 2) for weight in weights]).transpose(1, 2)
        B, T = self.keep.shape
        native = weights[0].new_zeros(B, T, T, weights[0].shape[1])
        for rows, weight in zip(self.rows, weights):
            assert rows.index is not None and rows.keep is not None
            batch, token = rows.index // T, rows.index % T
            real = rows.keep[:, :, None] & rows.keep[:, None, :]
            r, i, j = real.nonzero(as_tuple=True)
            native[batch[r, i], token[r, i], token[r, j]] = weight.permute(0, 2, 3, 1)[r, i, j]
        return native.permute(0, 3, 1, 2)


def _real_first(keep: Tensor) -> Tensor:
    """[B, T] the places of each row, those of real tokens first and otherwise in order."""
    places = torch.arange(keep.shape[1], device=keep.device).expand(keep.shape)
    target = torch.where(keep, keep.cumsum(1) - 1, keep.sum(1, keepdim=True) + (~keep).cumsum(1) - 1)
    return torch.zeros_like(target).scatter(1, target, places)


def _length_groups(lengths: Tensor) -> list[Tensor]:
    """Indices of rows to pad together: all, if at most half the places are wasted, else one group per power of two."""
    if len(lengths) * int(lengths.max()) <= 2 * int(lengths.sum()):
        return [torch.arange(len(lengths), device=lengths.device)]
    octave = torch.log2(lengths.double()).ceil()
    return [(octave == value).nonzero().squeeze(1) for value in octave.unique()]


# ---------------------------------------------------------------------- reading the caller's arguments


@dataclass(frozen=True)
class Batch:
    """What a caller says of the sequences of one call, as it was given.

    Attributes:
        shape: (B, T) of this call.
        device: Where the batch is.
        attention_mask: 2-D [B, T] or [B, past + T] with nonzero = real, or 4-D [B or 1, H or 1, T, past + T], bool with
            True = visible or additive.
        position_ids: [B or 1, T]. A document starts where they do not rise; with a 4-D mask they are taken as they are.
        seq_idx: [B, T] document numbers.
        cu_seq_lens_q: [documents + 1] borders in a batch of one.
        input_ids: [B, T] or None when only embeddings were given.
    """

    shape: tuple[int, int]
    device: torch.device
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    seq_idx: Tensor | None = None
    cu_seq_lens_q: Tensor | None = None
    input_ids: Tensor | None = None

    @classmethod
    def like(cls, tokens: Tensor, **said: Any) -> "Batch":
        """A batch of the shape and on the device of `tokens` [B, T, …], with what is `said` of it."""
        return cls((tokens.shape[0], tokens.shape[1]), tokens.device, **said)


@dataclass(frozen=True)
class Past:
    """What a cache reports before a call.

    Attributes:
        length: Physical length; a tensor of no dimensions in a compiled step on a static cache.
        num_real: [B] real tokens among them, or None when nothing is cached yet.
        keep: [B, length] True at real cached tokens, or None when all are. In a static cache it is all places long.
        num_places: Places of a static cache, else None.
    """

    length: int | Any = 0
    num_real: Tensor | None = None
    keep: Tensor | None = None
    num_places: int | None = None


def make_context(
    batch: Batch,
    past: Past | None = None,
    *,
    is_causal: bool,
    rotary_function: RotaryFunction,
    backend: str = "sdpa",
    output_attentions: bool = False,
    output_max_logits: bool = False,
    kernel_kwargs: dict[str, Any] | None = None,
) -> SequenceContext:
    """Check the caller's arguments and decide what the batch looks like.

    Args:
        batch: What the caller gave.
        past: What the cache reports; None without a cache, and only then the batch may be packed.
        is_causal, rotary_function, backend, output_attentions, output_max_logits, kernel_kwargs: See
            `SequenceContext`.

    Raises:
        ValueError: Shapes that do not fit, an empty batch, or packing together with a cache.
    """
    (B, T), device, position_ids = batch.shape, batch.device, batch.position_ids
    may_look = _may_look(batch, past)
    if B == 0 or T == 0:
        raise ValueError(f"The batch is empty: got {B} sequences of {T} tokens, at least one of one is needed.")
    look_for_documents = past is None
    past = past or Past()
    past_keep = past.keep
    custom_mask, mask_2d = _split_masks(batch.attention_mask, B, T, past.length)
    if position_ids is not None and (position_ids.dim() != 2 or position_ids.shape not in ((B, T), (1, T))):
        raise ValueError(f"position_ids must be [{B}, {T}] or [1, {T}], got {list(position_ids.shape)}.")
    keep = torch.ones(B, T, dtype=torch.bool, device=device)
    all_real = True
    if mask_2d is not None:
        keep = mask_2d[:, -T:].to(device=device, dtype=torch.bool)
        all_real = may_look and bool(keep.all())
        if mask_2d.shape[1] > T and may_look:
            given = mask_2d[:, :-T].to(device=device, dtype=torch.bool)
            past_keep = given if past.num_places is None else past_keep
            if past.num_real is not None and not torch.equal(given.sum(1), past.num_real.to(device)):
                raise ValueError(
                    "attention_mask marks other cached tokens as pads than the calls that cached them did "
                    f"({given.sum(1).tolist()} real tokens a row now, {past.num_real.tolist()} then); a cache "
                    "cannot forget single tokens. Start anew without the cache."
                )
    if past_keep is not None and past.num_places is None and may_look and bool(past_keep.all()):
        past_keep = None
    num_past = past.num_real if isinstance(past.length, Tensor) or past.length else None
    documents = None
    if custom_mask is not None:
        positions = position_ids if position_ids is not None else torch.arange(T, device=device)[None] + past.length
    else:
        if look_for_documents:
            if exporting() and any(x is not None for x in (position_ids, batch.seq_idx, batch.cu_seq_lens_q)):
                raise ValueError(
                    "Packed documents (position_ids, seq_idx, cu_seq_lens_q) cannot be exported: where they start is "
                    "read from the values, and a traced graph would keep what the example's values say. Leave them "
                    "out; positions are counted from attention_mask."
                )
            starts = _document_starts(batch, keep, all_real)
            documents = None if starts is None else starts.cumsum(1)
        elif batch.seq_idx is not None or batch.cu_seq_lens_q is not None:
            raise ValueError("seq_idx and cu_seq_lens_q describe packed documents, which cannot share a cache.")
        positions = _positions(keep, all_real, documents)
        if num_past is not None:
            positions = positions + num_past[:, None]
    return SequenceContext(
        keep=keep,
        all_real=all_real,
        documents=documents,
        positions=positions,
        num_past=num_past,
        past_length=past.length,
        past_keep=past_keep,
        num_places=past.num_places,
        is_causal=is_causal,
        input_ids=batch.input_ids,
        custom_mask=custom_mask,
        backend=backend,
        rotary_function=rotary_function,
        output_attentions=output_attentions,
        output_max_logits=output_max_logits,
        kernel_kwargs=kernel_kwargs or {},
    )


def _may_look(batch: Batch, past: Past | None) -> bool:
    """Whether to look at the values of masks: else every mask is taken for one with pads.

    Raises:
        ValueError: Under `torch.jit.trace`, which would keep what the example's values say without a word.
    """
    if torch.jit.is_tracing():
        raise ValueError(
            "torch.jit.trace (and torch.onnx.export with dynamo=False) would keep the pads and lengths of the example "
            "for all inputs; use torch.export.export or torch.onnx.export(…, dynamo=True)."
        )
    if exporting():
        return False
    # looking would be a break in the graph of a compiled decoding step
    return not (
        batch.shape[1] == 1 and past is not None and past.num_real is not None and torch.compiler.is_compiling()
    )


def _split_masks(mask: Tensor | None, B: int, T: int, past: Any) -> tuple[Tensor | None, Tensor | None]:
    if mask is None:
        return None, None
    if isinstance(mask, dict):
        raise ValueError("attention_mask must be a tensor; a dict of per-kind masks is not used by this model.")
    if isinstance(past, Tensor):  # lengths are not known while a graph is compiled
        return (None, mask) if mask.dim() == 2 else (mask, None)
    if mask.dim() == 2:
        if mask.shape[0] != B or mask.shape[1] not in (T, past + T):
            allowed = f"[{B}, {T}]" + (f" or [{B}, {past + T}] (cached tokens included)" if past else "")
            raise ValueError(f"attention_mask must be {allowed}, got {list(mask.shape)}.")
        return None, mask
    if mask.dim() == 4:
        if mask.shape[0] not in (1, B) or mask.shape[2] != T or mask.shape[3] != past + T:
            raise ValueError(
                f"A 4-D attention_mask must be [{B} or 1, heads or 1, {T}, {past + T}], got {list(mask.shape)}."
            )
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise ValueError(f"A 4-D attention_mask must be bool (True = visible) or additive, got {mask.dtype}.")
        return mask, None
    raise ValueError(f"attention_mask must have 2 or 4 dimensions, got shape {list(mask.shape)}.")


def _document_starts(batch: Batch, keep: Tensor, all_real: bool) -> Tensor | None:
    """[B, T] True at the first real token of every document but a row's first; None when every row is one document."""
    B, T = keep.shape
    position_ids, seq_idx, cu_seq_lens = batch.position_ids, batch.seq_idx, batch.cu_seq_lens_q
    if position_ids is None and seq_idx is None and cu_seq_lens is None:
        return None
    order = torch.arange(T, device=keep.device).expand(B, T) if all_real else _real_first(keep)
    starts = torch.zeros(B, T, dtype=torch.bool, device=keep.device)  # in the order of real tokens
    if position_ids is not None:
        position = position_ids.expand(B, T).gather(1, order)
        starts[:, 1:] |= position[:, 1:] <= position[:, :-1]
    if seq_idx is not None:
        if seq_idx.shape != keep.shape:
            raise ValueError(f"seq_idx must be [{B}, {T}], got {list(seq_idx.shape)}.")
        number = seq_idx.gather(1, order)
        starts[:, 1:] |= number[:, 1:] != number[:, :-1]
    if cu_seq_lens is not None:
        fits = B == 1 and cu_seq_lens.dim() == 1 and len(cu_seq_lens) > 1 and not cu_seq_lens.is_floating_point()
        if not fits or _wrong_borders(cu_seq_lens, T):
            raise ValueError(
                f"cu_seq_lens_q must be [documents + 1] whole numbers that increase from 0 to {T}, in a batch of one; "
                f"got {cu_seq_lens.tolist()} and a batch of {B}."
            )
        border = torch.zeros(1, T + 1, dtype=torch.long, device=keep.device)
        border[0, cu_seq_lens.long()] = 1
        number = border[:, :T].cumsum(1).gather(1, order)
        starts[:, 1:] |= number[:, 1:] != number[:, :-1]
    if not all_real:
        starts &= keep.gather(1, order)  # pads start nothing
    if not bool(starts.any()):
        return None
    return torch.zeros_like(starts).scatter(1, order, starts)


def _wrong_borders(borders: Tensor, T: int) -> bool:
    return int(borders[0]) != 0 or int(borders[-1]) != T or bool((borders.diff() <= 0).any())


def _positions(keep: Tensor, all_real: bool, documents: Tensor | None) -> Tensor:
    B, T = keep.shape
    if all_real and documents is None:
        return torch.arange(T, device=keep.device)[None]
    place = (keep.cumsum(1) - 1).clamp_min(0)
    if documents is None:
        return place
    first = torch.full((B, T + 1), T, device=keep.device)
    first.scatter_reduce_(1, documents, torch.where(keep, place, T), "amin")
    return (place - first.gather(1, documents)).clamp_min(0)


def packed_starts(batch: Batch) -> Tensor | None:
    """[B, T] True at the first token of every packed document but a row's first; None when each row is one document.

    Nothing is packed under a 4-D mask.
    """
    if batch.position_ids is None and batch.seq_idx is None and batch.cu_seq_lens_q is None:
        return None
    keep = torch.ones(batch.shape, dtype=torch.bool, device=batch.device)
    if (mask := batch.attention_mask) is not None:
        if mask.dim() != 2:
            return None
        keep = mask[:, -batch.shape[1] :].to(torch.bool)
    return _document_starts(batch, keep, bool(keep.all()))
