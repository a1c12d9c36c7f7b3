"""One gradient step on the disagreement of neighbours in a graph, every edge of which weighs by a matrix of its own.

    E(u) = ½ Σ_{(i,j)} (Q_{i−j} u_i − u_j)ᵀ R_ij (Q_{i−j} u_i − u_j),     R_ij = α I + β Λᵀ Λ,  rows of Λ unit vectors

α, β and Λ come from small networks of both ends of an edge; Q is a rotation by the distance, or nothing. R is never
formed. An edge (i, j) and its reverse are two edges with matrices of their own.

Shapes: R rows, N nodes, J nodes of a context, H heads, W head width, r rank, ξ width of the networks, F = 3ξ (or ξ,
        where the three networks share their first layer), h weights α and β an edge, 1 or H; K offsets j − i, E edges.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..positions import apply_rotary
from .backend import plain_forms
from .numerics import full_precision
from .tracing import exporting

UNIT_EPS = 1e-12  # beside the squared length of a row of Λ
SEGMENT_FLOATS = {"cpu": 2**18, "other": 2**24}  # of Λ that are in memory at once
FEWEST = 64  # nodes of a segment where the window is as long; with fewer, most work would be on their neighbours

Rotation = Callable[[Tensor], tuple[Tensor, Tensor]]  # distances [E] -> cos, sin [E, rotated width]


class EdgeNetworks(NamedTuple):
    """Last layers of the networks of α, β and Λ, as matrices that are multiplied from the right, with their biases."""

    alpha: Tensor  # [ξ, h]
    beta: Tensor  # [ξ, h]
    Lambda: Tensor  # [ξ, H·r·W]
    alpha_bias: Tensor  # [h]
    beta_bias: Tensor  # [h]
    Lambda_bias: Tensor  # [H·r·W]


class Edges(NamedTuple):
    """Edges of any graph, and their weights.

    Attributes:
        i, j: [E] where an edge begins and ends.
        alpha, beta: [R, E, h].
        Lambda: [R, E, H, r, W]; rows of any length.
        exists: [R or 1, E] False at edges that are not there in a row; None when all are.
    """

    i: Tensor
    j: Tensor
    alpha: Tensor
    beta: Tensor
    Lambda: Tensor
    exists: Tensor | None = None


def window_edges(num_nodes: int, window: int, is_causal: bool = False, device: Any = None) -> tuple[Tensor, Tensor]:
    """Both ends i, j [E] of the edges 0 < |i − j| ≤ w of a path; in a decoder only those to earlier nodes."""
    nodes = torch.arange(num_nodes, device=device)
    distance = nodes[None, :] - nodes[:, None]
    near = (distance.abs() <= window) & (distance < 0 if is_causal else distance != 0)
    i, j = near.nonzero(as_tuple=True)
    return i, j


def aligned_edges(
    num_nodes: int, num_context: int, window: int, include_own: bool = True, device: Any = None
) -> tuple[Tensor, Tensor]:
    """Both ends i, j [E] of the edges |i − j| ≤ w from N nodes to J of a track that runs beside them.

    Args:
        num_nodes, num_context: N and J.
        window: w.
        include_own: Whether a node sees the one at its own place, which the released code leaves out where N = J.
    """
    distance = torch.arange(num_context, device=device)[None, :] - torch.arange(num_nodes, device=device)[:, None]
    near = (distance.abs() <= window) & ((distance != 0) | include_own)
    i, j = near.nonzero(as_tuple=True)
    return i, j


def edge_weights(hidden: Tensor, networks: EdgeNetworks, heads: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """What the networks make of the sums [..., F] of both ends' first layers: α, β [..., h] > 0 and Λ [..., H, r, W].

    The rows of Λ are as the network returns them; whoever uses them brings them to length one.

    Args:
        hidden: [..., F].
        networks: See `EdgeNetworks`.
        heads: H and W.
    """
    hidden, width = F.gelu(hidden), networks.alpha.shape[0]
    first, second, third = hidden.split(width, dim=-1) if hidden.shape[-1] != width else (hidden, hidden, hidden)
    alpha = F.softplus(first @ networks.alpha + networks.alpha_bias)
    beta = F.softplus(second @ networks.beta + networks.beta_bias)
    Lambda = third @ networks.Lambda + networks.Lambda_bias
    return alpha, beta, Lambda.unflatten(-1, (heads[0], -1, heads[1]))


def weighted(q: Tensor, alpha: Tensor, beta: Tensor, Lambda: Tensor) -> Tensor:
    """R q of q [..., H, W], with the rows of Λ brought to length one on the way: β Λᵀ Λ = Λ'ᵀ diag(β / |Λ'_k|²) Λ'."""
    # sums of products: as matrix products, so many small ones would take three times as long
    strength = beta[..., None] / (Lambda.square().sum(-1) + UNIT_EPS)
    along = (Lambda * q[..., None, :]).sum(-1)
    return alpha[..., None] * q + (Lambda * (strength * along)[..., None]).sum(-2)


# ---------------------------------------------------------------------- any graph


