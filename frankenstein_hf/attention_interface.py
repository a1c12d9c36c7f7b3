"""Our parameter-free mixers as attention implementations of any transformers model: `frankenstein_<name>`.

A mixer that needs nothing but the four standard projections is a choice of which keys a query sees, made in
`host_attention.py`, or does something more to what it has read. What the model itself has decided (causality, pads,
packing, a window) holds.
"""

import re
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from .configuration.component import MixerSpec
from .configuration.registries import MIXERS
from .host_attention import sparse_forward, visibility_mask


def dense_mask(*, config: Any = None, **arguments: Any) -> Tensor | None:
    """transformers' SDPA mask."""
    return sdpa_mask(**arguments)


def xsa_forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    """transformers' SDPA function, its output [B, T, H, W] projected off the value of each query's own token."""
    from .modeling.mixers.dense.xsa import exclude  # not before transformers' attention functions exist

    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)
    T, S = query.shape[2], value.shape[2]
    if S == T or (attention_mask is None and T > 1):  # transformers drops the mask of a plain triangle from the start
        own = value[:, :, :T]
    elif attention_mask is None:
        own = value[:, :, -1:]
    else:  # a static cache has empty places behind the newest token, which is the last one a query sees
        last = S - 1 - attention_mask[:, 0].flip(-1).to(torch.uint8).argmax(-1)
        own = value.gather(2, last[:, None, :, None].expand(*value.shape[:2], T, value.shape[3]))
    return exclude(output.transpose(1, 2), own).transpose(1, 2), None


FORWARD: dict[str, Callable[..., tuple[Tensor, None]]] = {"xsa": xsa_forward}


# Mixers that learn something unless a parameter fixes it: no name without parameters is registered for them.
FIXED: dict[str, dict[str, Any]] = {"sigmoid": {"bias": 0.0}}


def _reads_documents(spec: MixerSpec) -> bool:
    """Whether its core asks which keys are visible in our own words instead of taking transformers' mask."""
    return spec.family == "sparse" or spec.name in FIXED


def _is_available(spec: MixerSpec, params: Any = None) -> bool:
    free = spec.parameter_free(spec.params() if params is None else params)
    return free and (_reads_documents(spec) or spec.native_mask)


def _register(name: str, spec: MixerSpec, values: dict[str, Any] | None) -> None:
    if _reads_documents(spec):
        AttentionInterface.register(name, partial(sparse_forward, spec, values))
        AttentionMaskInterface.register(name, visibility_mask)
    else:
        AttentionInterface.register(name, FORWARD.get(spec.name, sdpa_attention_forward))
        AttentionMaskInterface.register(name, dense_mask)


def register_attention_implementations() -> None:
    """Register every parameter-free mixer with `AttentionInterface` and `AttentionMaskInterface`."""
    for spec in MIXERS:
        if _is_available(spec):
            _register(f"frankenstein_{spec.name}", spec, None)


def attention_implementation(name: str, **params: Any) -> str:
    """The name to pass as `attn_implementation` to any transformers model for a mixer with the given parameters.

    A model that is saved keeps the name only: call this again before loading it elsewhere.

        AutoModel.from_pretrained("any/model", attn_implementation=fhf.attention_implementation("swa", window_size=512))

    Args:
        name: A mixer without parameters of its own but the projections, such as "swa" or "bigbird", or one whose
            parameters are fixed, such as "sigmoid" with `bias=0.0`.
        params: Its parameters; without any, the host config's `mixer_params[name]` are used if there are some.

    Raises:
        ValueError: The mixer cannot be an attention implementation, or a parameter is wrong.
    """
    spec = MIXERS.get(name)
    allowed = [spec.name for spec in MIXERS if _is_available(spec, spec.params(**FIXED.get(spec.name, {})))]
    values = spec.params.from_dict(params, name)
    if not _is_available(spec, values):
        needs = "token ids" if spec.needs_input_ids else "parameters or inputs of its own besides q, k and v"
        raise ValueError(
            f"{name!r}{f' with {params}' if params else ''} cannot be an attention implementation of other models: it "
            f"needs {needs}. Possible are {', '.join(allowed)}."
        )
    full = f"frankenstein_{name}"
    if params:
        text = "_".join(f"{key}_{value}" for key, value in sorted(params.items()))
        plain = re.sub(r"[^0-9a-zA-Z]+", "_", text).strip("_")
        if plain != text:
            plain += f"_{zlib.crc32(text.encode()):08x}"
        full += f"_{plain}"
        _register(full, spec, dict(params))
    return full


register_attention_implementations()
