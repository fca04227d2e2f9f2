"""Collectives of arrays on a device: what they give, and what they are ordered with."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import numpy as np
import pytest

import multiring
from multiring import Communicator, UsageError
from tests.gpu import fake_arrays
from tests.gpu.devices import KINDS, library
from tests.on_ranks import on_ranks
from tests.python.collectives.array_kinds import assert_same_bits
from tests.python.collectives.oracle import Reduction, random_bits
from tests.python.collectives.registry import COLLECTIVES
from tests.python.collectives.test_array_kinds import check_collective, check_sent
from tests.support import Stopwatch

LIBRARIES = pytest.mark.parametrize("name", ["cupy", "fake", "torch"])


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("name", KINDS)
def test_kind(comm: Communicator, name: str) -> None:
    """Every collective with every dtype, as for arrays on the host."""
    kind = KINDS[name]
    for number, dtype in enumerate(sorted(kind.dtypes)):
        for collective, asynchronous in itertools.product(COLLECTIVES.values(), (False, True)):
            check_collective(comm, kind, collective, dtype, asynchronous)
        if comm.size > 1:
            check_sent(comm, kind, number, dtype)


@on_ranks(2, 4)
@pytest.mark.parametrize("name", ["cupy", "fake", "torch cuda"])
def test_counts(comm: Communicator, name: str) -> None:
    """Of no element, one, numbers that nothing divides, and more than staging memory holds."""
    kind = KINDS[name]
    large = 2_200_003 if name == "fake" else 20_000_003
    counts = (0, 1, 7, 1023, 65537, 300_001, large)
    for count, dtype in itertools.product(counts, ("float32", "float16", "int8")):
        inputs = [random_bits(rank, (count,), dtype) for rank in range(comm.size)]
        wanted = Reduction("sum").apply(inputs, dtype)
        x = kind.make(inputs[comm.rank], dtype)
        assert_same_bits(comm.allreduce(x), wanted)
        assert_same_bits(x, inputs[comm.rank])
        assert comm.allreduce(x, out=x) is x
        assert_same_bits(x, wanted)


@on_ranks(2)
@LIBRARIES
def test_a_kernel_that_still_runs(comm: Communicator, name: str) -> None:
    """On another stream than the default one, whose result the collective has to see."""
    on = library(name)
    for repeat in range(5):
        with on.stream():
            x = on.full(100_000, 0)
            on.busy()
            x += comm.rank + repeat
            y = comm.allreduce(x)
            z = y * 2  # at once
            assert (on.copy_to_host(z) == 2 * (1 + 2 * repeat)).all()
            on.busy()
            x *= 3
            assert (on.copy_to_host(comm.allgather(x[:1]))[1] == 3 * (1 + repeat)).all()
            assert comm.allreduce(x, out=x) is x
            x += 1
            assert (on.copy_to_host(x) == 3 * (1 + 2 * repeat) + 1).all()


@on_ranks(2)
@LIBRARIES
def test_many_in_flight(comm: Communicator, name: str) -> None:
    """Small ones, which run together, and large ones; kernels that make the next come between."""
    on = library(name)
    with on.stream():
        arrays, works = [], []
        for number in range(60):
            x = on.full(10 if number % 5 else 100_000, 0)
            if number % 20 == 0:
                on.busy()
            x += number + comm.rank
            works.append(comm.allreduce_async(x, out=x, priority=number % 3))
            arrays.append(x)
        for number, (x, work) in enumerate(zip(arrays, works, strict=True)):
            assert work.wait() is x
            assert (on.copy_to_host(x + 1) == 2 * number + 2).all()


@on_ranks(2)
@LIBRARIES
def test_named_queue(comm: Communicator, name: str) -> None:
    on = library(name)
    queue = comm.named_queue("on devices")
    order = range(20) if comm.rank == 0 else reversed(range(20))
    works = {}
    for number in order:
        on.busy()
        works[number] = queue.allreduce_async(on.full(1000, number), name=f"x{number}")
    gathered = queue.allgather_async(on.full(3 + comm.rank, comm.rank), name="rows").wait()
    assert on.copy_to_host(gathered).tolist() == [0] * 3 + [1] * 4
    for number, work in works.items():
        assert (on.copy_to_host(work.wait()) == 2 * number).all()
    queue.close()


@on_ranks(2)
@LIBRARIES
def test_device_on_one_rank_host_on_another(comm: Communicator, name: str) -> None:
    on = library(name)
    host = np.full(70_000, comm.rank + 1.0, np.float32)
    x = on.full(70_000, 1) if comm.rank == 0 else host
    total = comm.allreduce(x)
    assert isinstance(total, type(x))
    assert ((on.copy_to_host(total) if comm.rank == 0 else total) == 3).all()
    assert comm.allreduce(x, out=host) is host  # from a device to the host
    assert (host == 3).all()
    x = on.full(70_000, comm.rank)
    assert comm.broadcast(host * comm.rank, 1, out=x) is x  # from the host to a device
    assert (on.copy_to_host(x) == 3).all()


@on_ranks(2)
@LIBRARIES
def test_memory_is_used_again(comm: Communicator, name: str) -> None:
    """Operations whose arrays are given up while they are in progress, and new ones in the same memory."""
    on = library(name)
    for repeat in range(50):
        works = [comm.allreduce_async(on.full(200_000, repeat + i)) for i in range(4)]
        del works[::2]
        for i, work in zip((1, 3), works, strict=True):
            assert (on.copy_to_host(work.wait()) == 2 * (repeat + i)).all()
        assert (on.copy_to_host(comm.allgather(on.full(1, repeat))) == repeat).all()


@on_ranks(2)
def test_refused_torch(comm: Communicator) -> None:
    torch = importlib.import_module("torch")
    x = torch.ones(8, device="cuda")
    for bad, text in (
        (x.to(torch.complex32), "dtype torch.complex32"),
        (torch.ones(8, device="cuda", requires_grad=True), "requires a gradient"),
        (x.to_sparse(), "Tensor"),
    ):
        with pytest.raises(UsageError, match=text):
            comm.allreduce(bad)
    with pytest.raises(UsageError, match="overlaps the input in part"):
        comm.allreduce(x[:6], out=x[2:])
    assert not comm.is_broken
    assert comm.allreduce(x).tolist() == [2.0] * 8


@on_ranks(2)
def test_capture_cupy(comm: Communicator) -> None:
    """A collective cannot be part of a graph; the capture goes on without it."""
    cupy = importlib.import_module("cupy")
    x = cupy.ones(8, "float32")
    comm.allreduce(x)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        with pytest.raises(UsageError, match="device 0 is being captured into a graph"):
            comm.allreduce(x, out=x)
        stream.end_capture()
    assert not comm.is_broken
    assert comm.allreduce(x).tolist() == [2.0] * 8


@on_ranks(2)
def test_capture_fake(comm: Communicator) -> None:
    x = fake_arrays.full(8, 1)
    with fake_arrays.stream() as stream:
        fake_arrays.driver().fake_cuda_capture(stream, 1)
        with pytest.raises(UsageError, match="device 0 is being captured into a graph"):
            comm.allreduce(x, out=x)
    assert not comm.is_broken
    assert comm.allreduce(x).get().tolist() == [2.0] * 8


@on_ranks(2)
def test_capture_torch(comm: Communicator) -> None:
    """Torch itself refuses, and gives up the capture."""
    torch = importlib.import_module("torch")
    x = torch.ones(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    texts: list[str] = []
    with pytest.raises(RuntimeError, match="capture"), torch.cuda.graph(graph):
        try:
            comm.allreduce(x, out=x)
        except UsageError as error:
            texts.append(str(error))
    assert "captur" in texts[0]
    assert not comm.is_broken
    assert comm.allreduce(x).tolist() == [2.0] * 8


@on_ranks(2)
@LIBRARIES
def test_a_kernel_that_takes_longer_than_the_timeout(comm: Communicator, name: str) -> None:
    """Is an error of the rank that has it, which all learn."""
    on = library(name)
    group = comm.split(0)
    assert group is not None
    x: Any = on.full(10, 1)
    if comm.rank == 0:
        for _ in range(20):
            on.busy()
        x += 1
    stopwatch = Stopwatch()
    # Rank 1 waits longer: it is told what rank 0 has waited for.
    with pytest.raises(
        multiring.TimeoutError, match="for the device to finish the work that makes the input"
    ):
        group.allreduce(x, timeout=0.2 if comm.rank == 0 else 30)
    assert stopwatch.seconds() < 5
    on.copy_to_host(x)
    assert group.is_broken
    assert not comm.is_broken
    assert (on.copy_to_host(comm.allreduce(on.full(5, 1))) == 2).all()
