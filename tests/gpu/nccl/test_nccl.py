"""Collectives on devices, by NCCL where it serves them, those that add in any order: right results, and
gradients that train as the host's do. What of it is by NCCL, the tests on stand-ins tell (test_fake_nccl.py,
test_fake_nccl_collectives.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import stand_in
from tests.support import run_job

SUMS = """
import numpy as np
import multiring
from tests.gpu.devices import library

comm = multiring.init()
on = library(NAME)
with on.stream():
    for count in (7, 16_384, 100_003, 3_000_001):
        for repeat in range(3):
            x = on.full(count, 0)
            on.busy()
            x += comm.rank + repeat
            y = comm.allreduce(x, order="any")
            wanted = sum(range(comm.size)) + repeat * comm.size
            assert (on.copy_to_host(y) == wanted).all(), (count, repeat)
            assert (on.copy_to_host(x) == comm.rank + repeat).all(), (count, repeat)
            works = [comm.allreduce_async(x * factor, "average", order="any") for factor in (1, 2)]
            for factor, work in enumerate(works, 1):
                z = on.copy_to_host(work.wait())
                assert np.allclose(z, factor * wanted / comm.size), (count, repeat)
print("RIGHT", flush=True)
"""

OTHERS = """
import numpy as np
import multiring
from tests.gpu.devices import library

comm = multiring.init()
on = library(NAME)

def check(result, wanted, *of):
    later = result + 1  # at once
    assert (on.copy_to_host(later) == np.asarray(wanted, np.float32) + 1).all(), of

def made(count, value):  # by a kernel that still runs
    x = on.full(count, 0)
    on.busy()
    x += value
    return x

with on.stream():
    ranks = np.arange(comm.size)
    for count in (7, 16_384, 100_003, 3_000_001):
        for root in range(comm.size):
            x = made(count, comm.rank + 1)
            check(comm.broadcast(x, root), root + 1, "broadcast", count, root)
            check(x, comm.rank + 1, "broadcast", count, root)
            check(comm.broadcast(x, root, out=x), root + 1, "broadcast", count, root, "in place")
        check(comm.allgather(made(count, comm.rank)), np.repeat(ranks, count), "allgather", count)
        rows = [count + 10 * rank for rank in ranks]
        works = [comm.allgather_async(made(rows[comm.rank], comm.rank)) for _ in range(2)]
        for work in works:
            check(work.wait(), np.repeat(ranks, rows), "allgather of unequal rows", count)
        out = on.full(count * comm.size, -1)
        assert comm.allgather(made(count, comm.rank), out=out) is out
        check(out, np.repeat(ranks, count), "allgather to an array", count)
        block = len(np.array_split(np.empty(count), comm.size)[comm.rank])
        result = comm.reduce_scatter(made(count, comm.rank), order="any")
        check(result, [sum(ranks)] * block, "reduce_scatter", count)
        splits = [count + 5 * rank for rank in ranks]
        result, received = comm.alltoall(made(sum(splits), comm.rank), splits)
        check(result, np.repeat(ranks, splits[comm.rank]), "alltoall", count)
        assert received.tolist() == [splits[comm.rank]] * comm.size
print("RIGHT", flush=True)
"""

TRAINING = """
import torch
import multiring, multiring.torch

comm = multiring.init()

def train(device):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8)).double()
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = multiring.torch.DistributedOptimizer(optimizer, model, order="any")
    torch.manual_seed(comm.rank + 2)
    for _ in range(10):
        x = torch.randn(16, 64, dtype=torch.float64).to(device)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]

for one, two in zip(train("cuda"), train("cpu"), strict=True):
    torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)
print("RIGHT", flush=True)
"""


@pytest.mark.parametrize("script", [SUMS, OTHERS], ids=["sums", "others"])
@pytest.mark.parametrize("shared", ["0", "1"])
@pytest.mark.parametrize("name", ["cupy", "fake", "torch"])
def test_results(name: str, shared: str, script: str, tmp_path: Path) -> None:
    """NCCL takes ranks that share a device from 2.30 on, if they may; else all passes through the host."""
    env = stand_in.with_nccl(tmp_path) if name == "fake" else {"PYTHONPATH": stand_in.python_path()}
    env |= {"NCCL_MULTI_RANK_GPU_ENABLE": shared, "NCCL_DEBUG": "INFO", "MULTIRING_ORDER": "any"}
    ended = run_job(2, f"NAME = {name!r}\n{script}", code=0, env=env)
    assert ended.stdout.count("RIGHT") == 2
    if name != "fake" and shared == "1" and "Init COMPLETE" not in ended.stdout + ended.stderr:
        pytest.skip("results are right, but NCCL has not taken two ranks on one device, which needs 2.30")


def test_training_of_torch() -> None:
    env = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    assert run_job(2, TRAINING, code=0, env=env, timeout=120).stdout.count("RIGHT") == 2
