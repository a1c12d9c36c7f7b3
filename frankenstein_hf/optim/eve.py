"""EvE: differential evolution on a population of four, with bursts of Adam where it fails."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from ..configuration.component import param
from .evolution import ClosureMethod, averaged
from .exact_state import seeded_generator
from .low_precision import widen
from .matrices import matrix_shape
from .spec import AdamParams, OptimizerSpec, floats

SLOTS = 4


@dataclass(frozen=True, kw_only=True)
class EvEParams(AdamParams):
    """Parameters of `eve`; lr, betas, eps and weight_decay are those of its Adam bursts."""

    lr: float = param(1e-2, "η, learning rate of a burst's steps; 3 to 100 times Adam's", minimum=0.0)
    weight_decay: float = param(0.0, "λ, added to a burst's gradients as λ x", minimum=0.0)
    burst: int = param(5, "Adam steps where a child fails", minimum=1)
    difference: float = param(0.5, "F, weight of differences between slots", minimum=0.0)
    jitter: float = param(1e-4, "γ, relative width of the noise on F", minimum=0.0)
    sigma: float = param(
        0.1, "σ, deviation of the first slots from the initial weights, in widths of the box", minimum=0.0
    )
    mutate: bool = param(False, "also try every child with one number mutated")
    mutation_index: float = param(20.0, "η of the mutation; the higher the smaller", minimum=0.0)
    seed: int = param(0, "of donors and noises", minimum=0)


@dataclass
class Member:
    """A parameter that takes part, during one step.

    Attributes:
        p, group, state, position: As the optimizer keeps them.
        anchor: The initial weights.
        half: Half the width of the box around them.
    """

    p: Tensor
    group: dict[str, Any]
    state: dict[str, Any]
    position: int
    anchor: Tensor
    half: float

    def clamp(self, x: Tensor) -> Tensor:
        """`x` within the box."""
        return torch.minimum(torch.maximum(x, self.anchor - self.half), self.anchor + self.half)


Point = list[Tensor]  # a value for every member, in at least fp32


class EvE(ClosureMethod):
    """A population of four points x_1 … x_4; step t renews one, i = (t − 1) mod 4 + 1, on the batch of the step:

        f_i ← f(x_i);  x ← clamp(x_a + F_t (x_b − x_c) + F (x_pbest − x_a)),  F_t = F (1 + γ (u − ½)),  u ~ U(0, 1)
        where f(x) ≥ f_i:  `burst` steps of Adam from x with the slot's own m, v and t, each clamped; the better of both
        x_i, f_i ← x, f(x) if f(x) < f_i

    a, b, c are the other three slots in random order; pbest is the slot of least f, the values being of the batches
    they were last taken on. Between steps the parameters hold that slot. Evaluations: two forward passes where the
    child succeeds, else `burst` passes with gradients and one without more; four more in the first step.

    The box is the initial weights ± √(6/fan_in) for each tensor; fan_in is the last axis (embeddings: the width; 1-D
    tensors: their length; scalars: 1), for convolutions all axes but the first. The source's unit cube is that box
    shifted and stretched, which leaves the formulas above as they are; x_1 is its centre, the initial weights, the
    others deviate by σ of its width. Weight decay is an L2 term in Adam's gradients.

    With `mutate` a child also competes with itself after the polynomial mutation of one random number; the exponent of
    1 − δ is η + 1 as published (Deb and Goyal), not the 1/(η + 1) of the source, with which the mutation does not
    reach the border.

    A parameter takes part from when it first has a gradient. Of the slots the parameters' own is not stored; the
    initial weights stand in its place. So the state is 4 + 8 copies of the weights, and what rescales the parameters
    between steps moves the best slot. 16-bit parameters hold it as `bf16_update` says. With several processes losses
    and gradients are averaged and all decide alike.
    """

    params_class = EvEParams

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step.

        Args:
            closure: See `ClosureMethod`.

        Returns:
            The loss of the slot this step challenges, before it is renewed.

        Raises:
            RuntimeError: No closure.
        """
        closure = self.required(closure)
        shared = self.shared_state()
        shared["step"] = shared.get("step", 0) + 1
        shared.setdefault("best", 0)
        self._join()
        if not (members := self._members()):  # nobody has computed gradients yet
            self._gradients(closure)
            self._join()
            members = self._members()
        points = [self._point(members, k) for k in range(SLOTS)]
        try:
            loss = self._search(closure, members, points)
        except BaseException:
            place(members, points[shared["best"]])
            raise
        best = min(range(SLOTS), key=shared["values"].__getitem__)
        self.count_rounding()
        for n, member in enumerate(members):
            self.write(member.p, points[best][n], member.group, member.position)
            for k in range(SLOTS):
                member.state["slots"][k].copy_(member.anchor if k == best else points[k][n])
        shared["best"] = best
        return loss

    def _search(self, closure: Callable[[], Any], members: list[Member], points: list[Point]) -> float:
        """Evaluate and challenge the slot of this step; renews its point and the values."""
        shared, settings = self.shared_state(), self.param_groups[0]
        t, values = shared["step"], list(shared.get("values", ()))
        i = (t - 1) % SLOTS
        for k in [i] if values else range(SLOTS):
            place(members, points[k])
            values[k : k + 1] = [self._loss(closure)]
        loss, pbest = values[i], min(range(SLOTS), key=values.__getitem__)

        generator = seeded_generator(settings["seed"], t)
        others = [k for k in range(SLOTS) if k != i]
        a, b, c = (points[others[int(k)]] for k in torch.randperm(3, generator=generator))
        u = torch.rand((), generator=generator, dtype=torch.float64).item()
        F = settings["difference"]
        F_t = F * (1 + settings["jitter"] * (u - 0.5))
        x = [
            member.clamp(x_a + F_t * (x_b - x_c) + F * (x_p - x_a))
            for member, x_a, x_b, x_c, x_p in zip(members, a, b, c, points[pbest])
        ]
        place(members, x)
        value = self._loss(closure)
        if settings["mutate"]:
            mutant = mutated(members, x, settings["mutation_index"], generator)
            place(members, mutant)
            if (other := self._loss(closure)) < value:
                x, value = mutant, other
        if not value < values[i]:
            refined = self._burst(closure, members, x, i)
            if (other := self._loss(closure)) < value:
                x, value = refined, other
        if value < values[i]:
            points[i], values[i] = x, value
        shared["values"] = values
        return loss

    def _burst(self, closure: Callable[[], Any], members: list[Member], x: Point, i: int) -> Point:
        """Steps of Adam from `x` with the moments of slot i; the parameters are left where it ends."""
        shared, x = self.shared_state(), list(x)
        steps = list(shared.get("adam_steps", [0] * SLOTS))
        for _ in range(self.param_groups[0]["burst"]):
            place(members, x)
            self._gradients(closure)
            left_out = self.screen()
            if any(id(member.p) in left_out for member in members):  # the burst ends where gradients do
                break
            steps[i] += 1
            for n, member in enumerate(members):
                group, m, v = member.group, member.state["m"][i], member.state["v"][i]
                beta1, beta2 = group["betas"]
                g = torch.zeros_like(m) if member.p.grad is None else member.p.grad.to(m.dtype)
                g = g + group["weight_decay"] * x[n]
                m.lerp_(g, 1 - beta1)
                v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
                denominator = (v / (1 - beta2 ** steps[i])).sqrt_().add_(group["eps"])
                x[n] = member.clamp(x[n].addcdiv(m, denominator, value=-group["lr"] / (1 - beta1 ** steps[i])))
        place(members, x)
        shared["adam_steps"] = steps
        return x

    # ------------------------------------------------------------------ evaluations

    def _loss(self, closure: Callable[[], Any]) -> float:
        """The loss where the parameters are; inf where it is no number."""
        loss = averaged(self.evaluate(closure).to(torch.float64, copy=True)).item()
        return math.inf if math.isnan(loss) else loss

    def _gradients(self, closure: Callable[[], Any]) -> None:
        """Have the gradients computed there, averaged over processes."""
        with torch.enable_grad():
            closure()
        self._join()
        for p in (p for p in self.state if isinstance(p, Tensor)) if distributed.is_initialized() else ():
            p.grad = averaged(torch.zeros_like(p) if p.grad is None else p.grad)

    # ------------------------------------------------------------------ the population

    def _join(self) -> None:
        """Give a state to every parameter that has a gradient, in any process, and none yet."""
        outside = [
            (position, p, group)
            for position, (p, group) in enumerate((p, group) for group in self.param_groups for p in group["params"])
            if not self.state.get(p) and p.numel()
        ]
        if not outside:
            return
        joins = torch.tensor([float(p.grad is not None) for _, p, _ in outside], device=outside[0][1].device)
        for (position, p, group), joining in zip(outside, averaged(joins).tolist()):
            if not joining:
                continue
            x = p.detach().to(torch.promote_types(p.dtype, torch.float32))
            slots = x.expand(SLOTS, *x.shape).clone()
            member = Member(p, group, {}, position, x, half_width(p, group))
            for k in range(1, SLOTS):
                generator = seeded_generator(group["seed"], 0, k, position, device=p.device)
                noise = torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
                slots[k] = member.clamp(x + 2 * member.half * group["sigma"] * noise)
            best = self.shared_state()["best"]
            slots[0], slots[best] = slots[best].clone(), x  # late: the slot the parameters hold starts where they are
            self.state[p] = {"slots": slots, "m": torch.zeros_like(slots), "v": torch.zeros_like(slots)}

    def _members(self) -> list[Member]:
        best = self.shared_state()["best"]
        return [
            Member(p, group, self.state[p], position, self.state[p]["slots"][best].clone(), half_width(p, group))
            for position, (p, group) in enumerate((p, group) for group in self.param_groups for p in group["params"])
            if self.state.get(p) and p.requires_grad
        ]

    def _point(self, members: list[Member], k: int) -> Point:
        """Slot k; a copy where the parameters hold it."""
        if k != self.shared_state()["best"]:
            return [member.state["slots"][k] for member in members]
        return [widen(member.p, member.state).to(member.anchor.dtype, copy=True) for member in members]


