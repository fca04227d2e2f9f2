"""The pages for those who come from DDP and from Horovod: their scripts run, and what they state is so."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

import multiring.torch
from multiring import Communicator
from multiring.errors import MismatchError, TimeoutError, UsageError
from tests.adapters.torch.support import Pool
from tests.support import REPOSITORY, run_job

RESULTS = """
held = {name: value.double().sum().item() for name, value in model.state_dict().items()}
everyone = comm.allgather_object(held)
assert everyone == [everyone[0]] * comm.size, everyone
print("the ranks agree")
"""


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("page", ["coming-from-ddp", "coming-from-horovod"])
def test_the_script_of_the_page(page: str, size: int, tmp_path: Path) -> None:
    text = (REPOSITORY / "docs" / f"{page}.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    done = run_job(size, block + RESULTS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the ranks agree") == size


def collectives(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    x = torch.full((4,), float(rank + 1))
    total = size * (size + 1) / 2
    result = comm.allreduce(x)
    assert result is not x
    assert (x == rank + 1).all()
    assert (result == total).all(), "the sum is the default"
    assert comm.allreduce(x, out=x) is x
    assert (x == total).all()
    assert (comm.allreduce(torch.full((2,), float(rank)), "average") == (size - 1) / 2).all()
    assert comm.allreduce_async(torch.ones(2)).wait().tolist() == [size, size]
    y = torch.full((2,), float(rank))
    assert (comm.broadcast(y, 1) == 1).all()
    assert (y == rank).all()
    assert comm.broadcast(y, 1, out=y) is y
    joined = comm.allgather(torch.full((rank + 1, 2), float(rank)))
    assert joined[:, 0].tolist() == [float(r) for r in range(size) for _ in range(r + 1)]
    part = comm.reduce_scatter(torch.arange(2 * size + 1.0))
    assert part.tolist() == [size * (2 * rank + (rank > 0) + k) for k in range(2 + (rank == 0))]
    rows, counts = comm.alltoall(torch.full((size + 1,), float(rank)), [2] + [1] * (size - 1))
    assert rows.tolist() == [float(r) for r in range(size) for _ in range(2 if rank == 0 else 1)]
    assert counts.tolist() == [2 if rank == 0 else 1] * size
    if rank == 0:
        comm.send(torch.ones(3), 1)
    elif rank == 1:
        assert isinstance(comm.recv(0), np.ndarray)
    assert comm.broadcast_object({"rank": rank}, 1) == {"rank": 1}
    assert comm.allgather_object(rank) == list(range(size))
    pair = comm.process_set([1, 0])
    assert (pair is None) == (rank > 1)
    assert pair is None or pair.rank == 1 - rank
    with pytest.raises(UsageError, match="detach"):
        comm.allreduce(torch.ones(2, requires_grad=True))
    comm.barrier()


def test_collectives(ranks: Pool) -> None:
    ranks(3).run(collectives)


def by_name(comm: Communicator) -> None:
    queue = comm.named_queue()
    names = ["a", "b", "c"]
    works = {name: queue.allreduce_async(np.ones(2), name=name) for name in names[:: 1 - 2 * (comm.rank % 2)]}
    assert all((works[name].wait() == comm.size).all() for name in names)
    if comm.rank == 0:
        with pytest.raises(TimeoutError, match="rank 1"):
            comm.allgather(np.ones(2), timeout=0.05)


def test_names_and_deadlines(ranks: Pool) -> None:
    ranks(2).run(by_name)


def two_layers() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))


def models(comm: Communicator) -> None:
    model = two_layers()
    hooks = multiring.torch.register_gradient_hooks(model, comm)
    for step in range(2):
        with hooks.no_sync():
            part = model(torch.randn(4, 3)).sum()
        model.zero_grad()
        (part + model(torch.randn(4, 3) + comm.rank).sum()).backward()
        found = comm.allgather_object([buffer.tolist() for buffer in model.buffers()])
        assert found == [found[0]] * comm.size, "buffers are those of the first rank after backward"
        gradient = comm.allgather_object([p.grad.tolist() for p in model.parameters()])
        assert gradient == [gradient[0]] * comm.size, step
    with hooks.no_sync():
        model(torch.randn(4, 3)).sum().backward()
    model.zero_grad()
    model[2](torch.randn(4, 2)).sum().backward()  # the other parameters are not used
    assert model[0].weight.grad is None
    averages = []
    with hooks.join():
        for _ in range(comm.rank + 1):
            model.zero_grad()
            (model[2].weight.sum() * (comm.rank + 1)).backward()
            averages.append(model[2].weight.grad.flatten().tolist())
    # In step k the ranks from k on have data: what they have is averaged over these alone.
    with_data = [range(k, comm.size) for k in range(comm.rank + 1)]
    assert averages == [[np.mean([rank + 1 for rank in there])] * 2 for there in with_data]
    hooks.remove()
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    consume_prefix_in_state_dict_if_present(state, "module.")
    model.load_state_dict(state)


def test_models(ranks: Pool) -> None:
    ranks(3).run(models)


def forgotten(comm: Communicator) -> None:
    torch.manual_seed(comm.rank)
    model = torch.nn.Linear(2, 1)
    multiring.torch.register_gradient_hooks(model, comm)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()


def test_nothing_is_broadcast_by_itself(ranks: Pool) -> None:
    for error in ranks(2).run_expecting_errors(forgotten):
        assert isinstance(error, MismatchError)
        assert "at step 2" in str(error)
        assert "most likely broadcast_parameters was not called" in str(error)


def test_the_variables_of_torchrun_are_not_set() -> None:
    script = "import os\nprint([os.environ.get(n) for n in ('MULTIRING_RANK', 'RANK', 'WORLD_SIZE')])\n"
    env = {name: value for name, value in os.environ.items() if name in ("PATH",)}
    assert run_job(1, script, env=env).stdout == "['0', None, None]\n"


def accumulate(comm: Communicator, passes: int) -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = multiring.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model, comm, backward_passes_per_step=passes
    )
    model(torch.ones(1, 1)).sum().backward()
    optimizer.zero_grad()  # refused by Horovod
    for _ in range(passes):
        model(torch.full((1, 1), comm.rank + 1.0)).sum().backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    assert model.weight.item() == -passes * (comm.size + 1) / 2, "passes are added, ranks are averaged"


def test_passes_are_added(ranks: Pool) -> None:
    ranks(2).run(accumulate, 2)
