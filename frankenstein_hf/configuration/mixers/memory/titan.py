"""Spec of `titan`: windowed attention beside a neural memory that learns at test time."""

from dataclasses import dataclass, replace
from typing import Any, Self

from ...component import ATTENTION_PROJECTIONS, MixerSpec, Params, param


@dataclass(frozen=True, kw_only=True)
class TitanParams(Params):
    """Parameters of `titan`."""

    window_size: int = param(256, "keys a causal query of the attention sees at most", minimum=1)
    memory: str = param("mlp", "what each head's memory is", choices=("mlp", "linear", "none"))
    memory_depth: int = param(2, "weight matrices of an 'mlp' memory, SiLU between them", minimum=1)
    chunk_size: int = param(64, "tokens whose gradients are all taken at the memory of the first", minimum=1)
    gate: bool = param(True, "SiLU gate on what the memory recalls")
    use_short_conv: bool = param(False, "short causal convolutions behind the projections, as in the paper")
    conv_kernel: int = param(4, "taps of the short convolutions", minimum=1)
    persistent_tokens: int = param(
        0, "learned tokens in front of every document, always visible and learned by the memory first", minimum=0
    )
    max_step: float | None = param(
        None,
        "largest θ/(1 − η); 1/(2 chunk_size) by default, up to which a linear memory is stable whatever the tokens",
        minimum=0.0,
    )
    max_gradient: float | None = param(
        None, "longest gradient of one token's loss, longer ones are cut; 4 √head_dim by default", minimum=1e-6
    )

    # what the attention to a window reads, see `swa`
    @property
    def num_sinks(self) -> int:
        """The persistent tokens stay visible."""
        return self.persistent_tokens

    @property
    def reach(self) -> int:
        """Keys of the sliding part."""
        return self.window_size

    @property
    def depth(self) -> int:
        """Weight matrices of a memory."""
        return {"mlp": self.memory_depth, "linear": 1, "none": 0}[self.memory]

    def resolve(self, config: Any, explicit: frozenset[str]) -> Self:
        if self.memory != "mlp" and "memory_depth" in explicit and self.memory_depth != self.depth:
            raise ValueError(f"memory_depth={self.memory_depth} needs memory='mlp'; it is {self.memory!r}.")
        step = 0.5 / self.chunk_size if self.max_step is None else self.max_step
        longest = 4.0 * config.head_dim**0.5 if self.max_gradient is None else self.max_gradient
        return replace(self, memory_depth=max(1, self.depth), max_step=step, max_gradient=longest)


def _state_floats(params: TitanParams, config: Any) -> int:
    ring = 2 * (params.window_size + params.num_sinks) * config.num_key_value_heads * config.head_dim
    memory = params.depth * config.num_attention_heads * config.head_dim**2
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    heads += 3 * config.num_attention_heads if params.depth else 0
    tails = heads * config.head_dim * (params.conv_kernel - 1) if params.use_short_conv else 0
    return ring + 3 * memory + tails  # the memory at the chunk's start, now, and its momentum


SPECS = (
    MixerSpec(
        name="titan",
        aliases=("titans",),
        family="memory",
        summary="Windowed attention plus a memory trained at test time by gradient descent with momentum.",
        reference="Titans: Learning to Memorize at Test Time, arXiv 2501.00663",
        params=TitanParams,
        implementation="mixers.memory.titan:Titan",
        transfer=ATTENTION_PROJECTIONS,
        qk_norm=True,
        cache=frozenset({"ring", "state"}),
        state_size=_state_floats,
        logits=("q_proj", "k_proj"),
        reach=lambda params: params.reach // 2 if params.memory == "none" else None,
        small_params={"window_size": 5, "chunk_size": 4},
    ),
)
