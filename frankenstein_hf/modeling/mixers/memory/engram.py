"""`engram`: a memory of n-grams, looked up by hashing and gated by the hidden state.

Shapes: R rows, L row length, D model width, N longest n-gram, H tables a length of n-gram, e width of an entry,
        E = (N − 1)·H·e, K taps of the convolution, N tokens apart.
"""

import math
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from ...cache import MixerStateLayer, States
from ...context import Rows
from ...extras import LayerExtras
from ...norms import RMSNorm
from ...ops.numerics import at_least_fp32
from ...ops.short_convolution import short_convolution
from ..base import RowMixer, last_real


def eager_engram(
    h: Tensor, k: Tensor, v: Tensor, w: Tensor, δ: int, norms: tuple[nn.Module, nn.Module, nn.Module], ahead: int
) -> Tensor:
    """ṽ_t = σ(norm(h_t) · norm(k_t) / √D) v_t and y_t = ṽ_t + SiLU(Σ_i w_i norm(ṽ)_{t + ahead − δ(K−1−i)}).

    Args:
        h, k, v: [R, L, D] hidden states, and keys and values made of the n-grams at each token.
        w: [D, K].
        δ: Tokens between two taps.
        norms: Of hidden states, keys, and what is convolved.
        ahead: How far the last tap looks ahead.
    """
    α = (norms[0](h) * norms[1](k)).sum(-1, keepdim=True) * h.shape[-1] ** -0.5
    ṽ = α.sigmoid() * v
    x, (L, K) = norms[2](ṽ), (h.shape[1], w.shape[1])
    x = F.pad(x, (0, 0, δ * (K - 1), ahead))
    taps = [w[:, i] * x[:, ahead + δ * i : ahead + δ * i + L] for i in range(K)]
    return ṽ + F.silu(sum(taps[1:], taps[0]))


