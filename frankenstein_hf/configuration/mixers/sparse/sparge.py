"""Specs of attention that is dense in training and sparse in evaluation: `sparge` and `fasa`."""

from dataclasses import dataclass, replace
from typing import Any, Self

from transformers.utils import logging

from ...component import ATTENTION_PROJECTIONS, MixerSpec, Params, param
from ..dense.standard import kv_floats

logger = logging.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class SpargeParams(Params):
    """Parameters of `sparge`."""

    block_size: int = param(64, "keys of a block that is skipped or not", minimum=1)
    threshold: float = param(
        0.01, "predicted part of the attention below which a block is skipped", minimum=0, maximum=1
    )


@dataclass(frozen=True, kw_only=True)
class FASAParams(Params):
    """Parameters of `fasa`."""

    num_tip: int = param(16, "frequency chunks that predict which tokens matter", minimum=1)
    num_fac: int = param(256, "tokens a query attends to", minimum=1)
    chunks: tuple[tuple[tuple[int, ...], ...], ...] | None = param(
        None, "by layer and head, the chunks that predict (see calibrate_fasa); None: those of the lowest frequencies"
    )
    importance: str = param(
        "softmax",
        "what is added up over the chunks: each one's softmax over the tokens, or the bare logits, which cost less",
        choices=("softmax", "logits"),
    )

    def resolve(self, config: Any, explicit: frozenset[str]) -> Self:
        available = config.head_dim // 2
        if available < 1:
            raise ValueError("it needs rotary frequencies: head_dim must be at least 2.")
        if self.chunks is not None:
            shape = (config.num_hidden_layers, config.num_attention_heads)
            fits = len(self.chunks) == shape[0] and all(len(heads) == shape[1] for heads in self.chunks)
            if not fits or not all(0 <= c < available for layer in self.chunks for head in layer for c in head):
                raise ValueError(
                    f"chunks must hold, for each of {shape[0]} layers and {shape[1]} heads, numbers from 0 to "
                    f"{available - 1}; calibrate again for this model."
                )
        if self.num_tip <= available:
            return self
        if "num_tip" in explicit:
            raise ValueError(
                f"num_tip={self.num_tip} exceeds the {available} frequencies of head_dim={config.head_dim}."
            )
        logger.debug("fasa: num_tip shrinks to the %d frequencies of a head", available)
        return replace(self, num_tip=available)


COMMON: dict[str, Any] = dict(
    family="sparse", cache=frozenset({"kv"}), token_size=kv_floats, parameter_free=lambda params: True
)

SPECS = (
    MixerSpec(
        name="sparge",
        summary="Softmax attention, dense in training; in evaluation blocks of keys that would get little are skipped.",
        reference="SpargeAttn: Accurate Sparse Attention Accelerating Any Model Inference, arXiv 2502.18137",
        params=SpargeParams,
        implementation="mixers.sparse.sparge:SpargeAttention",
        transfer=ATTENTION_PROJECTIONS,
        qk_norm=True,
        small_params={"block_size": 3, "threshold": 0.1},
        reach=lambda params: 1,
        **COMMON,
    ),
    MixerSpec(
        name="fasa",
        summary="Softmax attention, dense in training; in evaluation to the tokens that a few frequencies point to.",
        reference="FASA: Frequency-aware Sparse Attention, arXiv 2602.03152",
        params=FASAParams,
        implementation="mixers.sparse.fasa:FrequencyAwareAttention",
        transfer=ATTENTION_PROJECTIONS,
        qk_norm=True,
        small_params={"num_tip": 1, "num_fac": 10},
        reach=lambda params: 1,
        **COMMON,
    ),
)
