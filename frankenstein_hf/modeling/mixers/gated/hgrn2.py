"""`hgrn2`: a gated linear recurrence whose forget gates are bounded from below.

Shapes: R rows, L row length, H heads, K key width, V value width, D model width.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from ...cache import States
from ...context import Rows
from ...norms import RMSNorm
from ...ops.numerics import at_least_fp32, full_precision
from ..linear_attention import LinearAttention

LEAST_GATE = -80.0  # σ of less is no normal fp32 number


@full_precision
def eager_hgrn2(q: Tensor, k: Tensor, v: Tensor, log_g: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """S_t = Diag(g_t) S_{t−1} + k_t v_tᵀ,  o_t = q_t S_t, token by token; k_t = 1 − g_t if keys are tied.

    Args:
        q, k, log_g: [R, H, L, K].
        v: [R, H, L, V].
        S: [R, H, K, V].

    Returns:
        o [R, H, L, V] and the last S.
    """
    o = []
    for t in range(q.shape[2]):
        S = log_g[:, :, t, :, None].exp() * S + k[:, :, t, :, None] * v[:, :, t, None, :]
        o.append(torch.einsum("rhk,rhkv->rhv", q[:, :, t], S))
    return torch.stack(o, dim=2), S


def log_forget_gate(f: Tensor, b: float | Tensor) -> Tensor:
    """log(b + (1 − b) σ(f)) without loss of digits: little is forgotten where f > 0, much where f < 0."""
    little = torch.log1p((b - 1.0) * torch.sigmoid(-f.clamp_min(0.0)))
    if isinstance(b, Tensor):  # may be zero, where the gradient of its logarithm is none
        much = torch.log(b + (1.0 - b) * torch.sigmoid(f.clamp_min(LEAST_GATE)))
    else:
        log_b = f.new_tensor(math.log(b) if b > 0.0 else -math.inf)
        much = torch.logaddexp(log_b, F.logsigmoid(f) + math.log1p(-b))
    return torch.where(f > 0.0, little, much)


class DepthBounds(nn.Module):
    """Lower bounds of the forget gates of every layer, per channel, growing with depth: γ^ℓ = Σ_{i<ℓ} softmax(Γ)_i.

    Layers share one of these. The first one has the bound zero.
    """

    def __init__(self, layers: int, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(layers, channels))

    def init_parameters(self) -> None:
        """Γ = 0, so that the bound of layer ℓ of L is ℓ/L."""
        init.zeros_(self.weight)

    def forward(self, layer_idx: int) -> Tensor:
        """[channels] in at least fp32."""
        return at_least_fp32(self.weight).softmax(0)[:layer_idx].sum(0)


class HGRN2(LinearAttention):
    """Gated linear recurrence with state expansion (arXiv 2404.07904): g = b + (1 − b)·σ(W x), key 1 − g.

    The lower bound b grows with depth: ℓ/L in layer ℓ of L, or learned (`DepthBounds`). SiLU on q; RMS norm over all
    heads on the readout.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        D, H, bias = self.hidden_size, self.num_heads, config.attention_bias
        K, V = self.key_dim, self.value_dim
        bound = self.params.lower_bound
        self.lower_bound = None
        if bound == "learned":
            self.shared_tables = ("lower_bounds",)
            self.lower_bounds = DepthBounds(config.num_hidden_layers, H * K)
        else:
            self.lower_bound = layer_idx / config.num_hidden_layers if bound == "depth" else float(bound)
        self.q_proj = nn.Linear(D, H * K, bias=bias)
        self.k_proj = None if self.params.tied_key else nn.Linear(D, H * K, bias=bias)
        self.v_proj = nn.Linear(D, H * V, bias=bias)
        self.f_proj = nn.Linear(D, H * K, bias=bias)
        self.norm = RMSNorm(H * V, config.rms_norm_eps)
        self.o_proj = nn.Linear(H * V, D, bias=self.output_bias)

    def project(self, x: Tensor, rows: Rows) -> States:
        f = at_least_fp32(self.f_proj(x))
        b = self.lower_bounds(self.layer_idx) if self.lower_bound is None else self.lower_bound
        k = (1.0 - b) * torch.sigmoid(-f) if self.k_proj is None else self.k_proj(x)
        return {"q": F.silu(self.q_proj(x)), "k": k, "v": self.v_proj(x), "log_decay": log_forget_gate(f, b)}

    def recurrence(self, q: Tensor, k: Tensor, v: Tensor, log_α: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        return eager_hgrn2(q, k, v, log_α, S)

    def finish(self, readout: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(self.norm(readout.flatten(2).to(x.dtype)))
