"""Two processes, each with half of the batch, do the same as one with all of it."""

import pytest
import torch
from torch import distributed, nn

import frankenstein_hf as fhf
from frankenstein_hf.optim.spec import OPTIMIZERS

from .toy import small

NAMES = [spec.name for spec in OPTIMIZERS if spec.gradient and not spec.closure]
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
        optimizer.zero_grad()
        nn.functional.cross_entropy(parallel(x), (x * 3) % 11).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def work(rank, folder):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    rows = slice(4 * rank, 4 * rank + 4)
    results = {name: run(name, nn.parallel.DistributedDataParallel, rows) for name in NAMES}
    torch.save(results, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    torch.multiprocessing.spawn(work, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_equal_one(name, both):
    alone = run(name, lambda model: model, slice(None))
    for first, second, expected in zip(both[0][name], both[1][name], alone):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, expected, rtol=1e-6, atol=1e-8)
