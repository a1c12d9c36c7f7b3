"""Gated attention: `gated_softmax` beside transformers' Qwen3-Next attention."""

import pytest
import torch
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

from frankenstein_hf.modeling.positions import RotaryEmbedding

from ..tiny import assert_near
from .run import make_mixer, run

H, W, D, T = 2, 10, 20, 13


def test_gated_softmax_is_the_attention_of_qwen3_next_without_its_norms():
    config = Qwen3NextConfig(
        hidden_size=D, num_attention_heads=H, num_key_value_heads=1, head_dim=W, attn_implementation="eager"
    )
    theirs = Qwen3NextAttention(config, 0).double().eval()
    theirs.q_norm = theirs.k_norm = torch.nn.Identity()
    ours = make_mixer("gated_softmax")
    query, gate = (x.reshape(H * W, D) for x in theirs.q_proj.weight.detach().view(H, 2 * W, D).chunk(2, dim=1))
    weights = {f"{name}_proj.weight": getattr(theirs, f"{name}_proj").weight for name in "kvo"}
    ours.load_state_dict(weights | {"q_proj.weight": query, "g_proj.weight": gate})
    x = torch.randn(2, T, D, dtype=torch.float64)
    rotary = RotaryEmbedding(ours.config)(torch.arange(T)[None], W)
    mask = torch.full((T, T), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    assert_near(run(ours, x), theirs(x, rotary, mask)[0], rtol=1e-5, atol=1e-6)  # their softmax is one of fp32


@pytest.mark.parametrize("is_causal", [True, False])
def test_gated_softmax_with_one_gate_a_head_scales_heads_of_standard(is_causal):
    gated, standard = make_mixer("gated_softmax", {"gate": "headwise"}), make_mixer("standard")
    weights = gated.state_dict()
    gate = weights.pop("g_proj.weight")
    x = torch.randn(2, T, D, dtype=torch.float64)
    heads = []
    for h in range(H):  # through o_proj one head at a time
        alone = torch.zeros(D, H, W, dtype=torch.float64)
        alone[:, h] = weights["o_proj.weight"].view(D, H, W)[:, h]
        standard.load_state_dict(weights | {"o_proj.weight": alone.flatten(1)})
        heads.append(torch.sigmoid(x @ gate[h])[..., None] * run(standard, x, is_causal))
    assert_near(run(gated, x, is_causal), sum(heads), rtol=1e-9, atol=1e-9)
