"""What the base class promises to methods that build on it."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import frankenstein_hf as fhf
from frankenstein_hf.configuration.component import param
from frankenstein_hf.optim.base import CPU_CHUNK, FrankensteinOptimizer, zeros
from frankenstein_hf.optim.create import parameter_groups
from frankenstein_hf.optim.exact_state import seeded_generator
from frankenstein_hf.optim.spec import HybridParams, OptimizerSpec, below_one, floats, or_adamw

from .toy import batches, language_model, saved, train


@dataclass(frozen=True, kw_only=True)
class NoisyParams(HybridParams):
    lr: float = param(1e-2, "learning rate", minimum=0.0)
    momentum: float = below_one(0.9, "momentum")
    seed: int = param(0, "of the noise", minimum=0)


class NoisySigns(FrankensteinOptimizer):
    """Signs of the momentum with noise, for matrices only: exercises fallback, seeds and shared state."""

    params_class = NoisyParams
    needs_kind = True

    def init_state(self, p, g, group) -> dict[str, Any]:
        return {"m": zeros(p)}

    def update(self, batch, group):
        assert group["kind"] == "matrix" and all(p.dim() >= 2 for p in batch.params)
        batch.decay(group["lr"] * group["weight_decay"])
        torch._foreach_lerp_(batch["m"], batch.grads, 1 - group["momentum"])
        for i, p, m in zip(batch.positions, batch.params, batch["m"]):
            noise = torch.randn(p.shape, generator=seeded_generator(group["seed"], batch.step, i))
            p.add_((m + 0.01 * noise.to(m)).sign_(), alpha=-group["lr"])
        shared = self.shared_state()
        shared["norm"] = shared.get("norm", torch.zeros(())) + torch.stack(torch._foreach_norm(batch["m"])).sum()


SPEC = OptimizerSpec(
    name="noisy_signs",
    family="test",
    summary="-",
    reference="-",
    params=NoisyParams,
    state_bytes=or_adamw(floats(1)),
    fallback=frozenset({"table", "vector"}),
)


def noisy(model, groups=None, **values):
    settings = NoisyParams(**values)
    return NoisySigns(parameter_groups(model, SPEC, settings, groups), **settings.as_dict())


def test_matrices_and_the_rest_are_trained_by_different_methods():
    model = language_model()
    groups = {"embeddings": {"lr": 0.5, "betas": (0.1, 0.2)}, "attention": {"lr": 0.25}}
    optimizer = noisy(model, groups, weight_decay=0.1, adamw_lr=0.125)
    by_role = {group["role"]: group for group in optimizer.param_groups}
    assert {role: group.get("method") for role, group in by_role.items()} == {
        "embeddings": "adamw",
        "norms": "adamw",
        "attention": None,
        "other": None,
    }
    assert {role: group["lr"] for role, group in by_role.items()} == {
        "embeddings": 0.5,
        "norms": 0.125,
        "attention": 0.25,
        "other": 0.01,
    }
    assert by_role["embeddings"]["betas"] == (0.1, 0.2) and by_role["norms"]["betas"] == (0.9, 0.95)
    with pytest.raises(ValueError, match="group 'attention' cannot have its own 'betas'"):
        noisy(model, {"attention": {"betas": (0.1, 0.2)}})
    train("sgd", model, optimizer, batches(1))
    matrices = {id(p) for role in ("attention", "other") for p in by_role[role]["params"]}
    for p in model.parameters():
        assert set(optimizer.state[p]) == ({"step", "m"} if id(p) in matrices else {"step", "m", "v"})


def test_seeded_noise_and_shared_state_resume_exactly():
    data = batches(6)
    whole, half = language_model(), language_model()
    optimizer, first = noisy(whole), noisy(half)
    train("sgd", whole, optimizer, data)
    train("sgd", half, first, data[:3])
    second = noisy(half)
    second.load_state_dict(saved(first))
    train("sgd", half, second, data[3:])
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), half.parameters()))
    assert torch.equal(second.shared_state()["norm"], optimizer.shared_state()["norm"])


def test_plain_tensors_are_refused_where_kinds_matter():
    with pytest.raises(ValueError, match="create_optimizer"):
        NoisySigns([nn.Parameter(torch.ones(2, 2))])


def test_the_inner_adamw_equals_torch():
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(n)) for n in (CPU_CHUNK // 2, CPU_CHUNK // 2 + 1, 3, CPU_CHUNK + 5)]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    values = dict(lr=0.1, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6)
    optimizer = NoisySigns([{"params": ours, "kind": "vector", "method": "adamw", **values}])
    reference = torch.optim.AdamW(theirs, fused=True, **values)
    for _ in range(3):
        for p, q in zip(ours, theirs):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        optimizer.step()
        reference.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs))


def test_step_hooks_run_once():
    """Also for classes in front of torch's own, whose step may have been wrapped for hooks elsewhere."""
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    for name in ("adamw", "laprop"):
        w = nn.Linear(2, 2)
        optimizer = fhf.create_optimizer(w, name)
        calls: list[int] = []
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append(1))
        w(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert calls == [1]


def test_random_streams_differ_by_seed_and_counter():
    def draw(*counters):
        return tuple(torch.rand(4, generator=seeded_generator(*counters)).tolist())

    streams = [(0,), (1,), (0, 0), (0, 1), (0, 0, 1), (0, 1, 0), (1, 0)]
    assert len({draw(*s) for s in streams}) == len(streams)
    assert draw(3, 4, 5) == draw(3, 4, 5)


def test_sparse_gradients_are_refused():
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = fhf.create_optimizer(table, "laprop")
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
