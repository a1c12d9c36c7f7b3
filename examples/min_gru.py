"""A mixer of one's own in one file: minGRU (Feng et al., Were RNNs All We Needed?, arXiv 2410.01201).

Importing the file registers the mixer; `layer_pattern` accepts "min_gru" from then on. Since the file imports only
torch, the standard library and public names of frankenstein_hf, `save_pretrained` takes it along with a checkpoint.

Shapes: R rows (one document each), L row length, D model width, E channels of the state.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from frankenstein_hf import MixerSpec, Params, RecurrentMixer, param, register_mixer
from frankenstein_hf.modeling.mixers.base import zero_beyond
from frankenstein_hf.modeling.ops.diagonal_scan import diagonal_scan
from frankenstein_hf.modeling.ops.numerics import at_least_fp32


def eager_min_gru(z: Tensor, candidate: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """h_t = (1 − z_t) ⊙ h_{t−1} + z_t ⊙ h̃_t, token by token; z and h̃ [R, L, E], h [R, E]."""
    states = []
    for t in range(z.shape[1]):
        h = (1 - z[:, t]) * h + z[:, t] * candidate[:, t]
        states.append(h)
    return torch.stack(states, dim=1), h


@dataclass(frozen=True, kw_only=True)
class MinGRUParams(Params):
    """Parameters of `min_gru`."""

    expansion: int = param(1, "channels of the state in units of hidden_size", minimum=1, maximum=16)


class MinGRU(RecurrentMixer):
    """z = σ(W_z x), h̃ = W_h x; the states are projected back to the model's width."""

    needs_kernel = False
    traces_chunks = False

    def __init__(self, config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        channels = self.params.expansion * self.hidden_size
        self.z_proj = nn.Linear(self.hidden_size, channels)
        self.h_proj = nn.Linear(self.hidden_size, channels)
        self.o_proj = nn.Linear(channels, self.hidden_size, bias=False)

    def project(self, x: Tensor, rows) -> dict[str, Tensor]:
        """All that the state learns from the tokens, [R, L, E] each."""
        return {"gate": self.z_proj(x), "candidate": self.h_proj(x)}

    def scan(self, inputs: dict[str, Tensor], states: dict[str, Tensor], run) -> tuple[Tensor, dict[str, Tensor]]:
        """The recurrence from the states before the first token to those after the last real one."""
        gate, candidate = at_least_fp32(inputs["gate"]), at_least_fp32(inputs["candidate"])
        kept = zero_beyond(F.logsigmoid(-gate), run.lengths)  # log(1 − z): pads change nothing
        write = zero_beyond(gate.sigmoid() * candidate, run.lengths)
        if run.sequential and run.lengths is None and not run.exclude_own:
            h = states.get("state", write.new_zeros(write.shape[0], write.shape[2]))
            readout, h = eager_min_gru(gate.sigmoid(), candidate, h)
            return readout, {"state": h}
        readout, h = diagonal_scan(kept, write, initial_state=states.get("state"), sequential=run.sequential)
        return readout - write if run.exclude_own else readout, {"state": h}

    def finish(self, readout: Tensor, x: Tensor) -> Tensor:
        """Back to [R, L, D]."""
        return self.o_proj(readout.to(x.dtype))


SPEC = MixerSpec(
    name="min_gru",
    family="recurrent",
    summary="A GRU whose gate and candidate see the input alone, so that it is a linear recurrence.",
    reference="Were RNNs All We Needed?, arXiv 2410.01201",
    params=MinGRUParams,
    cache=frozenset({"state"}),
    state_size=lambda params, config: params.expansion * config.hidden_size,
)
register_mixer(SPEC, MinGRU)
