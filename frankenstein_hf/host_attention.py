"""Sparse patterns inside any transformers model: from what the model says of its batch to the cores, never a T×T mask.

Shapes: B batch, T queries, S keys, H heads, G key/value heads, W head width.

transformers asks a mask function what the layers may see, and hands what it returns to the attention function. Ours
returns integers [B, S + 5]: the document of every key (0: a pad), then five numbers a row, see `Visibility`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from .configuration.component import MixerSpec
from .configuration.mixers.dense.sigmoid import SigmoidParams
from .configuration.mixers.sparse.swa import SWAParams

UNLIMITED = 2**40


@dataclass
class Visibility:
    """What a layer of the host may see.

    Attributes:
        documents: [B, S] which document a key belongs to, 0 where there is none.
        is_causal: Whether later tokens are invisible.
        left, right: How far a window of the host reaches.
        first_query: Place of the first query among the keys.
        dropped: [B] real tokens before the first key, which a sliding cache has dropped.
    """

    documents: Tensor
    is_causal: bool
    left: int
    right: int
    first_query: int
    dropped: Tensor

    def packed(self) -> Tensor:
        """[B, S + 5]."""
        numbers = torch.tensor([self.is_causal, self.left, self.right, self.first_query], device=self.documents.device)
        return torch.cat([self.documents, numbers.expand(len(self.documents), -1), self.dropped[:, None]], dim=1)

    @classmethod
    def unpacked(cls, mask: Tensor) -> "Visibility":
        """The inverse of `packed`."""
        is_causal, left, right, first = mask[0, -5:-1].tolist()
        return cls(mask[:, :-5], bool(is_causal), left, right, first, mask[:, -1])


def visibility_mask(
    *, batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0,
    mask_function: Callable[..., Any], attention_mask: Tensor | None = None, local_size: int | None = None,
    use_vmap: bool = False, device: Any = None, **others: Any,
) -> Tensor:  # fmt: skip
    """transformers' mask function; the 2-D mask passes through.

    Raises:
        ValueError: The host masks in a way of its own (chunks, blocks that see ahead, functions of the user).
    """
    if use_vmap:
        raise ValueError("A frankenstein attention implementation cannot honour and_mask_function or or_mask_function.")
    B, T, S, q_offset = batch_size, q_length, kv_length, int(q_offset)
    device = attention_mask.device if attention_mask is not None else device
    places = torch.arange(T, device=device) + q_offset

    def sees(rows: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.as_tensor(mask_function(rows, torch.zeros_like(rows), i, j), device=device).expand(i.shape)

    row = torch.zeros_like(places[:-1])
    ahead = sees(row, places[:-1], places[1:]) if T > 1 else None
    starts = torch.zeros(B, T, dtype=torch.bool, device=device)
    if T > 1 and (local_size or 2) > 1:
        rows = torch.arange(B, device=device)[:, None].expand(B, T - 1)
        i = places[1:].expand(B, -1)
        starts[:, 1:] = ~sees(rows, i, i - 1)
    packed = bool(starts.any())
    # one query of a decoder sees nothing ahead; of an encoder without a cache there is nothing ahead
    is_causal = not bool(ahead.any()) if ahead is not None else _is_causal(mask_function, q_offset)
    if ahead is not None and not is_causal and not bool((ahead | starts[0, 1:]).all()):
        raise ValueError("A frankenstein attention implementation cannot honour blocks of tokens that see ahead.")
    left = right = UNLIMITED
    if local_size is not None:
        left = local_size - 1 if is_causal else local_size
        right = 0 if is_causal else local_size
        if packed or not _is_window(sees, local_size, left, device):
            raise ValueError(
                "A frankenstein attention implementation honours sliding windows, but neither chunked attention nor "
                "windows over packed documents; use attn_implementation='sdpa' for this model."
            )
    total = kv_offset + S
    real = torch.ones(B, min(total, q_offset + T), dtype=torch.bool, device=device)
    if attention_mask is not None:
        real = attention_mask.to(torch.bool)[:, : q_offset + T]
    real = nn.functional.pad(real, (0, total - real.shape[1]))
    documents = real.long()
    if packed:
        documents[:, : q_offset + T] *= starts.cumsum(1) + 1
    return Visibility(
        documents[:, kv_offset:], is_causal, left, right, q_offset - kv_offset, real[:, :kv_offset].sum(1)
    ).packed()


def _is_causal(mask_function: Callable[..., Any], i: int) -> bool:
    zero, at = torch.zeros(1, dtype=torch.long), torch.tensor([i])
    return not bool(torch.as_tensor(mask_function(zero, zero, at, at + 1)).any())


def _is_window(sees: Callable[[Tensor, Tensor, Tensor], Tensor], size: int, left: int, device: Any) -> bool:
    """Whether positions far from the start see `left` tokens back and no more, wherever chunks would end."""
    i = torch.arange(3 * size, 5 * size + 1, device=device)
    row = torch.zeros_like(i)
    try:
        return bool(sees(row, i, i - left).all()) and not bool(sees(row, i, i - left - 1).any())
    except IndexError:  # it looks at this batch
        return False


@dataclass
class Group:
    """Rows of one document each, with as many keys and queries; None: all, in order.

    Attributes:
        keys: [r, n] flat places of the keys in [B · S].
        queries: [r, m] flat places of the queries in [B · T].
        num_keys, num_queries: n and m; the queries are the last keys.
        dropped: Tokens before the first key.
    """

    keys: Tensor | None
    queries: Tensor | None
    num_keys: int
    num_queries: int
    dropped: int


def groups(seen: Visibility, T: int) -> Iterator[Group]:
    """The batch in groups."""
    documents, first = seen.documents, seen.first_query
    B, S = documents.shape
    plain = documents[:, : first + T] == 1
    is_whole = first + T == S and len(seen.dropped.unique()) == 1
    if is_whole and bool(plain.all()) and not bool(documents[:, first + T :].any()):
        yield Group(None, None, S, T, int(seen.dropped[0]))
        return
    members: dict[tuple[int, int, int], list[tuple[Tensor, Tensor]]] = {}
    for b in range(B):
        dropped = int(seen.dropped[b])
        for document in documents[b].unique().tolist():
            places = (documents[b] == document).nonzero().squeeze(1)
            inside = places[(places >= first) & (places < first + T)]
            if document and len(inside):
                found = members.setdefault((len(places), len(inside), dropped), [])
                found.append((b * S + places, b * T + inside - first))
    for (n, m, dropped), rows in members.items():
        yield Group(torch.stack([k for k, _ in rows]), torch.stack([q for _, q in rows]), n, m, dropped)


REFUSED = {"position_bias": "a bias on the scores", "softcap": "capped scores", "s_aux": "learned sinks"}


def sparse_forward(
    spec: MixerSpec, values: dict[str, Any] | None, module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Tensor | None, scaling: float | None = None, dropout: float = 0.0, is_causal: bool | None = None,
    sliding_window: int | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention function of the mixer `spec`: query [B, H, T, W] and so on -> [B, T, H, W].

    Args:
        values: Parameters of the mixer; None: those in the host config's `mixer_params`, if any.

    Raises:
        ValueError: The host adds to its attention what the pattern cannot honour.
    """
    for name, what in REFUSED.items():
        if others.get(name) is not None:
            raise ValueError(f"frankenstein_{spec.name} cannot honour {what} ({name}) of {type(module).__name__}.")
    (B, H, T), S = query.shape[:3], key.shape[2]
    if attention_mask is None:
        if sliding_window is not None and sliding_window < S:
            raise ValueError(
                f"frankenstein_{spec.name}: {type(module).__name__} has a sliding window but made no mask."
            )
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        nothing = torch.zeros(B, dtype=torch.long, device=query.device)
        seen = Visibility(nothing[:, None].expand(B, S) + 1, causal, UNLIMITED, UNLIMITED, S - T, nothing)
    elif attention_mask.dim() != 2 or attention_mask.shape[1] != S + 5:
        raise ValueError(
            f"frankenstein_{spec.name} takes a 2-D attention_mask of real tokens; got one of shape "
            f"{list(attention_mask.shape)}, which it could not honour."
        )
    else:
        seen = Visibility.unpacked(attention_mask)
    core = _core(spec, values, module, query, seen)
    out = query.new_zeros(B * T, H, value.shape[-1])
    for group in groups(seen, T):
        q, k, v = query, key, value
        if group.keys is not None and group.queries is not None:
            q = _rows(query, group.queries)
            k, v = (_rows(x, group.keys) for x in (key, value))
        mixed = core(q, k, v, group, dict(scale=scaling, dropout=dropout, training=module.training))
        if group.queries is None:
            return mixed.transpose(1, 2).contiguous(), None
        out = out.index_copy(0, group.queries.flatten(), mixed.transpose(1, 2).flatten(0, 1).to(out.dtype))
    return out.view(B, T, H, -1), None


