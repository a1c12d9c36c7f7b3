"""Two processes, each with half of the batch, do the same as one with all of it."""

import pytest
import torch
from torch import distributed, nn

import frankenstein_hf as fhf
from frankenstein_hf.optim.curvature import gauss_newton_bartlett, hutchinson
from frankenstein_hf.optim.exact_state import seeded_generator
from frankenstein_hf.optim.spec import OPTIMIZERS

from .toy import batches, language_model, small, step

NAMES = [spec.name for spec in OPTIMIZERS if spec.gradient and not spec.closure and not spec.stabilizers]
CLOSURES = [spec.name for spec in OPTIMIZERS if spec.closure]
STABILIZED = {
    "adamw": {"lr": 0.01, "stabilizers": {"qk_clip": {"tau": 0.2}, "quack": {"tau": 0.9}}},
    **{spec.name: {"tau": 0.2} for spec in OPTIMIZERS if spec.stabilizers},
}
ESTIMATES = {"gauss_newton": gauss_newton_bartlett, "hutchinson": hutchinson}
STEPS = 5


def run(name, wrap, rows):
    """Weights after a few steps of a small model in double precision, on `rows` of each batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 11)).double()
    optimizer = fhf.create_optimizer(model, name, **small(name))
    parallel = wrap(model)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randint(11, (8,), generator=generator)[rows]
        step(name, optimizer, lambda x=x: nn.functional.cross_entropy(parallel(x), (x * 3) % 11))
    return [p.detach().clone() for p in model.parameters()]


def run_stabilized(name, wrap, rows):
    """The same of a language model whose attention logits are bounded."""
    model = language_model(initializer_range=0.3).double().train()
    optimizer = fhf.create_optimizer(model, name, **STABILIZED[name])
    parallel = wrap(model)
    for x in batches(STEPS):
        step(name, optimizer, lambda x=x[rows]: parallel(x, labels=x).loss)
    return [p.detach().clone() for p in model.parameters()]


def estimate(estimator, rows, by_hand=None):
    """Sophia's curvature after one estimate; without an optimizer: the estimate of process number `by_hand`."""
    model, x = language_model(initializer_range=0.3).double(), batches(1)[0][rows]
    inputs = {"input_ids": x, "labels": x}
    optimizer = fhf.create_optimizer(model, "sophia", estimator=estimator, betas=(0.9, 0.6), seed=3)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if by_hand is not None:
        found = ESTIMATES[estimator](model, inputs, params, seeded_generator(3, 7, by_hand))
        return [torch.zeros_like(p) if h is None else h for p, h in zip(params, found)]
    model(**inputs).loss.backward()
    optimizer.estimate(model, inputs, 7)
    return [optimizer.state[p]["h"] for p in params]


def work(rank, folder):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    rows, half = slice(4 * rank, 4 * rank + 4), slice(2 * rank, 2 * rank + 2)
    wrap = nn.parallel.DistributedDataParallel
    results = {name: run(name, wrap, rows) for name in NAMES}
    # transformers' Trainer hands closures the model without its wrapper
    results |= {name: run(name, lambda model: model, rows) for name in CLOSURES}
    results |= {f"{name}, wrapped": run(name, wrap, rows) for name in CLOSURES}
    results |= {f"{name}, stabilized": run_stabilized(name, wrap, half) for name in STABILIZED}
    results |= {estimator: estimate(estimator, half) for estimator in ESTIMATES}
    torch.save(results, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    torch.multiprocessing.spawn(work, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def assert_all_equal(both, key, alone):
    for first, second, expected in zip(both[0][key], both[1][key], alone):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_equal_one(name, both):
    assert_all_equal(both, name, run(name, lambda model: model, slice(None)))


@pytest.mark.parametrize("wrapped", ["", ", wrapped"])
@pytest.mark.parametrize("name", CLOSURES)
def test_two_processes_with_closures_equal_one(name, wrapped, both):
    assert_all_equal(both, name + wrapped, run(name, lambda model: model, slice(None)))


@pytest.mark.parametrize("name", STABILIZED)
def test_two_stabilized_processes_equal_one(name, both):
    assert_all_equal(both, f"{name}, stabilized", run_stabilized(name, lambda model: model, slice(None)))


@pytest.mark.parametrize("estimator", ESTIMATES)
def test_curvature_is_the_mean_of_the_processes_own_estimates(estimator, both):
    halves = [estimate(estimator, slice(2 * rank, 2 * rank + 2), by_hand=rank) for rank in range(2)]
    assert_all_equal(both, estimator, [0.4 * (first + second) / 2 for first, second in zip(*halves)])
    assert not any(torch.equal(*pair) for pair in zip(*halves))
