"""`self_consensus`: one or more gradient steps on the disagreement of neighbouring tokens.

Shapes: R rows, L row length, N = P + L nodes, P of the tail, D model width, H heads, W head width, r rank,
        F = 3ξ (ξ with a shared trunk), h = 1 (H with magnitudes per head), T iterations.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from ...cache import MixerStateLayer, States
from ...context import Rows
from ...extras import LayerExtras
from ...ops.consensus import (
    EdgeNetworks,
    Edges,
    Rotation,
    Window,
    consensus_gradient,
    edge_weights,
    window_consensus_gradient,
    window_edges,
)
from ...ops.numerics import at_least_fp32, full_precision
from ...positions import rotary_frequencies
from ..base import RowMixer, last_real, linear_matrix

FIRST_STEP = -2.2  # softplus of it is 0.105


@full_precision
def eager_self_consensus(
    u: Tensor, η: Tensor, edges: Edges, Q: Rotation | None, rotate_back: bool, source_only: bool
) -> Tensor:
    """u_i ← u_i − η_i Σ_j [Q_{i−j}ᵀ R_ij (Q_{i−j} u_i − u_j) + R_ji (u_i − Q_{j−i} u_j)],  R = α I + β Λᵀ Λ.

    The sum runs over the edges, each of which adds its residual at i and, unless `source_only`, subtracts it at j.
    Without `rotate_back` there is no Qᵀ in front. R stays what it is through all iterations.

    Args:
        u: [R, N, H, W].
        η: [T, R or 1, N].
    """
    for η_t in η:
        u = u - η_t[..., None, None] * consensus_gradient(
            u, edges, rotation=Q, rotate_back=rotate_back, source_only=source_only
        )
    return u


class SelfConsensus(RowMixer):
    """Consensus on the window-path graph: tokens at most w apart pull each other, along directions of the edge's own.

    Small networks of both ends make of every edge the matrix R = α I + β Λᵀ Λ it weighs with. In a decoder an edge
    leads to earlier tokens only, and only its later end moves; decoding keeps the inputs of the last T·w tokens.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        params, D, H = self.params, self.hidden_size, self.num_heads
        width, hidden = H * self.head_dim, params.edge_hidden_size
        magnitudes = H if params.per_head else 1
        self.u_proj = nn.Linear(D, width)
        self.edge_source_proj = nn.Linear(D, hidden if params.shared_trunk else 3 * hidden)
        self.edge_target_proj = nn.Linear(D, hidden if params.shared_trunk else 3 * hidden, bias=False)
        self.alpha_proj = nn.Linear(hidden, magnitudes, bias=False)
        self.beta_proj = nn.Linear(hidden, magnitudes, bias=False)
        self.lambda_proj = nn.Linear(hidden, params.rank * width, bias=False)
        self.alpha_bias = nn.Parameter(torch.empty(magnitudes))
        self.beta_bias = nn.Parameter(torch.empty(magnitudes))
        self.lambda_bias = nn.Parameter(torch.empty(params.rank * width))
        places = config.max_position_embeddings if params.step == "per_position" else 1
        self.raw_step = nn.Parameter(torch.empty(params.num_iterations, places))
        self.o_proj = nn.Linear(width, D)

    def init_parameters(self) -> None:
        """Steps of 0.105; α = β = softplus(0); biases of Λ as PyTorch begins a linear layer."""
        init.constant_(self.raw_step, FIRST_STEP)
        init.zeros_(self.alpha_bias)
        init.zeros_(self.beta_bias)
        bound = self.params.edge_hidden_size**-0.5
        init.uniform_(self.lambda_bias, -bound, bound)

    # ------------------------------------------------------------------ what the core is given

    def networks(self, like: Tensor) -> EdgeNetworks:
        """Last layers of the edges' networks, in at least fp32; `like` is a tensor as the layers get them."""
        like = like.new_empty(0, self.params.edge_hidden_size)
        matrices = (linear_matrix(proj, like) for proj in (self.alpha_proj, self.beta_proj, self.lambda_proj))
        tensors = (*matrices, self.alpha_bias, self.beta_bias, self.lambda_bias)
        return EdgeNetworks(*(at_least_fp32(x) for x in tensors))

    def rotation(self, rows: Rows) -> Rotation | None:
        """Rotations by a distance. A factor some rotary scalings put on cos and sin is left out: lengths must stay."""
        if self.params.rope == "none":
            return None
        longest = self.config.max_position_embeddings
        frequencies, _ = rotary_frequencies(self.config, self.head_dim, rows.context.keep.device, longest)

        def rotate(distance: Tensor) -> tuple[Tensor, Tensor]:
            angles = distance[:, None].float() * torch.cat([frequencies, frequencies])
            return angles.cos(), angles.sin()

        return rotate

    def steps(self, rows: Rows, tail: int) -> Tensor:
        """η [T, R or 1, N or 1] of the `tail` places before the rows and of the rows."""
        step = F.softplus(at_least_fp32(self.raw_step))
        if self.params.step == "per_iteration":
            return step[:, None]
        before = torch.arange(-tail, 0, device=step.device)
        places = torch.cat([rows.positions[:, :1] + before, rows.positions], dim=1)
        return step[:, places.clamp(0, step.shape[1] - 1)]

    def window(self, is_causal: bool) -> Window:
        """The graph, and whether what an edge gives its first end is rotated back."""
        return Window(self.params.window_size, is_causal, rotate_back=self.params.rope == "gradient")

    # ------------------------------------------------------------------ mixing

    def mix(self, x: Tensor, rows: Rows, layer: MixerStateLayer | None) -> tuple[Tensor, LayerExtras | None]:
        x, P = rows.zero_pads(x), 0
        states = (layer.read(self.advance) if layer is not None else None) or {}
        y, keep = x, rows.keep
        if states:
            y, P = torch.cat([states["inputs"].to(x.dtype), x], dim=1), states["inputs"].shape[1]
            before = torch.arange(-P, 0, device=x.device) >= -states["seen"][:, None]
            real = x.new_ones(x.shape[:2], dtype=torch.bool) if keep is None else keep
            keep = torch.cat([before, real], dim=1)
        u = self.agree(y, keep, self.steps(rows, P), rows)
        if layer is not None:
            states = self.advance({"inputs": x}, states, rows.lengths)
            if layer.num_places is not None:  # of one length throughout
                size = min(self.params.tail, layer.num_places)
                states["inputs"] = in_front(states["inputs"], size)[:, -size:]
            layer.write(states, {"inputs": x}, rows.context.keep)
        return self.o_proj(u[:, P:].flatten(2).to(x.dtype)), None

    def agree(self, y: Tensor, keep: Tensor | None, steps: Tensor, rows: Rows) -> Tensor:
        """Nodes [R, N, D], of which `keep` [R, N] exist -> u_T [R, N, H, W] in at least fp32."""
        u = at_least_fp32(self.u_proj(y)).unflatten(-1, (self.num_heads, -1))
        if rows.context.backend == "eager":
            window = self.window(rows.is_causal)
            edges, rotation = self.edges(y, keep, rows), self.rotation(rows)
            return eager_self_consensus(u, steps, edges, rotation, window.rotate_back, window.is_causal)
        gradient = self.energy_gradient(y, keep, rows)
        for step in steps:
            u = u - step[..., None, None] * gradient(u)
        return u

    def energy_gradient(self, y: Tensor, keep: Tensor | None, rows: Rows) -> Any:
        """The linear map u ↦ ∂E/∂u [R, N, H, W] of the graph that nodes [R, N, D] make."""
        source, target = (at_least_fp32(proj(y)) for proj in (self.edge_source_proj, self.edge_target_proj))
        networks, window, rotation = self.networks(y), self.window(rows.is_causal), self.rotation(rows)

        def gradient(u: Tensor) -> Tensor:
            return window_consensus_gradient(u, source, target, networks, window, keep=keep, rotation=rotation)

        return gradient

    def edges(self, y: Tensor, keep: Tensor | None, rows: Rows) -> Edges:
        """All edges between nodes [R, N, D] with their weights, written out."""
        i, j = window_edges(y.shape[1], self.params.window_size, rows.is_causal, y.device)
        source, target = (at_least_fp32(proj(y)) for proj in (self.edge_source_proj, self.edge_target_proj))
        weights = edge_weights(source[:, i] + target[:, j], self.networks(y), (self.num_heads, self.head_dim))
        return Edges(i, j, *weights, None if keep is None else keep[:, i] & keep[:, j])

    def advance(self, inputs: States, states: States, lengths: Tensor | None) -> States:
        """The inputs of the last T·w tokens, as many as there are, zeros before the first; `seen` [R] counts them."""
        x = inputs["inputs"]
        seen = states.get("seen", torch.zeros(len(x), dtype=torch.long, device=x.device))
        past = states.get("inputs", x[:, :0]).to(x.dtype)
        past = in_front(past, min(self.params.tail, past.shape[1] + x.shape[1]))
        seen = seen + (x.shape[1] if lengths is None else lengths)
        return {"seen": seen, "inputs": last_real(past, x, lengths).clone()}


def in_front(x: Tensor, size: int) -> Tensor:
    """`x` [R, P, D] with zeros before it, at least `size` long."""
    return F.pad(x, (0, 0, max(0, size - x.shape[1]), 0))
