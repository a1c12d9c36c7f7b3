"""QK-clip: query and key weights rescaled after a step until no attention logit exceeds a threshold; MuonClip."""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from transformers.utils import logging

from ..configuration.component import Params, param
from .low_precision import REMAINDER
from .matrix_method import FALLBACK
from .muon import Muon, MuonParams
from .spec import OptimizerSpec, StabilizerSpec, floats, or_adamw
from .stabilizer import ScoreLayer, Stabilizer

logger = logging.get_logger(__name__)

CACHE = 3  # place of `cache` among the arguments of the stack


@dataclass(frozen=True, kw_only=True)
class QKClipParams(Params):
    """Parameters of `qk_clip`."""

    tau: float = param(100.0, "τ, the largest logit allowed", minimum=1e-6)
    alpha: float = param(0.5, "α, share of the rescaling that goes to the queries", minimum=0.0, maximum=1.0)


class QKClip(Stabilizer):
    """After every step, for every head h with the largest logit S_h of the batches since the last step
    (Kimi K2, arXiv 2507.20534, section 2.1):

        γ_h = min(1, τ / S_h);  W_q^h ← γ_h^α W_q^h;  W_k^g ← (min_{h reads g} γ_h)^(1−α) W_k^g

    Grouped keys are divided by what their worst query head asks for, so no logit shrinks by less than its own γ_h.
    Biases are rescaled with their rows. Where keys are values too (`memory`), the queries take all of γ_h.

    S_h is over visible pairs of real tokens, scaled and before any mask; the forward passes of a model in training mode
    record it, with the weights as they were before the step. Heads below τ keep their weights to the bit. Processes
    agree on the largest S_h. A maximum that is not finite, as of a step that loss scaling will skip, changes nothing.
    Nothing outlives a step, so nothing is saved. A method that evaluates several candidates in a step counts all of
    them. Hooks do the work: a copy of the optimizer has none, and a model that was compiled and trained before does not
    see them, which a warning says.
    """

    name = "qk_clip"

    def __init__(self, model: nn.Module, params: QKClipParams) -> None:
        super().__init__(model, params)
        self._largest: dict[tuple[int, int], Tensor] = {}  # by id of the stack and number of the layer

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        for base in {id(layer.base): layer.base for layer in self.layers}.values():
            handles = (
                base.register_forward_pre_hook(self._ask, with_kwargs=True),
                base.register_forward_hook(self._record, with_kwargs=True),
            )
            for handle in handles:  # the model may well outlive the optimizer
                weakref.finalize(optimizer, handle.remove)
        optimizer.register_step_post_hook(self._clip)

    def _ask(self, base: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        cache = args[CACHE] if len(args) > CACHE else kwargs.get("cache", kwargs.get("past_key_values"))
        if not base.training or cache is not None:
            return None
        return args, {**kwargs, "output_max_logits": True}

    def _record(self, base: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if not (base.training and kwargs.get("output_max_logits")):
            return
        for layer, new in enumerate(output[-1]):  # the last field, of tuples too
            if new is not None:
                old = self._largest.get((id(base), layer))
                self._largest[id(base), layer] = new if old is None else torch.maximum(old, new)

    @torch.no_grad()
    def _clip(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._largest:
            logger.warning_once(
                "qk_clip saw no forward pass in training mode before this step, so it clips nothing. A model that was "
                "compiled and called before must be compiled anew (torch.compiler.reset()) once its optimizer is there."
            )
        nothing = torch.tensor(-torch.inf)
        maxima = [
            self._largest.get((id(layer.base), layer.index), nothing).to(layer.query.weight.device).expand(heads(layer))
            for layer in self.layers
        ]
        self._largest = {}
        for layer, largest in zip(self.layers, agreed(maxima)):
            gamma = torch.where((largest > self.params.tau) & largest.isfinite(), self.params.tau / largest, 1.0)
            alpha = self.params.alpha if "k_proj" in layer.scaled else 1.0
            rescale(optimizer, layer.query, gamma**alpha)
            if "k_proj" in layer.scaled:
                groups = layer.key.out_features // (layer.query.out_features // len(gamma))
                rescale(optimizer, layer.key, gamma.view(groups, -1).amin(1) ** (1 - alpha))


def heads(layer: ScoreLayer) -> int:
    """H, query heads of a layer."""
    return layer.mixer.num_heads  # type: ignore[return-value]


def agreed(maxima: list[Tensor]) -> list[Tensor]:
    """The largest over all processes."""
    if not distributed.is_initialized():
        return maxima
    together = torch.cat([x.to(maxima[0].device, torch.float64) for x in maxima])
    distributed.all_reduce(together, distributed.ReduceOp.MAX)
    parts = together.split([len(x) for x in maxima])
    return [part.to(x.device, x.dtype) for part, x in zip(parts, maxima)]


def rescale(optimizer: torch.optim.Optimizer, projection: nn.Linear, factors: Tensor) -> None:
    """Multiply the rows of each head by its factor [heads], also in states of the optimizer that are weights."""
    for p in (projection.weight, projection.bias):
        if p is None:
            continue
        state = optimizer.state.get(p, {})
        copies = [state[name] for name in (REMAINDER, *getattr(optimizer, "iterates", ())) if name in state]
        for tensor in (p, *copies):
            rows = tensor.view(len(factors), -1)
            rows.mul_(factors[:, None])


@dataclass(frozen=True, kw_only=True)
class MuonClipParams(MuonParams):
    """Parameters of `muon_clip`: those of `muon` and of `qk_clip`."""

    tau: float = param(100.0, "τ, the largest attention logit allowed", minimum=1e-6)
    alpha: float = param(0.5, "α, share of the rescaling that goes to the queries", minimum=0.0, maximum=1.0)


class MuonClip(Muon):
    """Muon; `create_optimizer` adds `qk_clip`, for which it needs the model."""

    params_class = MuonClipParams


STABILIZER_SPECS = (
    StabilizerSpec(
        name="qk_clip",
        family="stabilizer",
        summary="After each step, heads whose largest attention logit exceeds τ have query and key weights rescaled.",
        reference="Kimi K2: Open Agentic Intelligence, arXiv 2507.20534",
        params=QKClipParams,
        implementation="qk_clip:QKClip",
    ),
)

SPECS = (
    OptimizerSpec(
        name="muon_clip",
        family="orthogonal",
        summary="Muon with qk_clip: no attention logit stays above τ.",
        reference="Kimi K2: Open Agentic Intelligence, arXiv 2507.20534",
        params=MuonClipParams,
        implementation="qk_clip:MuonClip",
        state_bytes=or_adamw(floats(1)),
        fallback=FALLBACK,
        stabilizers=("qk_clip",),
    ),
)