class EngramMixer(RowMixer):
    """Conditional memory (arXiv 2601.07372): embeddings of the 2- to N-grams that end at a token, from hashed tables.

    Keys and values are made of them; the hidden state gates the value by how well it fits the key, and a dilated
    convolution follows. The hash is computed where the ids are. No n-gram crosses a pad or the border of a document;
    missing tokens count as one of their own. An encoder adds the n-grams that start at the token, and the convolution
    is centred. Decoding keeps N − 1 ids and the inputs the convolution looks back at.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        params, D = self.params, self.hidden_size
        self.sizes = primes_from(params.table_size, (params.max_ngram_size - 1) * params.n_heads_per_ngram)
        generator = random.Random(params.seed * 1_000_003 + layer_idx)
        self.factors = [generator.getrandbits(62) | 1 for _ in range(params.max_ngram_size)]
        self.ngram_memory = nn.Embedding(sum(self.sizes), params.embed_dim_per_head)
        self.k_proj = nn.Linear(params.width, D, bias=False) if params.gate else None
        self.v_proj = nn.Linear(params.width, D, bias=False)
        self.q_norm = RMSNorm(D, config.rms_norm_eps) if params.gate else None
        self.k_norm = RMSNorm(D, config.rms_norm_eps) if params.gate else None
        self.conv_norm = RMSNorm(D, config.rms_norm_eps)
        self.conv_weight = nn.Parameter(torch.empty(D, params.kernel_size))

    def init_parameters(self) -> None:
        """Entries as token embeddings, taps as PyTorch initialises a depthwise convolution."""
        bound = self.params.kernel_size**-0.5
        init.normal_(self.ngram_memory.weight, mean=0.0, std=self.config.initializer_range)
        init.uniform_(self.conv_weight, -bound, bound)

    def vocabulary_params(self) -> dict[str, Any]:
        """Parameters that follow the vocabulary by default, and must not when that is resized."""
        return {"table_size": self.params.table_size}

    # ------------------------------------------------------------------ lookup

    def entries(self, ids: Tensor) -> Tensor:
        """Ids [R, N − 1 + L], 0 where there is no token -> [R, L, E] entries of the n-grams that end at the last L."""
        N, L = self.params.max_ngram_size, ids.shape[1] - self.params.max_ngram_size + 1
        sizes = torch.tensor(self.sizes, device=ids.device).view(N - 1, -1)
        starts = (sizes.flatten().cumsum(0) - sizes.flatten()).view_as(sizes)
        mixed, index = ids[:, N - 1 :] * self.factors[0], []
        for n in range(1, N):
            mixed = mixed ^ (ids[:, N - 1 - n : N - 1 - n + L] * self.factors[n])
            index.append(mixed[..., None] % sizes[n - 1] + starts[n - 1])
        return self.ngram_memory(torch.cat(index, dim=-1)).flatten(2)

    def lookup(self, ids: Tensor, tail: Tensor | None, rows: Rows) -> Tensor:
        """Ids [R, L], tail [R, N − 1] or None at the start -> [R, L, E]."""
        N = self.params.max_ngram_size
        found = self.entries(F.pad(ids, (N - 1, 0)) if tail is None else torch.cat([tail, ids], dim=1))
        if not rows.is_causal:  # an n-gram that starts at t is one that ends at t + n − 1
            after = self.entries(F.pad(ids, (N - 1, N - 1))).unflatten(-1, (N - 1, -1))
            L = ids.shape[1]
            found = found + torch.cat([after[:, n : n + L, n - 1] for n in range(1, N)], dim=-1)
        return found

    # ------------------------------------------------------------------ gate and convolution

    def mix(self, x: Tensor, rows: Rows, layer: MixerStateLayer | None) -> tuple[Tensor, LayerExtras | None]:
        context = rows.context
        if context.input_ids is None:
            raise ValueError(
                f"'engram' (layer {self.layer_idx}) looks n-grams of tokens up and needs input_ids; got inputs_embeds "
                "only. Pass input_ids, or choose another mixer."
            )
        ids = rows.zero_pads(rows.compact(context.input_ids).long() + 1, 0)
        states = (layer.read(self.advance) if layer is not None else None) or {}
        found = self.lookup(ids, states.get("ids"), rows)
        value = self.v_proj(found)
        if self.k_proj is not None:
            assert self.q_norm is not None and self.k_norm is not None
            key = self.k_proj(found)
            if context.backend == "eager" and layer is None and rows.lengths is None:
                norms, ahead = (self.q_norm, self.k_norm, self.conv_norm), 0 if rows.is_causal else self.params.ahead
                return eager_engram(x, key, value, self.conv_weight, self.params.max_ngram_size, norms, ahead), None
            fit = at_least_fp32(self.q_norm(x) * self.k_norm(key)).sum(-1, keepdim=True) * self.hidden_size**-0.5
            value = value * fit.sigmoid().to(value.dtype)
        normed = rows.zero_pads(self.conv_norm(value))
        output = value + F.silu(self.convolve(normed, states.get("inputs"), rows))
        if layer is not None:
            inputs = {"ids": ids, "inputs": normed}
            layer.write(self.advance(inputs, states, rows.lengths), inputs, context.keep)
        return output, None

    def convolve(self, x: Tensor, tail: Tensor | None, rows: Rows) -> Tensor:
        """[R, L, D], tail [R, (K−1)·N, D] or None at the start -> [R, L, D]; each of N interleaved rows on its own."""
        (R, L, D), N = x.shape, self.params.max_ngram_size
        ahead = 0 if rows.is_causal else self.params.ahead
        x = F.pad(x, (0, 0, 0, ahead + -(L + ahead) % N))

        def interleaved(x: Tensor) -> Tensor:
            return x.view(R, -1, N, D).transpose(1, 2).reshape(R * N, -1, D)

        before = None if tail is None else interleaved(tail.to(x.dtype).contiguous())
        y = short_convolution(interleaved(x), self.conv_weight, None, before)
        return y.view(R, N, -1, D).transpose(1, 2).reshape(R, -1, D)[:, ahead : ahead + L]

    def advance(self, inputs: States, states: States, lengths: Tensor | None) -> States:
        """The last N − 1 ids [R, N − 1] and inputs of the convolution [R, (K−1)·N, D]."""
        ids, x = inputs["ids"], inputs["inputs"]
        past_ids = states.get("ids", ids.new_zeros(len(ids), self.params.max_ngram_size - 1))
        past = states.get("inputs", x.new_zeros(len(x), self.params.tail, x.shape[2]))
        return {"ids": last_real(past_ids, ids, lengths), "inputs": last_real(past.to(x.dtype), x, lengths)}


def primes_from(first: int, count: int) -> list[int]:
    """The `count` smallest primes that are at least `first`."""
    found: list[int] = []
    number = first
    while len(found) < count:
        if number > 1 and all(number % d for d in range(2, math.isqrt(number) + 1)):
            found.append(number)
        number += 1
    return found
