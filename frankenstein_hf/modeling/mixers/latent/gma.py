"""`gma`: Gaussian mixture attention.

Shapes: R rows, L row length, H heads, M components, P routing width, V head width, D model width.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from ...cache import States
from ...context import Rows
from ...ops.decayed_scan import decayed_scan
from ...ops.numerics import at_least_fp32, full_precision
from ..base import RecurrentMixer, Run, split_heads, zero_beyond


@full_precision
def eager_gma(Γ_Q: Tensor, Γ_K: Tensor, v: Tensor, V: Tensor, Z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ṽ_t = Ṽ_{t−1} + γᴷ_t v_tᵀ,  Z_t = Z_{t−1} + γᴷ_t, read as γ^Q_t Ṽ_t and γ^Q_t Z_t, token by token.

    The output is o_t = γ^Q_t Ṽ_t / (γ^Q_t Z_t + ε).

    Args:
        Γ_Q, Γ_K: Responsibilities [R, H, L, M].
        v: [R, H, L, V].
        V, Z: [R, H, M, V] and [R, H, M].

    Returns:
        Numerators [R, H, L, V], denominators [R, H, L], the last V and Z.
    """
    numerators, denominators = [], []
    for t in range(v.shape[2]):
        V = V + Γ_K[:, :, t, :, None] * v[:, :, t, None, :]
        Z = Z + Γ_K[:, :, t]
        numerators.append(torch.einsum("rhm,rhmv->rhv", Γ_Q[:, :, t], V))
        denominators.append((Γ_Q[:, :, t] * Z).sum(-1))
    return torch.stack(numerators, dim=2), torch.stack(denominators, dim=2), V, Z


@full_precision
def responsibilities(x: Tensor, means: Tensor, variances: Tensor, log_priors: Tensor) -> Tensor:
    """p(component | x) = softmax_m(log π_m − ½ Σ log σ²_m − ½ Σ (x − μ_m)² / σ²_m).

    Args:
        x: [R, H, L, P], at least fp32 like the rest.
        means, variances: [H, M, P].
        log_priors: [H, M].

    Returns:
        [R, H, L, M].
    """
    centre = means.mean(1, keepdim=True)  # the squares below are expanded: keep what they subtract small
    x, means = x - centre, means - centre
    precisions = variances.reciprocal()
    constants = log_priors - 0.5 * (variances.log() + means.square() * precisions).sum(-1)
    logits = x @ (means * precisions).mT - 0.5 * (x.square() @ precisions.mT) + constants[:, None]
    return logits.softmax(-1)


class GaussianMixtureAttention(RecurrentMixer):
    """Values are written to and read from M slots a head, by the responsibilities of M Gaussians for keys and queries.

    The affinity Σ_m γ^Q_im γᴷ_jm of two tokens is non-negative; a readout is normalised by the sum of its affinities.
    Means, diagonal variances softplus(ω) + σ_eps and prior logits are learned; at first all variances are 1 and all
    priors equal.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        D, H, bias, p = self.hidden_size, self.num_heads, config.attention_bias, self.params
        self.q_proj = nn.Linear(D, H * p.routing_dim, bias=bias)
        self.k_proj = nn.Linear(D, H * p.routing_dim, bias=bias)
        self.v_proj = nn.Linear(D, H * self.head_dim, bias=bias)
        self.means = nn.Parameter(torch.empty(H, p.num_components, p.routing_dim))
        self.raw_variances = nn.Parameter(torch.empty(H, p.num_components, p.routing_dim))
        self.prior_logits = nn.Parameter(torch.empty(H, p.num_components))
        self.o_proj = nn.Linear(H * self.head_dim, D, bias=self.output_bias)

    def init_parameters(self) -> None:
        """Means normal, variances one, priors equal."""
        init.normal_(self.means, mean=0.0, std=self.params.init_mean_std)
        init.constant_(self.raw_variances, math.log(math.expm1(1.0 - self.params.sigma_eps)))
        init.zeros_(self.prior_logits)

    def project(self, x: Tensor, rows: Rows) -> States:
        variances = F.softplus(at_least_fp32(self.raw_variances)) + self.params.sigma_eps
        mixture = at_least_fp32(self.means), variances, at_least_fp32(self.prior_logits).log_softmax(-1)
        q, k = (at_least_fp32(split_heads(proj(x), self.num_heads)) for proj in (self.q_proj, self.k_proj))
        return {
            "query": responsibilities(q, *mixture).transpose(1, 2),
            "key": responsibilities(k, *mixture).transpose(1, 2),
            "value": self.v_proj(x).unflatten(-1, (self.num_heads, self.head_dim)),
        }

    def scan(self, inputs: States, states: States, run: Run) -> tuple[Tensor, States]:
        lengths = run.lengths
        Γ_Q, Γ_K, v = (zero_beyond(inputs[name], lengths).transpose(1, 2) for name in ("query", "key", "value"))
        v, state = at_least_fp32(v), states.get("state")
        v_1 = F.pad(v, (0, 1), value=1.0)  # the denominators' sums are one more value channel
        if run.sequential:
            if state is None:
                state = v_1.new_zeros(*v.shape[:2], Γ_K.shape[-1], v_1.shape[-1])
            numerator, denominator, V, Z = eager_gma(Γ_Q, Γ_K, v, state[..., :-1], state[..., -1])
            readout, state = torch.cat([numerator, denominator[..., None]], -1), torch.cat([V, Z[..., None]], -1)
        else:
            readout, state = decayed_scan(Γ_Q, Γ_K, v_1, initial_state=state, output_final_state=True)
        if run.exclude_own:
            readout = readout - (Γ_Q * Γ_K).sum(-1, keepdim=True) * v_1
        assert state is not None
        return readout.transpose(1, 2), {"state": state}

    def finish(self, readout: Tensor, x: Tensor) -> Tensor:
        output = readout[..., :-1] / (readout[..., -1:] + self.params.eps)
        return self.o_proj(output.flatten(2).to(x.dtype))
