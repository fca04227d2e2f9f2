"""torchft over our process group: its own tests of collectives, and a replica that is killed and replaced."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from multiring import MultiringError
from tests.support import Job

theirs = pytest.importorskip("torchft.process_group_test", reason="needs torchft and parameterized")

from multiring.torch_distributed.torchft import ProcessGroup  # noqa: E402  # needs torchft

TIMEOUT = timedelta(seconds=20)
SIZE = 3


@pytest.fixture(scope="module")
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Replicas:
    """Ranks as threads, as torchft's own tests have them."""

    def __init__(self, store: dist.TCPStore) -> None:
        self._address = f"127.0.0.1:{store.port}"
        self._threads = ThreadPoolExecutor(SIZE)
        self.groups = [ProcessGroup(TIMEOUT) for _ in range(SIZE)]

    def run(self, function: Any, size: int = SIZE) -> list[Any]:
        return list(self._threads.map(function, self.groups[:size], range(size)))

    def configure(self, name: str, size: int = SIZE) -> None:
        self.run(lambda pg, rank: pg.configure(f"{self._address}/{name}", str(rank), rank, size), size)

    def close(self) -> None:
        for group in self.groups:
            group.shutdown()
        self._threads.shutdown()


@pytest.fixture
def replicas(store: dist.TCPStore) -> Iterator[Replicas]:
    made = Replicas(store)
    yield made
    made.close()


@pytest.mark.parametrize("collective", theirs._ALL_COLLECTIVES)
def test_collectives_of_torchft(replicas: Replicas, collective: str) -> None:
    """Before and after one replica of three has left, which the others are told."""
    check = theirs._COLLECTIVE_TO_FUNC[collective]
    replicas.configure(f"{collective}/3")
    replicas.run(lambda pg, rank: check(pg, rank, torch.tensor([rank + 1])))
    assert [group.errored() for group in replicas.groups] == [None] * SIZE

    def without_the_last(pg: ProcessGroup, rank: int) -> None:
        if rank == SIZE - 1:
            return pg.shutdown()
        with pytest.raises(MultiringError, match="lost rank 2.*shut down"):
            dist.all_reduce(torch.ones(2), group=pg._pg)
        assert "lost rank 2" in str(pg.errored())
        return None

    replicas.run(without_the_last)
    replicas.configure(f"{collective}/2", 2)
    replicas.run(lambda pg, rank: check(pg, rank, torch.tensor([rank + 1])), 2)
    assert [group.errored() for group in replicas.groups[:2]] == [None, None]


def test_a_group_of_one(replicas: Replicas) -> None:
    replicas.configure("one", 1)
    group = replicas.groups[0]
    theirs._test_pg(group)
    assert group.size() == 1
    parallel = nn.parallel.DistributedDataParallel(nn.Linear(3, 4), process_group=group)
    parallel(torch.ones(2, 3)).sum().backward()
    group.abort()
    assert group.errored() is None
    replicas.configure("one again", 1)
    theirs._test_pg(group)


def test_timeouts(replicas: Replicas) -> None:
    replicas.configure("timeouts")
    group = replicas.groups[0]
    group.set_timeout(timedelta(seconds=0.2))
    begun = time.monotonic()
    with pytest.raises(MultiringError, match=r"waited 0\.2 s for ranks 1, 2"):
        group.allreduce([torch.ones(2)], dist.AllreduceOptions()).wait()
    assert time.monotonic() - begun < TIMEOUT.total_seconds() / 2
    assert "waited 0.2 s for ranks 1, 2" in str(group.errored())


# Every replica: data of a step differ by its place among those that take part. Ends when all three have
# trained together again after one was lost, which all of them know by the state that they share.
REPLICA = """
import json, os, signal, sys
from datetime import timedelta
import torch, torch.distributed as dist
from torchft import Manager, Optimizer
from multiring.torch_distributed.torchft import ProcessGroup

name, doomed = sys.argv[1], sys.argv[2] == "doomed"
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
torch.manual_seed(0)
model = torch.nn.Linear(5, 3).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
counts = []  # of replicas that took part, for each step

def load(state):
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    counts[:] = state["counts"]

def save():
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "counts": list(counts)}

limit = timedelta(seconds=30)
manager = Manager(pg=ProcessGroup(timedelta(seconds=20)), load_state_dict=load, state_dict=save,
                  min_replica_size=2, timeout=limit, quorum_timeout=2 * limit, rank=0, world_size=1,
                  replica_id=name, store_addr="127.0.0.1", store_port=store.port, hostname="127.0.0.1",
                  init_sync=False)  # all begin with the same weights
steps = Optimizer(manager, optimizer)
while not (2 in counts and counts[-3:] == [3, 3, 3]):
    steps.zero_grad()
    manager.wait_quorum()
    rank, count = manager.participating_rank(), manager.num_participants()
    if rank is not None:
        data = torch.Generator().manual_seed(100 * len(counts) + rank)
        model(torch.randn(4, 5, generator=data, dtype=torch.float64)).square().mean().backward()
    if doomed and count == 3 and len(counts) >= 3:
        os.kill(os.getpid(), signal.SIGKILL)
    works = []
    for each in model.parameters():
        if each.grad is None:  # one that catches up
            each.grad = torch.zeros_like(each)
        works.append(manager.allreduce(each.grad))
    for work in works:
        work.wait()
    step = manager.current_step()
    steps.step()
    if manager.current_step() > step:
        counts.append(count)
with open(os.path.join(os.environ["TEST_DIRECTORY"], name), "w") as file:
    json.dump({"counts": counts, "weights": [each.tolist() for each in model.parameters()]}, file)
manager.shutdown()
"""

DRIVER = """
import os, subprocess, sys
from torchft.coordination import LighthouseServer

lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=20000)
env = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse.address(), "OMP_NUM_THREADS": "1"}

def start(*arguments):
    return subprocess.Popen([sys.executable, sys.argv[1], *arguments], env=env)

replicas = [start("0", "stays"), start("1", "stays"), start("2", "doomed")]
assert replicas[2].wait() == -9, replicas[2].returncode
replicas[2] = start("3", "stays")
codes = [each.wait() for each in replicas]
lighthouse.shutdown()
sys.exit(max(map(abs, codes)))
"""


def test_a_replica_that_is_killed_and_replaced(tmp_path: Path) -> None:
    """The weights are those of one process that does in each step what the replicas did that took part."""
    (tmp_path / "replica.py").write_text(REPLICA)
    with Job([sys.executable, "-c", DRIVER, str(tmp_path / "replica.py")]) as job:
        job.ended(0, 180.0)
        found = [json.loads((job.directory / name).read_text()) for name in "013"]
    assert found[0] == found[1] == found[2]
    counts = found[0]["counts"]
    assert {2, 3} == set(counts)

    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, count in enumerate(counts):
        optimizer.zero_grad()
        for rank in range(count):
            data = torch.Generator().manual_seed(100 * step + rank)
            inputs = torch.randn(4, 5, generator=data, dtype=torch.float64)
            (model(inputs).square().mean() / count).backward()
        optimizer.step()
    for weight, expected in zip(found[0]["weights"], model.parameters(), strict=True):
        torch.testing.assert_close(torch.tensor(weight, dtype=torch.float64), expected.detach())
