"""`ode`: a layer as the numerical integration of dh/dt = attention(norm(h)).

Shapes: B batch, T time, D model width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...attention_backends import dense_attention, dense_max_logits
from ...context import SequenceContext
from ...extras import LayerExtras
from ...positions import apply_rotary
from ..base import merge_heads, split_heads
from ..dense.standard import StandardAttention

Function = Callable[[Tensor], Tensor]


def eager_ode(h_0: Tensor, f: Function, steps: int, solver: str, gate: Function | None) -> Tensor:
    """h_{n+1} = h_n + Δt/6 (k₁ + 2k₂ + 2k₃ + k₄), or h_n + Δt k₁ for "euler"; Δt = 1/steps.

    With a gate g = σ(W[k₁, k₂, k₃, k₄]) the step is Δt (g k₁ + (1 − g) k₂). Returns h_steps − h_0 [B, T, D].
    """
    Δt, change = 1.0 / steps, torch.zeros_like(h_0)
    for _ in range(steps):
        h = h_0 + change
        k_1 = f(h)
        if solver == "euler":
            change = change + Δt * k_1
            continue
        k_2 = f(h + Δt / 2 * k_1)
        k_3 = f(h + Δt / 2 * k_2)
        k_4 = f(h + Δt * k_3)
        if gate is None:
            change = change + Δt / 6 * (k_1 + 2 * k_2 + 2 * k_3 + k_4)
        else:
            g = gate(torch.cat([k_1, k_2, k_3, k_4], dim=-1)).sigmoid()
            change = change + Δt * (g * k_1 + (1 - g) * k_2)
    return change


class ODEAttention(StandardAttention):
    """`standard` evaluated at every stage of a Runge-Kutta or Euler solver, with the same weights (arXiv 2203.09176).

    A stage attends to the same stage of the earlier tokens, so the cache holds keys and values per stage.
    """

    plain_cache = False  # a pair for every stage

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.gate_proj = nn.Linear(4 * self.hidden_size, self.hidden_size) if self.params.gate else None

    def input_norm(self, x: Tensor) -> Tensor:
        """The stream comes as it is: every stage norms its own state."""
        return x

    def forward(
        self, hidden_states: Tensor, context: SequenceContext, cache: Any = None
    ) -> tuple[Tensor, LayerExtras | None]:
        """Residual stream [B, T, D] -> its change.

        Attention weights, where asked for, are those of the first stage; the largest logits those of any stage.
        """
        layer = None if cache is None else cache.layers[self.layer_idx]
        if layer is not None:
            layer.count(context.keep, context.all_real)
        rotary = context.rotary(self.head_dim)
        stages: list[Tensor | None] = []
        largest: list[Tensor] = []
        dropout = self.config.attention_dropout if self.training else 0.0

        def f(h: Tensor) -> Tensor:
            x = self.normed(h)
            query = split_heads(self.q_proj(x), self.num_heads)
            key = split_heads(self.k_proj(x), self.num_key_value_heads)
            query, key = self.norm_heads(query, key)
            query, key = apply_rotary(query, *rotary), apply_rotary(key, *rotary)
            value = split_heads(self.v_proj(x), self.num_key_value_heads)
            if layer is not None:
                key = layer.extend(f"key_{len(stages)}", key)
                value = layer.extend(f"value_{len(stages)}", value)
            output, weights = dense_attention(self, query, key, value, context, scale=self.scaling, dropout=dropout)
            stages.append(weights)
            if (maximum := dense_max_logits(query, key, context, self.scaling)) is not None:
                largest.append(maximum)
            output = self.o_proj(merge_heads(output))
            # a pad's stream is zero, where the norm is steep: over many stages its gradient would overflow
            return output if context.all_real else output.masked_fill(~context.keep[..., None], 0.0)

        change = eager_ode(hidden_states, f, self.params.steps, self.params.solver, self.gate_proj)
        return change, LayerExtras(
            stages[0] if context.output_attentions else None,
            max_logits=torch.stack(largest).amax(0) if largest else None,
        )
