"""Spec of `memory`: attention whose values are keys plus a table entry per token id."""

from dataclasses import dataclass

from ...component import MixerSpec, Params, param
from ..dense.standard import kv_floats


@dataclass(frozen=True, kw_only=True)
class MemoryParams(Params):
    """Parameters of `memory`."""

    tie_tables: bool = param(False, "one table for all memory layers instead of one per layer")


SPECS = (
    MixerSpec(
        name="memory",
        family="memory",
        summary="Softmax attention whose values are the keys plus a normalised table entry per token id.",
        reference="Memory Attention (seed 001, section on token-indexed value memory)",
        params=MemoryParams,
        implementation="mixers.memory.memory:MemoryAttention",
        transfer=("q_proj", "k_proj", "o_proj"),
        qk_norm=True,
        cache=frozenset({"kv"}),
        token_size=kv_floats,
        needs_input_ids=True,
        native_mask=True,
        logits=("q_proj",),  # keys are values too
    ),
)
