"""Finding the rotary frequencies that predict attention, for models with `fasa` layers.

Shapes: B batch, T tokens, H heads, W head width.
"""

from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def calibrate_fasa(model: Any, input_ids: Tensor, top_k: int = 32) -> list[list[list[int]]]:
    """Choose the chunks of every head whose own scores agree best with the whole attention, and put them in the config.

    Agreement of a chunk is |TopK(α) ∩ TopK(α^chunk)| / K over the tokens a query sees, averaged over the queries that
    see more than K (arXiv 2602.03152, contextual agreement). Only the attention of `fasa` layers is looked at; layers
    with another mixer get the chunks of the lowest frequencies, which nothing reads.

    Args:
        model: A model with `fasa` layers, causal or not; it is run once, densely.
        input_ids: [B, T] text like the one it will see, T > top_k.
        top_k: K.

    Returns:
        The chunks by layer and head, as they now stand in `config.mixer_params["fasa"]["chunks"]`.

    Raises:
        ValueError: The model has no `fasa` layer, or the text is too short.
    """
    config = model.config
    if "fasa" not in config.mixer_names:
        raise ValueError(f"calibrate_fasa needs a model with fasa layers; layer_pattern is {config.layer_pattern}.")
    if input_ids.shape[1] <= top_k:
        raise ValueError(f"calibrate_fasa needs more than top_k={top_k} tokens a row, got {input_ids.shape[1]}.")
    mixers = {name: module for name, module in model.named_modules() if name.endswith(".mixer")}
    layers = sorted(mixers.values(), key=lambda mixer: mixer.layer_idx)
    seen: dict[int, list[tuple[Tensor, Tensor, bool]]] = {}
    for mixer in layers:
        if config.mixer_names[mixer.layer_idx] == "fasa":
            mixer.__dict__["core"] = _recording(mixer, seen.setdefault(mixer.layer_idx, []))
    was_training = model.training
    try:
        model.eval()(input_ids, use_cache=False) if getattr(model, "is_causal", False) else model.eval()(input_ids)
    finally:
        model.train(was_training)
        for mixer in layers:
            mixer.__dict__.pop("core", None)
    width = config.head_dim // 2
    chunks = []
    for mixer in layers:
        count = getattr(mixer.params, "num_tip", min(16, width))
        lowest = [list(range(width - count, width))] * config.num_attention_heads
        calls = seen.get(mixer.layer_idx)
        chunks.append([_best(head, count) for head in _agreement(calls, top_k)] if calls else lowest)
    config.mixer_params = {**config.mixer_params, "fasa": {**config.mixer_params.get("fasa", {}), "chunks": chunks}}
    for mixer in layers:
        mixer.params = config.params_for(mixer.layer_idx)
    return chunks


def _recording(mixer: Any, calls: list[tuple[Tensor, Tensor, bool]]) -> Any:
    """The mixer's core, dense, which keeps what it is given."""
    core = mixer.core

    def run(q: Tensor, k: Tensor, v: Tensor, call: Any, params: Any, layer_idx: int) -> Any:
        calls.append((q, k.repeat_interleave(q.shape[1] // k.shape[1], dim=1), call.is_causal))
        call.training = True  # dense, so that what later layers see is right
        return core(q, k, v, call, params, layer_idx)

    return run


def _agreement(calls: list[tuple[Tensor, Tensor, bool]], top_k: int) -> Tensor:
    """[H, W/2] contextual agreement of every chunk."""
    total, queries = torch.zeros(()), 0
    for q, k, is_causal in calls:
        T, W = q.shape[2:]
        half = W // 2
        places = torch.arange(top_k if is_causal else 0, T, device=q.device)
        hidden = torch.arange(T, device=q.device) > places[:, None] if is_causal else None
        q = q.index_select(2, places)

        def best(first: int, stop: int, step: int, q: Tensor = q, k: Tensor = k, hidden: Any = hidden) -> Tensor:
            scores = q[..., first:stop:step] @ k[..., first:stop:step].mT
            if hidden is not None:
                scores = scores.masked_fill(hidden, -torch.inf)
            return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(top_k, dim=-1).indices, True)

        whole = best(0, W, 1)
        shared = [(best(chunk, chunk + half + 1, half) & whole).sum(-1).double().sum((0, 2)) for chunk in range(half)]
        total = total + torch.stack(shared, dim=1).cpu() / top_k
        queries += q.shape[0] * q.shape[2]
    return total / max(1, queries)


def _best(agreement: Tensor, count: int) -> list[int]:
    order = agreement.sort(descending=True, stable=True).indices[:count]
    return sorted(order.tolist())
