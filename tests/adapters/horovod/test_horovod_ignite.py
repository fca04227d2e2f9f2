"""pytorch-ignite, a package that imports horovod by itself, trains under `multiring run --horovod`."""

from __future__ import annotations

import pytest

from tests.support import run_job

SCRIPT = """
import ignite.distributed as idist
import torch
from ignite.engine import Engine, create_supervised_evaluator
from ignite.metrics import Accuracy, Loss

loss_of = torch.nn.functional.cross_entropy
generator = torch.Generator().manual_seed(0)
x = torch.randn(120, 10, generator=generator)
y = (x @ torch.randn(10, 3, generator=generator)).argmax(1)
data = torch.utils.data.TensorDataset(x, y)


def fit(model, optimizer, loader, epochs):
    def step(engine, batch):
        optimizer.zero_grad()
        loss_of(model(batch[0]), batch[1]).backward()
        optimizer.step()

    Engine(step).run(loader, max_epochs=epochs)
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def made(seed):
    torch.manual_seed(seed)
    return torch.nn.Linear(10, 3)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(local_rank):
    rank, size = idist.get_rank(), idist.get_world_size()
    assert (idist.backend(), local_rank, idist.get_nnodes()) == ("horovod", rank, 1)

    model = idist.auto_model(made(rank))  # broadcasts that of rank 0
    loader = idist.auto_dataloader(data, batch_size=12, shuffle=False)
    together = fit(model, idist.auto_optim(sgd(model)), loader, 3)
    alone = made(0)
    expected = fit(alone, sgd(alone), torch.utils.data.DataLoader(data, batch_size=12), 3)
    torch.testing.assert_close(together, expected, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(each, together) for each in idist.all_gather(together[None]))

    metrics = {"accuracy": Accuracy(), "loss": Loss(loss_of)}
    seen = create_supervised_evaluator(model, metrics).run(loader).metrics
    with torch.no_grad():
        logits = alone(x)
    assert abs(seen["accuracy"] - (logits.argmax(1) == y).double().mean().item()) < 1e-6
    assert abs(seen["loss"] - loss_of(logits, y).item()) < 1e-5

    assert idist.all_reduce(rank + 1) == size * (size + 1) / 2
    assert idist.all_gather(f"rank {rank}") == [f"rank {each}" for each in range(size)]
    assert idist.broadcast("text" if rank == 1 else None, src=1, safe_mode=True) == "text"
    if size > 2:
        pair = idist.new_group([0, 2])
        if rank in (0, 2):
            assert idist.all_gather(torch.tensor([rank]), group=pair).tolist() == [0, 2]
    idist.barrier()


with idist.Parallel(backend="horovod") as parallel:
    parallel.run(train)
print("done")
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_ignite_trains_as_one_process_does(ranks: int) -> None:
    done = run_job(ranks, SCRIPT, launcher_args=["--horovod"], timeout=120.0, code=0)
    assert done.stdout.count("done") == ranks
