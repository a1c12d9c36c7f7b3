"""`ssog`: a learned field of Gaussians over relative position, the separable sum of Gaussians.

Shapes: R rows, L row length, H heads, A atoms, G×L' the raster of the tokens (G rows, L' columns), V head width,
D model width. One row of tokens has one axis; a raster has two, y (down) and x (along).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from ...cache import MixerStateLayer
from ...context import Rows
from ...extras import LayerExtras
from ...ops.gaussian_field import apply_band, gaussian_band
from ...ops.numerics import at_least_fp32, full_precision
from ...ops.tracing import exporting
from ..base import RowMixer, merge_heads, split_heads


@full_precision
def eager_ssog(V: Tensor, μ: Tensor, σ: Tensor, λ: Tensor, τ: Tensor, window: int, real: Tensor) -> Tensor:
    """Y = Σ_r λ_r a_x⁽ʳ⁾ (a_y⁽ʳ⁾ V),  a = softmax_j(log N(i − j; μ_i, σ_i) / τ) over |i − j| ≤ window.

    Args:
        V: [R, H, G, L', V].
        μ, σ: [axes, R, H, A, G, L'], the x axis last; a single axis is x.
        λ: [R, H, A, G, L'].
        real: [R, L'] False at tokens that do not exist.

    Returns:
        Y like V.
    """

    def a(μ: Tensor, σ: Tensor, real: Tensor | None) -> Tensor:
        i = torch.arange(μ.shape[-1], device=μ.device)
        Δ = i[:, None] - i
        visible = Δ.abs() <= window
        if real is not None:
            visible = (visible & real[:, None, :] | (Δ == 0))[:, None, None, None]
        log_N = -0.5 * ((Δ - μ[..., None]) / σ[..., None]).square() - σ[..., None].log()
        return (log_N / τ).masked_fill(~visible, -torch.inf).softmax(-1)

    Y = V[:, :, None]
    if len(μ) == 2:
        Y = torch.einsum("rhaxij,rhajxv->rhaixv", a(μ[0].mT, σ[0].mT, None), Y.expand(*λ.shape, -1))
    Y = torch.einsum("rhayij,rhayjv->rhayiv", a(μ[-1], σ[-1], real), Y.expand(*λ.shape, -1))
    return (λ[..., None] * Y).sum(2)


class SeparableGaussianField(RowMixer):
    """Each head looks at its surroundings through a few Gaussians of learned offset, width and weight.

    No query meets a key: with `lookat` a token steers its own Gaussians by bounded, at first almost closed, residuals
    μ₀ + s·m·tanh(W x), σ₀·exp(s·tanh(W x)), softmax(log λ₀ + s·tanh(W x)). The field ends `params.window` tokens away,
    where a Gaussian of width `max_sigma` has no weight left in fp32; what drifts beyond leans against that border. On
    a raster the second, horizontal pass reads what the vertical pass has left at the tokens of the own line.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        D, H, A, bias = self.hidden_size, self.num_heads, self.params.num_atoms, config.attention_bias
        self.num_axes = 1 if self.params.grid == "auto" else 2
        self.v_proj = nn.Linear(D, H * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(H * self.head_dim, D, bias=self.output_bias)
        self.offsets = nn.Parameter(torch.empty(self.num_axes, H, A))
        self.raw_widths = nn.Parameter(torch.empty(self.num_axes, H, A))
        self.weight_logits = nn.Parameter(torch.empty(H, A))
        self.raw_temperature = nn.Parameter(torch.empty(1))
        if self.params.lookat:
            self.offset_proj = nn.Linear(D, self.num_axes * H * A)
            self.width_proj = nn.Linear(D, self.num_axes * H * A)
            self.weight_proj = nn.Linear(D, H * A)
            self.raw_gates = nn.Parameter(torch.empty(3))  # of offsets, widths, weights

    def init_parameters(self) -> None:
        """Offsets normal with deviation ½, widths 0.47 above the floor, equal weights, τ = 0.81, probes zero."""
        init.normal_(self.offsets, mean=0.0, std=0.5)
        init.constant_(self.raw_widths, -0.5)
        init.zeros_(self.weight_logits)
        init.constant_(self.raw_temperature, -1.0)
        if self.params.lookat:
            for probe in (self.offset_proj, self.width_proj, self.weight_proj):
                init.zeros_(probe.weight)
                init.zeros_(probe.bias)
            init.constant_(self.raw_gates, -8.0 if self.params.cold_init else -2.0)

    def atoms(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens [R, L, D] -> μ, σ [axes, R, H, A, L], λ [R, H, A, L] and τ [1], in at least fp32."""
        H, A, axes = self.num_heads, self.params.num_atoms, self.num_axes
        μ, ω = at_least_fp32(self.offsets), at_least_fp32(self.raw_widths)
        σ = F.softplus(ω) + 1e-4 + self.params.sigma_floor
        μ, σ = (y[:, None, ..., None].expand(-1, x.shape[0], -1, -1, x.shape[1]) for y in (μ, σ))
        logits = at_least_fp32(self.weight_logits)[..., None].expand(*μ.shape[1:])
        if self.params.lookat:

            def residual(probe: nn.Linear, count: int) -> Tensor:
                return at_least_fp32(probe(x)).tanh().unflatten(-1, (count, H, A)).permute(2, 0, 3, 4, 1)

            gates = F.softplus(at_least_fp32(self.raw_gates))
            μ = μ + gates[0] * self.params.max_offset * residual(self.offset_proj, axes)
            σ = σ * (gates[1] * residual(self.width_proj, axes)).exp()
            logits = logits + gates[2] * residual(self.weight_proj, 1)[0]
        return μ, σ, logits.softmax(2), F.softplus(at_least_fp32(self.raw_temperature)) + 0.5

    def mix(self, x: Tensor, rows: Rows, layer: MixerStateLayer | None) -> tuple[Tensor, LayerExtras | None]:
        size = rows.size
        if self.num_axes == 2:
            size = self._raster_size(rows)
            x = x[:, :size]
        V = at_least_fp32(split_heads(self.v_proj(x), self.num_heads))
        μ, σ, λ, τ = self.atoms(x)
        shape = self.params.grid if self.num_axes == 2 else (1, size)
        V, μ, σ, λ = V.unflatten(2, shape), μ.unflatten(-1, shape), σ.unflatten(-1, shape), λ.unflatten(-1, shape)
        if rows.context.backend == "eager" or exporting():  # a band at most as wide as the row cannot be traced
            real = rows.keep if self.num_axes == 1 else None
            if real is None:
                real = torch.ones(x.shape[0], shape[1], dtype=torch.bool, device=x.device)
            Y = eager_ssog(V, μ, σ, λ, τ, self.params.window, real)
        else:
            Y = self.field(V, μ, σ * τ.sqrt(), λ, rows.lengths if self.num_axes == 1 else None)
        output = self.o_proj(merge_heads(Y.flatten(2, 3)).to(x.dtype))
        return F.pad(output, (0, 0, 0, rows.size - size)), None

    def field(self, V: Tensor, μ: Tensor, width: Tensor, λ: Tensor, lengths: Tensor | None) -> Tensor:
        """`eager_ssog` at a cost linear in the tokens; `width` is σ√τ."""

        def band(mean: Tensor, width: Tensor) -> Tensor:
            return gaussian_band(mean, width, min(self.params.window, mean.shape[-1] - 1), lengths)

        if self.num_axes == 1:  # one pass, so the atoms' bands can be added up first
            weights = (λ[..., None] * band(μ[0], width[0])).sum(2)
            return apply_band(weights, V)
        below = apply_band(band(μ[0].mT, width[0].mT), V[:, :, None].transpose(-3, -2))
        Y = apply_band(band(μ[1], width[1]), below.transpose(-3, -2))
        return (λ[..., None] * Y).sum(2)

    def _raster_size(self, rows: Rows) -> int:
        height, columns = self.params.grid
        lengths = [rows.size] if rows.lengths is None else rows.lengths.tolist()
        if any(length != height * columns for length in lengths):
            raise ValueError(
                f"'ssog' works on a raster of {height}×{columns} = {height * columns} tokens here, but the rows have "
                f"{sorted(set(lengths))}. Give whole rasters (no class token), or leave out `grid`."
            )
        return height * columns