def _rows(x: Tensor, places: Tensor) -> Tensor:
    """[B, G, S, W] and flat places [r, n] in B·S -> [r, G, n, W]."""
    flat = x.transpose(1, 2).flatten(0, 1)
    return flat.index_select(0, places.flatten()).view(*places.shape, *flat.shape[1:]).transpose(1, 2)


def _by_sigmoid(
    params: SigmoidParams, is_causal: bool, q: Tensor, k: Tensor, v: Tensor, group: Group, options: dict[str, Any]
) -> Tensor:
    """`sigmoid` with a fixed bias; a host that scales its scores in a way of its own does so here too."""
    from .modeling.mixers.dense.sigmoid import attend_by_sigmoid

    last = torch.full((1, group.num_queries), group.num_keys - 1, device=q.device)
    if is_causal:
        last = torch.arange(group.num_keys - group.num_queries, group.num_keys, device=q.device)[None]
    dropout = options["dropout"] if options["training"] else 0.0
    if options["scale"] is not None:
        q = q * (options["scale"] * q.shape[-1] ** 0.5)
    return attend_by_sigmoid(q, k, v, params.bias, last, params.normalize == "l1", dropout, dropout > 0)[0]


def _core(
    spec: MixerSpec, values: dict[str, Any] | None, module: nn.Module, query: Tensor, seen: Visibility
) -> Callable[..., Tensor]:
    """(q, k, v, group, options) -> [r, H, m, W]."""
    from .modeling.implementations import implementation
    from .modeling.mixers.sparse_attention import Call, attend_in_patterns
    from .modeling.ops.patterns import LocalPattern, WindowPattern

    config = getattr(module, "config", None)
    if values is None:
        values = (getattr(config, "mixer_params", None) or {}).get(spec.name, {})
    layer_idx, H = int(getattr(module, "layer_idx", None) or 0), query.shape[1]
    sizes = SimpleNamespace(
        head_dim=query.shape[3], num_attention_heads=H, num_hidden_layers=getattr(config, "num_hidden_layers", 1),
        max_position_embeddings=getattr(config, "max_position_embeddings", seen.documents.shape[1]),
    )  # fmt: skip
    params = spec.params.from_dict(values, spec.name).resolve(sizes, frozenset(values))
    is_local = min(seen.left, seen.right) < UNLIMITED or bool(seen.dropped.any())
    has_rope = bool(getattr(config, "rope_parameters", None))
    cls: Any = implementation(spec)

    if isinstance(params, SigmoidParams):
        if is_local:
            raise ValueError(f"frankenstein_sigmoid cannot honour the sliding window of {type(module).__name__}.")
        return partial(_by_sigmoid, params, seen.is_causal)

    def make_call(group: Group, options: dict[str, Any]) -> Any:
        return Call(group.num_keys - group.num_queries, seen.is_causal, **options)

    if not hasattr(cls, "patterns") and not isinstance(params, SWAParams):
        if is_local:
            raise ValueError(f"frankenstein_{spec.name} cannot honour the sliding window of {type(module).__name__}.")
        if spec.name == "fasa" and not has_rope:
            raise ValueError("frankenstein_fasa ranks tokens by rotary frequencies, which this model does not have.")
        if spec.name == "lsa" and has_rope:
            raise ValueError("frankenstein_lsa clusters keys without positions; this model rotates them.")
        return lambda q, k, v, group, options: cls.core(cls, q, k, v, make_call(group, options), params, layer_idx)[0]
    if isinstance(params, SWAParams):
        side = params.reach - 1 if seen.is_causal else params.reach // 2
        patterns: Any = [(slice(0, H), WindowPattern(side, 0, tuple(range(params.num_sinks)), False))]
    else:
        patterns = cls.patterns(params, layer_idx, H)

    def run(q: Tensor, k: Tensor, v: Tensor, group: Group, options: dict[str, Any]) -> Tensor:
        chosen = patterns
        if is_local:
            chosen = [
                (heads, LocalPattern(pattern, seen.left, seen.right, group.dropped)) for heads, pattern in patterns
            ]
        return attend_in_patterns(chosen, q, k, v, make_call(group, options))[0]

    return run