def half_width(p: Tensor, group: dict[str, Any]) -> float:
    """√(6/fan_in)."""
    fan_in = matrix_shape(p.shape, group.get("layout", "stack"))[2] if p.dim() > 1 else p.numel()
    return math.sqrt(6 / fan_in)


def place(members: list[Member], x: Point) -> None:
    """Put a point into the parameters."""
    for member, value in zip(members, x):
        member.p.copy_(value)


def mutated(members: list[Member], x: Point, index: float, generator: torch.Generator) -> Point:
    """`x` with one random number moved by the polynomial mutation, within the box."""
    place_of = int(torch.randint(sum(value.numel() for value in x), (), generator=generator))
    r = torch.rand((), generator=generator, dtype=torch.float64).item()
    x = list(x)
    for n, (member, value) in enumerate(zip(members, x)):
        if place_of >= value.numel():
            place_of -= value.numel()
            continue
        x[n] = value.clone()
        z = ((value - member.anchor).flatten()[place_of].item() / member.half + 1) / 2
        z = min(max(z, 0.0), 1.0)
        if r <= 0.5:
            move = (2 * r + (1 - 2 * r) * (1 - z) ** (index + 1)) ** (1 / (index + 1)) - 1
        else:
            move = 1 - (2 * (1 - r) + 2 * (r - 0.5) * z ** (index + 1)) ** (1 / (index + 1))
        x[n].view(-1)[place_of] += 2 * member.half * move
        break
    return x


SPECS = (
    OptimizerSpec(
        name="eve",
        family="evolution",
        summary="Differential evolution on four copies of the weights, with a burst of Adam where a child fails.",
        reference="EvE (seed 001, section on evolutionary optimizers)",
        params=EvEParams,
        implementation="eve:EvE",
        state_bytes=floats(3 * SLOTS),
        needs="callback",
        callback="_supply:SupplyClosure",
        by_kind=True,
        closure=True,
        small_params={"burst": 2, "mutate": True},
    ),
)
