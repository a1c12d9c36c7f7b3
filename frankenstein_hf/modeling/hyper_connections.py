"""Hyper-connections: n residual streams, read, written and mixed with weights that depend on the token.

Shapes: B batch, T tokens, n streams, D model width. A stream is [B, T, n, D].
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from .ops.numerics import at_least_fp32
from .residuals import Connection, ResidualStream


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """exp(logits) [.., n, n] made almost doubly stochastic; every row sums to one exactly.

    It begins with a softmax over rows, because exp of raw logits overflows, and ends with rows: an output stream is a
    convex combination of the input streams.
    """
    matrix = logits.softmax(-1)
    for _ in range(iterations):
        matrix = matrix / matrix.sum(-2, keepdim=True)
        matrix = matrix / matrix.sum(-1, keepdim=True)
    return matrix


class StreamCoefficients(nn.Module):
    """H_pre [B, T, n], H_post [B, T, n] and H_res of a token's streams: (pre, post, res) = α ∘ (φ · rms(vec x)) + b.

    Args:
        config: A `FrankensteinConfig`.
        n: Streams.
        parts: How many numbers each of the coefficients has.
    """

    def __init__(self, config: Any, n: int, parts: tuple[int, ...]) -> None:
        nn.Module.__init__(self)
        self.n, self.parts, self.eps = n, parts, config.rms_norm_eps
        self.proj = nn.Linear(n * config.hidden_size, sum(parts), bias=False)
        self.bias = nn.Parameter(torch.empty(sum(parts)))
        self.alpha = nn.Parameter(torch.empty(len(parts)))

    def coefficients(self, streams: Tensor) -> list[Tensor]:
        """Streams [B, T, n, D] -> the raw coefficients, in at least fp32."""
        flat = at_least_fp32(streams.flatten(2))
        weight = self.proj.weight.to(flat.dtype)
        mixed = F.linear(flat, weight) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.eps)
        bias, alpha = self.bias.to(flat.dtype), self.alpha.to(flat.dtype)
        split = zip(mixed.split(self.parts, -1), bias.split(self.parts), alpha)
        return [a * part + b for part, b, a in split]

    def init_parameters(self) -> None:
        """The neutral point: read the mean, write to every stream once. `proj` is not zero: equal streams would stay
        equal for ever under coefficients that do not tell them apart."""
        pre = math.log(1 / (self.n - 1)) if self.n > 1 else 50.0
        init.constant_(self.alpha, self.gating_init)
        init.copy_(self.bias, torch.cat([torch.full((self.n,), pre), torch.zeros(self.n), self.residual_bias()]))

    gating_init: float

    def residual_bias(self) -> Tensor:
        """First value of the bias of H_res."""
        raise NotImplementedError


def weighted(weights: Tensor, streams: Tensor) -> Tensor:
    """Σ_j w_j x_j: [B, T, n] and [B, T, n, D] -> [B, T, D], in the dtype of `streams`."""
    return (weights.to(streams.dtype)[..., None, :] @ streams)[..., 0, :]


class HyperConnection(StreamCoefficients, Connection):
    """One site of manifold-constrained hyper-connections: read H_pre x, write H_res x + H_postᵀ ⊗ F."""

    def __init__(self, config: Any, layer_idx: int, site: str) -> None:
        params = config.component("residual").params
        n = params.expansion_rate
        super().__init__(config, n, (n, n, n * n))
        self.iterations, self.gating_init = params.sinkhorn_iters, params.gating_init

    def residual_bias(self) -> Tensor:
        """Close to the identity."""
        return (torch.eye(self.n) * 8 - 8).flatten()

    def read(self, stream: Tensor, loop: int) -> tuple[Tensor, Any]:
        pre, post, res = self.coefficients(stream)
        mixing = sinkhorn(res.unflatten(-1, (self.n, self.n)), self.iterations)
        return weighted(pre.sigmoid(), stream), (2 * post.sigmoid(), mixing)

    def write(self, stream: Tensor, carry: Any, change: Tensor, loop: int) -> Tensor:
        post, mixing = (part.to(stream.dtype) for part in carry)
        return mixing @ stream + post[..., None] * change[..., None, :]


class GatedCollapse(nn.Module):
    """Σ_j σ(α (φ · rms(vec x)) + b)_j x_j: one stream of n, with weights that depend on the token."""

    def __init__(self, config: Any, n: int) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.n = n
        self.proj = nn.Linear(n * config.hidden_size, n, bias=False)
        self.bias = nn.Parameter(torch.empty(n))
        self.alpha = nn.Parameter(torch.empty(1))

    def init_parameters(self) -> None:
        """Close to the mean."""
        init.constant_(self.alpha, 0.01)
        init.constant_(self.bias, math.log(1 / (self.n - 1)) if self.n > 1 else 50.0)

    def forward(self, streams: Tensor) -> Tensor:
        """[B, T, n, D] -> [B, T, D]."""
        flat = at_least_fp32(streams.flatten(2))
        mixed = F.linear(flat, self.proj.weight.to(flat.dtype))
        mixed = mixed * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.eps)
        gates = (mixed * self.alpha.to(flat.dtype) + self.bias.to(flat.dtype)).sigmoid()
        return weighted(gates, streams)


class HyperConnections(ResidualStream):
    """Manifold-constrained hyper-connections (arXiv 2512.24880): n streams through the whole stack."""

    connection = HyperConnection

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        params, D = config.component("residual").params, config.hidden_size
        self.n = n = params.expansion_rate
        self.expand = nn.Linear(D, n * D, bias=False) if params.expand == "linear" else None
        self.collapse: nn.Module | None = None
        if params.collapse != "mean":
            self.collapse = nn.Linear(n * D, D, bias=False) if params.collapse == "linear" else GatedCollapse(config, n)

    def enter(self, embeddings: Tensor) -> Tensor:
        if self.expand is not None:
            return self.expand(embeddings).unflatten(-1, (self.n, -1))
        return embeddings[..., None, :].expand(-1, -1, self.n, -1)

    def view(self, stream: Tensor) -> Tensor:
        return stream.mean(-2)

    def leave(self, stream: Tensor) -> Tensor:
        if self.collapse is None:
            return self.view(stream)
        return self.collapse(stream.flatten(2) if isinstance(self.collapse, nn.Linear) else stream)


class LoopCoefficients(StreamCoefficients):
    """Coefficients of one round of the hyperloop, and the round's `position` [D]."""

    def __init__(self, config: Any) -> None:
        params = config.component("residual").params
        n = params.expansion_rate
        sizes = {"diagonal": (n,), "sinkhorn": (n * n,), "identity": ()}[params.res_parameterization]
        super().__init__(config, n, (n, n, *sizes))
        self.form = params.res_parameterization
        self.iterations, self.gating_init = params.sinkhorn_iters, params.gating_init
        self.position = nn.Parameter(torch.empty(config.hidden_size))

    def init_parameters(self) -> None:
        """Every stream gets the round's output, and keeps little of its own."""
        super().init_parameters()
        init.zeros_(self.position)

    def residual_bias(self) -> Tensor:
        """σ(−4) of a stream stays, or the matrix is close to the identity."""
        if self.form == "sinkhorn":
            return (torch.eye(self.n) * 8 - 8).flatten()
        return torch.full((self.n,), -4.0) if self.form == "diagonal" else torch.zeros(0)

    def forward(self, streams: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """H_res y + H_post ⊗ (run(H_pre y) + position)."""
        pre, post, *res = self.coefficients(streams)
        change = run(weighted(pre.sigmoid(), streams)) + self.position.to(streams.dtype)
        written = (2 * post.sigmoid()).to(streams.dtype)[..., None] * change[..., None, :]
        if self.form == "diagonal":
            return res[0].sigmoid().to(streams.dtype)[..., None] * streams + written
        if self.form == "sinkhorn":
            mixing = sinkhorn(res[0].unflatten(-1, (self.n, self.n)), self.iterations)
            return mixing.to(streams.dtype) @ streams + written
        return streams + written


class Hyperloop(ResidualStream):
    """Looped depth with hyper-connections around each round: copies before the first round, their mean after the last.

    The layers themselves keep the standard connection.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.n = config.component("residual").params.expansion_rate
        self.loops = nn.ModuleList([LoopCoefficients(config) for _ in range(config.num_loops)])

    def loop(self, stream: Tensor, run: Callable[[Tensor], Tensor], loop: int) -> Tensor:
        if loop == 0:
            stream = stream[..., None, :].expand(-1, -1, self.n, -1)
        stream = self.loops[loop](stream, run)
        return stream.mean(-2) if loop == len(self.loops) - 1 else stream

    def view(self, stream: Tensor) -> Tensor:
        return stream.mean(-2) if stream.dim() == 4 else stream