@full_precision
def consensus_gradient(
    u: Tensor,
    edges: Edges,
    v: Tensor | None = None,
    *,
    rotation: Rotation | None = None,
    rotate_back: bool = True,
    source_only: bool = False,
) -> Tensor:
    """∂E/∂u on a graph given by its edges: every residual R_ij (Q_{i−j} u_i − u_j) is added at i and subtracted at j.

    Args:
        u: [R, N, H, W], at least fp32 like the weights.
        edges: From nodes i of `u` to nodes j of `v`.
        v: [R, J, H, W] a context that stays where it is, so that nothing is subtracted at j; None: `u` itself.
        rotation: Of the node an edge begins at, by i − j; None: no rotation.
        rotate_back: Put Q_{i−j}ᵀ before what is added at i. That is the gradient; the released code does without.
        source_only: Let only the node an edge begins at move, as in a decoder. Implied by `v`.

    Returns:
        Like `u`.

    Raises:
        ValueError: Nodes that do not exist, or shapes that do not fit.
    """
    i, j, alpha, beta, Lambda, exists = edges
    target = u if v is None else v
    if i.numel() and (
        int(i.min()) < 0 or int(j.min()) < 0 or int(i.max()) >= u.shape[1] or int(j.max()) >= target.shape[1]
    ):
        raise ValueError(
            f"Edges must join nodes 0 … {u.shape[1] - 1} with nodes 0 … {target.shape[1] - 1}, got nodes from "
            f"{int(i.min())} to {int(i.max())} and from {int(j.min())} to {int(j.max())}."
        )
    if Lambda.shape[1] != len(i) or len(i) != len(j) or Lambda.shape[-1] != u.shape[-1]:
        raise ValueError(
            f"{len(i)} edges that end at {len(j)} nodes need Λ [R, {len(i)}, H, r, {u.shape[-1]}], got "
            f"{list(Lambda.shape)}."
        )
    q, source_first = u[:, i], None
    if rotation is not None:
        source_first = rotation(i - j)
        q = apply_rotary(q, *source_first)
    r = weighted(q - target[:, j], alpha, beta, Lambda)
    if exists is not None:
        r = r.masked_fill(~exists[..., None, None], 0.0)
    own = r
    if source_first is not None and rotate_back:
        own = apply_rotary(r, source_first[0], -source_first[1])
    gradient = torch.zeros_like(u).index_add(1, i, own)
    return gradient if source_only or v is not None else gradient.index_add(1, j, -r)


@full_precision
def consensus_energy(u: Tensor, edges: Edges, v: Tensor | None = None, *, rotation: Rotation | None = None) -> Tensor:
    """E(u) [R], ½ Σ (Q_{i−j} u_i − u_j)ᵀ R_ij (Q_{i−j} u_i − u_j) over the edges; arguments as of the gradient."""
    i, j, alpha, beta, Lambda, exists = edges
    q = u[:, i] if rotation is None else apply_rotary(u[:, i], *rotation(i - j))
    q = q - (u if v is None else v)[:, j]
    energies = (q * weighted(q, alpha, beta, Lambda)).sum((-2, -1))
    if exists is not None:
        energies = energies.masked_fill(~exists, 0.0)
    return energies.sum(-1) / 2


# ---------------------------------------------------------------------- windows


class Window(NamedTuple):
    """Which edges there are and what they do.

    Attributes:
        size: w; edges 0 < |i − j| ≤ w.
        is_causal: Only edges to earlier nodes, and only the node they begin at moves.
        rotate_back: See `consensus_gradient`.
    """

    size: int
    is_causal: bool
    rotate_back: bool = True

    @property
    def offsets(self) -> list[int]:
        """j − i of the edges."""
        after = [] if self.is_causal else list(range(1, self.size + 1))
        return [*range(-self.size, 0), *after]

    @property
    def ahead(self) -> int:
        """Nodes an edge reaches ahead."""
        return 0 if self.is_causal else self.size


@full_precision
def window_consensus_gradient(
    u: Tensor,
    source: Tensor,
    target: Tensor,
    networks: EdgeNetworks,
    window: Window,
    *,
    keep: Tensor | None = None,
    rotation: Rotation | None = None,
) -> Tensor:
    """∂E/∂u on the edges of a window, from the nodes' halves of the networks' first layers.

    The neighbours at one offset are the nodes, shifted. Λ exists for a segment of the nodes at a time, in the backward
    pass too, which computes it again: memory beyond the arguments does not grow with N. Can be differentiated once.

    Args:
        u: [R, N, H, W], at least fp32 like the rest.
        source, target: [R, N, F] what a node adds to the sum `edge_weights` takes, where an edge begins and ends.
        networks: See `EdgeNetworks`.
        window: See `Window`.
        keep: [R or 1, N] False at nodes without edges; None when all have them.
        rotation: See `consensus_gradient`.

    Returns:
        Like `u`.
    """
    R, N = u.shape[:2]
    if source.shape != target.shape or source.shape[:2] != u.shape[:2]:
        raise ValueError(
            f"source and target must be [{R}, {N}, F] beside u {list(u.shape)}, got {list(source.shape)} and "
            f"{list(target.shape)}."
        )
    if isinstance(N, int):  # not a symbol of a traced graph
        window = window._replace(size=min(window.size, max(1, N - 1)))
    if keep is None:
        keep = torch.ones(1, N, dtype=torch.bool, device=u.device)
    angles = None
    if rotation is not None:
        angles = rotation(-torch.tensor(window.offsets, device=u.device))
    if plain_forms() or exporting():
        around = [_around(x, window) for x in (u, target, keep)]
        whole = _segment(window, angles, around[0], source, around[1], around[2], EdgeNetworks(*networks))
        return whole[:, window.size : window.size + N]
    return _Windowed.apply(window, angles, keep, u, source, target, *networks)


