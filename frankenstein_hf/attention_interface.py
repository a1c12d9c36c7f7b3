"""Our parameter-free mixers as attention implementations of any transformers model: `frankenstein_<name>`.

A mixer that needs nothing but the four standard projections is a choice of which keys a query sees, or does something
more to what it has read. The choice is made on the visibility the model itself has decided (causality, pads, packing),
so it counts real tokens there too.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from .configuration.component import MixerSpec, Params
from .configuration.mixers.swa import SWAParams
from .configuration.registries import MIXERS


def swa_visibility(visible: Tensor, own: Tensor, params: SWAParams) -> Tensor:
    """Leave of the visible keys the first s and those of the window.

    Args:
        visible: [B, 1, T, S] what the model lets each query see.
        own: [T] index of each query among the keys.
        params: Window and sinks.
    """
    rank = visible.cumsum(-1) - 1  # position of a key among those the query sees, i.e. in real tokens
    own_rank = rank.gather(-1, own[:, None].expand(*visible.shape[:3], 1))
    ahead = torch.arange(visible.shape[-1], device=own.device) > own[:, None]
    sees_ahead = bool((visible & ahead).any())
    left, right = (params.reach // 2, params.reach // 2) if sees_ahead else (params.reach - 1, 0)
    window = (rank >= own_rank - left) & (rank <= own_rank + right)
    return visible & ((rank < params.num_sinks) | window)


VISIBILITY: dict[str, Callable[[Tensor, Tensor, Any], Tensor]] = {"swa": swa_visibility}


def mixer_mask(spec: MixerSpec, *, config: Any = None, **arguments: Any) -> Tensor | None:
    """transformers' SDPA mask, narrowed to what the mixer sees.

    Parameters of the mixer are read from `config.mixer_params[name]` where the model's config has that attribute.
    """
    if spec.name not in VISIBILITY:
        return sdpa_mask(**arguments)
    visible = sdpa_mask(**arguments | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    assert visible is not None
    values = (getattr(config, "mixer_params", None) or {}).get(spec.name, {})
    params: Params = spec.params.from_dict(values, spec.name).resolve(config, frozenset(values))
    first = arguments.get("q_offset", 0) - arguments.get("kv_offset", 0)
    own = torch.arange(arguments["q_length"], device=visible.device) + first
    return VISIBILITY[spec.name](visible, own, params)


def xsa_forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    """transformers' SDPA function, its output [B, T, H, W] projected off the value of each query's own token."""
    from .modeling.mixers.xsa import exclude  # not before transformers' attention functions exist

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


def register_attention_implementations() -> None:
    """Register every parameter-free mixer with `AttentionInterface` and `AttentionMaskInterface`."""
    for spec in MIXERS:
        if spec.parameter_free(spec.params()) and (spec.native_mask or spec.name in VISIBILITY):
            forward = FORWARD.get(spec.name, sdpa_attention_forward)
            AttentionInterface.register(f"frankenstein_{spec.name}", forward)
            AttentionMaskInterface.register(f"frankenstein_{spec.name}", partial(mixer_mask, spec))


register_attention_implementations()
