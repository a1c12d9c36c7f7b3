"""Call one mixer on its own: a plain batch, no pads, no cache."""

import torch

from frankenstein_hf.configuration.registries import MIXERS
from frankenstein_hf.modeling.context import Batch, make_context
from frankenstein_hf.modeling.implementations import implementation
from frankenstein_hf.modeling.positions import RotaryEmbedding

from ..tiny import tiny_config


def make_mixer(name: str, params: dict | None = None, seed: int = 0, **changes):
    """A mixer in fp64 with random weights everywhere, norms and biases included."""
    if params is not None:
        changes["mixer_params"] = {name: params}
    config = tiny_config(name, **changes)
    config._attn_implementation = "sdpa"
    torch.manual_seed(seed)
    mixer = implementation(MIXERS.get(name))(config, 0)
    for module in mixer.modules():
        if hasattr(module, "init_parameters"):
            module.init_parameters()
    for key, parameter in mixer.named_parameters():
        if key.endswith("weight") or key.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.4)
    return mixer.double().eval()


def plain_context(mixer, x: torch.Tensor, is_causal: bool = True, backend: str = "sdpa", input_ids=None):
    return make_context(
        Batch.like(x, input_ids=input_ids),
        is_causal=is_causal,
        backend=backend,
        rotary_function=RotaryEmbedding(mixer.config),
    )


def run(mixer, x: torch.Tensor, is_causal: bool = True, backend: str = "sdpa", input_ids=None) -> torch.Tensor:
    return mixer(x, plain_context(mixer, x, is_causal, backend, input_ids))[0]


def numpy_weights(mixer) -> dict:
    return {key: value.detach().numpy() for key, value in mixer.named_parameters()}
