"""Asynchronous operations: their handle, their order, their errors and what they keep alive."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest

import multiring
from multiring import AbortedError, Communicator, MismatchError, UsageError
from tests.on_ranks import on_ranks
from tests.support import assert_idle, threads


@on_ranks(1, 3)
def test_handle(comm: Communicator) -> None:
    out = np.empty(4)
    work = comm.allreduce_async(np.full(4, comm.rank + 1.0), name="", out=out)
    total = work.wait()
    assert total is out
    assert total[0] == comm.size * (comm.size + 1) / 2
    assert work.done()
    assert work.wait() is out
    assert work.wait(timeout=0) is out
    with pytest.raises(UsageError, match="timeout is -1"):
        work.wait(timeout=-1)
    gathered = comm.allgather_async(np.array([comm.rank])).wait()
    assert gathered.tolist() == list(range(comm.size))
    assert comm.barrier_async().wait() is None


@on_ranks(3)
def test_wait_with_timeout(comm: Communicator) -> None:
    other = comm.split(0)
    if comm.rank == 0:
        other.barrier()  # until the others have given up
    work = comm.allreduce_async(np.ones(3), name="late")
    if comm.rank != 0:
        assert not work.done()
        start = time.monotonic()
        with pytest.raises(multiring.TimeoutError, match=r"'late'.*for rank 0.*it goes on") as caught:
            work.wait(timeout=0.05)
        assert isinstance(caught.value, TimeoutError)
        assert caught.value.operation == "allreduce"
        assert caught.value.tensor == "late"
        assert (caught.value.rank, caught.value.peer) == (comm.rank, 0)
        assert time.monotonic() - start >= 0.05
        with pytest.raises(multiring.TimeoutError):
            work.wait(timeout=0)
        other.barrier()
    assert work.wait()[0] == comm.size  # a wait that gave up has broken nothing


@on_ranks(3)
def test_arrays_are_kept_alive(comm: Communicator) -> None:
    queue = comm.named_queue()
    for submit in (comm.allreduce_async, queue.allreduce_async):
        pending = []
        for number in range(40):
            pending.append(submit(np.full(30_000, float(number)), name=str(number), priority=number % 3))
            np.full(30_000, -1.0)  # would take the place of an input that was let go
        gc.collect()
        for number, work in enumerate(pending):
            assert (work.wait() == number * comm.size).all()


def test_progress_threads_sleep_when_idle(comm: Communicator) -> None:
    before = threads()
    group, queue = comm.split(0), comm.named_queue()
    group.allreduce_async(np.ones(1)).wait()
    queue.allreduce(np.ones(1), name="first")
    comm.barrier()
    assert_idle(set(threads()) - set(before))


@on_ranks(3)
def test_an_error_is_raised_at_every_wait(comm: Communicator) -> None:
    work = comm.allreduce_async(np.ones(3 + comm.rank % 2), name="grad")
    texts = []
    for _ in range(2):
        with pytest.raises(MismatchError, match="communicator 'world' asked for different") as raised:
            work.wait()
        assert work.done()
        texts.append(str(raised.value))
    assert texts[0] == texts[1]
    with pytest.raises(AbortedError, match=r"broken on rank \d by its first error \(mismatch\)"):
        comm.allreduce_async(np.ones(3))
    assert comm.is_broken


@on_ranks(2)
def test_timeouts_of_a_group_and_of_one_operation(comm: Communicator) -> None:
    group = comm.split(0)
    assert group.timeout == comm.timeout
    group.timeout = 0.1
    x = np.ones(3)
    if comm.rank == 1:
        comm.barrier()
    work = group.allreduce_async(x, name="patient", timeout=60.0)
    if comm.rank == 0:
        with pytest.raises(multiring.TimeoutError, match="not complete"):
            work.wait(0.3)  # longer than the group's
        comm.barrier()
    assert work.wait()[0] == 2
    if comm.rank == 0:
        with pytest.raises(multiring.TimeoutError, match="'hasty'.*for rank 1"):
            group.allreduce_async(x, name="hasty").wait()
    comm.barrier()
    with pytest.raises(multiring.UsageError, match="above 0"):
        comm.timeout = 0
