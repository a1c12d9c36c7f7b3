"""Graphs that tokens form, how fast they mix, and how rough the streams of a model are on them."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..modeling.mixers.consensus.self_consensus import SelfConsensus
from .snapshot import unchanged

logger = logging.get_logger(__name__)

LARGEST = 4096  # unknowns of a Laplacian whose whole spectrum is computed
MOST_ROUNDS, TOLERANCE = 500, 1e-6  # of the power iteration


def cycle_connectivity(num_nodes: int, window: int) -> float:
    """λ₁ of the Laplacian of the cycle of N nodes joined up to w apart: 2w + 1 − sin((2w+1)π/N) / sin(π/N).

    Raises:
        ValueError: Unless 1 ≤ w and 2w + 1 ≤ N.
    """
    if window < 1 or 2 * window + 1 > num_nodes:
        raise ValueError(f"On a cycle a window w ≥ 1 needs 2w + 1 ≤ N nodes, got w = {window} and N = {num_nodes}.")
    reach = 2 * window + 1
    return reach - math.sin(reach * math.pi / num_nodes) / math.sin(math.pi / num_nodes)


def path_connectivity(num_nodes: int, window: int) -> float:
    """λ₁ of the Laplacian of the path of N nodes joined up to w apart, the graph of self-consensus; computed.

    It lies between ½ λ₁ of the cycle of 2N nodes and the lesser of λ₁ of the cycles of N and of 2N.

    Raises:
        ValueError: Unless w ≥ 1 and N ≥ 2.
    """
    if window < 1 or num_nodes < 2:
        raise ValueError(f"A path needs a window w ≥ 1 and N ≥ 2 nodes, got w = {window} and N = {num_nodes}.")
    nodes = torch.arange(num_nodes)
    distance = (nodes[:, None] - nodes).abs()
    adjacent = ((distance > 0) & (distance <= window)).double()
    return torch.linalg.eigvalsh(torch.diag(adjacent.sum(1)) - adjacent)[1].item()


@dataclass(frozen=True)
class GraphSpectrum:
    """Extremes of the weighted Laplacian L of one layer of `self_consensus` on a batch.

    Attributes:
        layer: Its index.
        largest: λ_max(L) over all documents and heads; in a decoder, where L is block-triangular, of its diagonal.
        smallest: Least eigenvalue that is not of a state without energy; None in a decoder, and where L is larger than
            `LARGEST`.
        step: The largest step size η among iterations and positions.
        path, cycle: Connectivity of the unweighted window graph of the longest document, and of the cycle; None where
            it is too short.
    """

    layer: int
    largest: float
    smallest: float | None
    step: float
    path: float | None
    cycle: float | None

    @property
    def gain(self) -> float:
        """η λ_max: a step is a low-pass while this is below 2."""
        return self.step * self.largest

    @property
    def is_stable(self) -> bool:
        """Whether no direction grows in a step."""
        return self.gain < 2


def graph_spectrum(model: nn.Module, batch: dict[str, Any]) -> list[GraphSpectrum]:
    """Spectra of the graphs that the layers of `self_consensus` make of a batch; a warning where η λ_max ≥ 2.

    Args:
        model: Any of our models.
        batch: Its keyword arguments.

    Raises:
        ValueError: No layer is `self_consensus`.
    """
    layers = [module for module in model.modules() if isinstance(module, SelfConsensus)]
    if not layers:
        raise ValueError("graph_spectrum looks at layers of self_consensus, and this model has none.")
    inputs: dict[SelfConsensus, tuple[Tensor, Any]] = {}

    def keep(module: Any, args: tuple[Any, ...]) -> None:
        inputs[module] = args[0].detach(), args[1]

    hooks = [layer.register_forward_pre_hook(keep) for layer in layers]
    with unchanged(model), torch.no_grad():
        model.eval()
        try:
            model(**batch)
        finally:
            for hook in hooks:
                hook.remove()
        found = [_spectrum(layer, *inputs[layer]) for layer in layers]
    for spectrum in found:
        if not spectrum.is_stable:
            logger.warning(
                f"Layer {spectrum.layer}: η λ_max = {spectrum.step:.3g} · {spectrum.largest:.3g} = "
                f"{spectrum.gain:.3g} ≥ 2, so that a step of self_consensus makes its roughest directions rougher. "
                "Lower the learning rate or the layer's raw_step, or use a smaller window_size or rank."
            )
    return found


def _spectrum(layer: SelfConsensus, x: Tensor, context: Any) -> GraphSpectrum:
    largest, smallest, longest, step = 0.0, None, 0, 0.0
    for rows in context.rows:
        y = rows.zero_pads(rows.compact(x))
        steps = layer.steps(rows, 0)
        step = max(step, steps.max().item())
        longest = max(longest, rows.size if rows.lengths is None else int(rows.lengths.max()))
        if rows.is_causal:
            largest = max(largest, _largest_of_nodes(layer, y, rows))
            continue
        gradient = layer.energy_gradient(y, rows.keep, rows)
        shape = (len(y), rows.size, layer.num_heads, layer.head_dim)
        if rows.size * layer.head_dim <= LARGEST and layer.params.rope != "odyssey":
            top, least = _extremes(gradient, shape, y, rows.lengths, layer.head_dim)
            smallest = least if smallest is None or (least is not None and least < smallest) else smallest
        else:
            top = _power_iteration(gradient, shape, y)
        largest = max(largest, top)
    w = layer.params.window_size
    return GraphSpectrum(
        layer.layer_idx,
        largest,
        smallest,
        step,
        path_connectivity(longest, w) if 2 <= longest <= LARGEST else None,
        cycle_connectivity(longest, w) if 2 * w + 1 <= longest else None,
    )


def _largest_of_nodes(layer: SelfConsensus, y: Tensor, rows: Any) -> float:
    """max_i λ_max(Σ_j R_ij) over the nodes: with one end moving, these are the eigenvalues of the block triangle."""
    i, _, alpha, beta, Lambda, exists = layer.edges(y, rows.keep, rows)
    if not len(i):
        return 0.0
    unit = nn.functional.normalize(Lambda.double(), dim=-1)
    eye = torch.eye(layer.head_dim, dtype=unit.dtype, device=unit.device)
    R = alpha.double()[..., None, None] * eye + beta.double()[..., None, None] * unit.mT @ unit
    if exists is not None:
        R = R.masked_fill(~exists[:, :, None, None, None], 0.0)
    total = R.new_zeros(R.shape[0], rows.size, *R.shape[2:]).index_add(1, i, R)
    return torch.linalg.eigvalsh(total).max().item()


def _extremes(gradient: Any, shape: tuple[int, ...], like: Tensor, lengths: Any, width: int) -> tuple[float, Any]:
    """λ_max, and the least eigenvalue beyond the W of every document's states without energy, over rows and heads."""
    R, N, H, W = shape
    columns = []
    for k in range(N * W):  # the heads are apart from each other, so one probe serves all
        unit = torch.zeros(N * W, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
        unit[k] = 1
        probe = unit.view(1, N, 1, W).expand(R, N, H, W).contiguous()
        columns.append(gradient(probe).transpose(1, 2).reshape(R, H, N * W))
    values = torch.linalg.eigvalsh(torch.stack(columns, dim=-1).double())
    least = []
    for row, length in enumerate([N] * R if lengths is None else lengths.tolist()):
        first = (N - length) * W + W  # nodes that do not exist have no energy either
        if length > 1:
            least.append(values[row, :, first].min().item())
    return values.max().item(), min(least) if least else None


def _power_iteration(gradient: Any, shape: tuple[int, ...], like: Tensor) -> float:
    generator = torch.Generator().manual_seed(0)
    dtype = torch.promote_types(like.dtype, torch.float32)
    u, value = torch.randn(shape, generator=generator).to(like.device, dtype), 0.0
    for _ in range(MOST_ROUNDS):
        u = u / u.norm().clamp_min(1e-30)
        new = gradient(u)
        before, value = value, new.norm().item()
        if abs(value - before) <= TOLERANCE * value:
            break
        u = new
    return value


# ---------------------------------------------------------------------- energies of streams


def rough_energy(x: Tensor, keep: Tensor | None = None, window: int = 1) -> float:
    """½ Σ |x_i − x_j|² over the tokens 0 < |i − j| ≤ w, beside ½ Σ |x_i|²: 0 where all tokens are alike.

    Divided by the mean number of neighbours, so that windows compare; independent tokens have about 2.

    Args:
        x: [B, T, D].
        keep: [B, T] False at tokens that do not count; no edge leads over them.
        window: w.
    """
    x = x.double()
    keep = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if keep is None else keep.bool()
    energy, count = x.new_zeros(()), 0
    for offset in range(1, min(window, x.shape[1] - 1) + 1):
        both = keep[:, :-offset] & keep[:, offset:]
        energy += ((x[:, :-offset] - x[:, offset:]).square().sum(-1) * both).sum()
        count += int(both.sum())
    size = (x.square().sum(-1) * keep).sum() / keep.sum().clamp_min(1)
    return (energy / max(count, 1) / size).item() if count and size > 0 else 0.0


def dirichlet_energy(model: nn.Module, batch: dict[str, Any], window: int = 1) -> list[tuple[float, float]]:
    """How rough the residual stream is before and after each layer: `rough_energy` of it, a pair for each layer.

    Args:
        model: Any of our models, or another whose layers are `model.layers`.
        batch: Its keyword arguments; tokens whose attention_mask is 0 do not count.
        window: Tokens at most so far apart are compared.
    """
    layers = next(
        (module.layers for module in model.modules() if isinstance(getattr(module, "layers", None), nn.ModuleList)),
        None,
    )
    if layers is None:
        raise ValueError(f"{type(model).__name__} has no list of layers called 'layers' to look between.")
    mask = batch.get("attention_mask")
    keep = mask if mask is not None and mask.dim() == 2 else None
    streams: list[tuple[float, float]] = []
    with unchanged(model), torch.no_grad(), _watching(layers, streams, keep, window):
        model.eval()
        model(**batch)
    return streams


@contextmanager
def _watching(layers: Any, streams: list[tuple[float, float]], keep: Any, window: int) -> Iterator[None]:
    def energies(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        before = args[0] if args else kwargs["hidden_states"]
        after = output if isinstance(output, Tensor) else output[0]
        streams.append((rough_energy(before, keep, window), rough_energy(after, keep, window)))

    hooks = [layer.register_forward_hook(energies, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