def _around(x: Tensor, window: Window) -> Tensor:
    """[R, N, …] with zeros for the neighbours before the first node and behind the last."""
    return F.pad(x, (0, 0) * (x.dim() - 2) + (window.size, window.ahead))


def _segment(
    window: Window,
    angles: tuple[Tensor, Tensor] | None,
    u: Tensor,
    source: Tensor,
    target: Tensor,
    keep: Tensor,
    networks: EdgeNetworks,
) -> Tensor:
    """What the edges that begin at C nodes give these and their neighbours.

    Args:
        u, target, keep: [R, w + C + ahead, …], with the neighbours.
        source: [R, C, F].

    Returns:
        Like `u`.
    """
    C, w = source.shape[1], window.size

    def shifted(x: Tensor) -> Tensor:  # [R, C, K, …]
        return torch.stack([x[:, w + offset : w + offset + C] for offset in window.offsets], dim=2)

    weights = edge_weights(source[:, :, None] + shifted(target), networks, (u.shape[2], u.shape[3]))
    q = u[:, w : w + C, None]
    if angles is not None:
        q = apply_rotary(q.expand(-1, -1, len(window.offsets), -1, -1), *angles)
    exists = keep[:, w : w + C, None] & shifted(keep)
    r = weighted(q - shifted(u), *weights).masked_fill(~exists[..., None, None], 0.0)
    own = apply_rotary(r, angles[0], -angles[1]) if angles is not None and window.rotate_back else r
    total = F.pad(own.sum(2), (0, 0, 0, 0, w, window.ahead))
    if window.is_causal:
        return total
    there = [
        F.pad(r[:, :, k], (0, 0, 0, 0, w + offset, window.ahead - offset)) for k, offset in enumerate(window.offsets)
    ]
    return total - torch.stack(there).sum(0)


class _Windowed(torch.autograd.Function):
    """`_segment` over segments of the nodes; the backward pass runs each of them again."""

    @staticmethod
    def forward(
        ctx: Any,
        window: Window,
        angles: tuple[Tensor, Tensor] | None,
        keep: Tensor,
        u: Tensor,
        source: Tensor,
        target: Tensor,
        *networks: Tensor,
    ) -> Tensor:
        ctx.window, ctx.angles = window, angles
        ctx.save_for_backward(keep, u, source, target, *networks)
        around = [_around(x, window) for x in (u, target, keep)]
        gradient = torch.zeros_like(around[0])
        for inner, outer in _segments(window, u, networks):
            u_s, target_s, keep_s = (x[:, outer] for x in around)
            gradient[:, outer] += _segment(
                window, angles, u_s, source[:, inner], target_s, keep_s, EdgeNetworks(*networks)
            )
        return gradient[:, window.size : window.size + u.shape[1]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        window, N = ctx.window, grad.shape[1]
        keep, u, source, target, *networks = ctx.saved_tensors
        u, target, keep, grad = (_around(x, window) for x in (u, target, keep, grad))
        sums = [torch.zeros_like(x) for x in (u, source, target, *networks)]
        for inner, outer in _segments(window, u[:, :N], networks):
            with torch.enable_grad():
                cut = [u[:, outer], source[:, inner], target[:, outer], *networks]
                cut = [x.detach().requires_grad_() for x in cut]
                out = _segment(window, ctx.angles, cut[0], cut[1], cut[2], keep[:, outer], EdgeNetworks(*cut[3:]))
            changes = torch.autograd.grad(out, cut, grad[:, outer])
            for total, change, place in zip(sums, changes, (outer, inner, outer, *[None] * len(networks))):
                if place is None:
                    total += change
                else:
                    total[:, place] += change
        own = slice(window.size, window.size + N)
        return None, None, None, sums[0][:, own], sums[1], sums[2][:, own], *sums[3:]


def _segments(window: Window, u: Tensor, networks: Any) -> list[tuple[slice, slice]]:
    """Places of the nodes of every segment, and of them with their neighbours among the nodes with padding."""
    R, N = u.shape[:2]
    floats = R * len(window.offsets) * networks[2].shape[1]
    budget = SEGMENT_FLOATS["cpu" if u.device.type == "cpu" else "other"]
    C = max(min(window.size, FEWEST), budget // floats)
    return [
        (slice(start, min(start + C, N)), slice(start, min(start + C, N) + window.size + window.ahead))
        for start in range(0, N, C)
    ]
