"""Tiny models of every host, with options that are not the defaults and weights of every size."""

from typing import Any

import torch

from frankenstein_hf.transplant.host import HOSTS

SMALL = dict(
    vocab_size=61, hidden_size=24, intermediate_size=28, num_hidden_layers=3, num_attention_heads=4,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
GROUPED = SMALL | dict(num_key_value_heads=2)
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
LLAMA3 = dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=32)
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}
SLIDING = dict(use_sliding_window=True, sliding_window=5)

# model_type -> configurations
CASES: dict[str, list[dict[str, Any]]] = {
    "llama": [
        GROUPED | dict(attention_bias=True, mlp_bias=True, head_dim=10, rope_parameters=LLAMA3, rms_norm_eps=1e-3),
        SMALL | dict(tie_word_embeddings=True, hidden_act="gelu", rope_parameters=YARN),
    ],
    "mistral": [
        GROUPED | dict(sliding_window=5, head_dim=8, rope_parameters=LINEAR),
        GROUPED | dict(sliding_window=None, hidden_act="gelu_new", tie_word_embeddings=True),
    ],
    "qwen2": [
        GROUPED | SLIDING | dict(max_window_layers=1, rms_norm_eps=1e-4, tie_word_embeddings=True),
        GROUPED | dict(head_dim=10, rope_parameters=LINEAR),
    ],
    "qwen3": [
        GROUPED | SLIDING | dict(attention_bias=True, head_dim=10, rms_norm_eps=1e-3,
                                 layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
        GROUPED | dict(head_dim=6, tie_word_embeddings=True, rope_parameters=YARN),
    ],
    "olmo2": [
        GROUPED | dict(attention_bias=True, rope_parameters=YARN, rms_norm_eps=1e-3),
        SMALL | dict(head_dim=10, tie_word_embeddings=True, hidden_act="gelu"),
    ],
    "olmo3": [
        GROUPED | dict(sliding_window=5, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                       rope_parameters={"full_attention": LINEAR, "sliding_attention": LINEAR}),
        GROUPED | dict(attention_bias=True, layer_types=["full_attention"] * 3,
                       rope_parameters={"full_attention": YARN, "sliding_attention": LINEAR}),
    ],
    "phi3": [
        GROUPED | dict(sliding_window=5, rope_parameters={"rope_theta": 100.0, "partial_rotary_factor": 0.67,
                                                          "rope_type": "default"}),
        SMALL | dict(tie_word_embeddings=True, rms_norm_eps=1e-3),
    ],
    "stablelm": [
        GROUPED | dict(use_qkv_bias=True, layer_norm_eps=1e-3,
                       rope_parameters={"rope_theta": 100.0, "partial_rotary_factor": 0.67, "rope_type": "default"}),
    ],
    "gpt_neox": [
        SMALL | dict(layer_norm_eps=1e-3, hidden_act="gelu_new",
                     rope_parameters={"rope_theta": 100.0, "partial_rotary_factor": 0.67, "rope_type": "default"}),
        SMALL | dict(use_parallel_residual=False, attention_bias=False, tie_word_embeddings=True,
                     rope_parameters={"rope_theta": 100.0, "partial_rotary_factor": 1.0, "rope_type": "default"}),
    ],
    "granite": [
        GROUPED | dict(embedding_multiplier=3.0, residual_multiplier=0.3, attention_multiplier=0.1, logits_scaling=6.0,
                       attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3),
        SMALL | dict(head_dim=10, tie_word_embeddings=True),
    ],
    "eurobert": [
        GROUPED | dict(attention_bias=True, head_dim=10, mask_token_id=3, rope_parameters=LINEAR),
        SMALL | dict(tie_word_embeddings=True, hidden_act="gelu", mask_token_id=60),
    ],
}  # fmt: skip
EVERY = [(name, i) for name, cases in CASES.items() for i in range(len(cases))]
# one configuration of each where the second would show nothing that logits and gradients do not
FIRST = [(name, 0) for name in CASES]
DECODERS = [(name, i) for name, i in FIRST if HOSTS[name].causal]


def make_host(name: str, case: int = 0, head: str | None = None, **changes: Any) -> Any:
    """A model of the host in eval mode; its first head that is no bare stack, if none is named."""
    host = HOSTS[name]
    head = head or next(theirs for theirs, ours in host.heads.items() if ours != "FrankensteinModel")
    torch.manual_seed(0)
    config = host.config_class()(**CASES[name][case] | changes)
    model = host.model_class(head)._from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()
