"""Asynchronous operations: their handle, their order, their errors and what they keep alive."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import numpy as np
import pytest

import multiring
from multiring import AbortedError, Communicator, UsageError
from tests.on_ranks import on_ranks
from tests.rank_pool import RankPool
from tests.support import assert_idle, threads

Pools = Callable[[int], RankPool]


@on_ranks(1, 3)
def test_handle(comm: Communicator) -> None:
    out = np.empty(4)
    work = comm.allreduce_async(np.full(4, comm.rank + 1.0), out=out)
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
    work = None
    if comm.rank != 0:
        work = comm.allreduce_async(np.ones(3), name="late")
        assert not work.done()
        start = time.monotonic()
        with pytest.raises(multiring.TimeoutError, match=r"allreduce 'late'.*it goes on") as caught:
            work.wait(timeout=0.05)
        assert isinstance(caught.value, TimeoutError)
        assert caught.value.operation == "allreduce"
        assert caught.value.tensor == "late"
        assert time.monotonic() - start >= 0.05
        with pytest.raises(multiring.TimeoutError):
            work.wait(timeout=0)
    other.barrier()
    if work is None:
        work = comm.allreduce_async(np.ones(3), name="late")
    assert work.wait()[0] == comm.size  # a wait that gave up has broken nothing


@on_ranks(3)
def test_arrays_are_kept_alive(comm: Communicator) -> None:
    pending = []
    for number in range(40):
        pending.append(comm.allreduce_async(np.full(30_000, float(number)), priority=number % 3))
        np.full(30_000, -1.0)  # would take the place of an input that was let go
    gc.collect()
    for number, work in enumerate(pending):
        assert (work.wait() == number * comm.size).all()


def test_the_progress_thread_sleeps_when_idle(comm: Communicator) -> None:
    before = threads()
    group = comm.split(0)
    group.allreduce_async(np.ones(1)).wait()
    comm.barrier()
    assert_idle(set(threads()) - set(before))


def mismatch(comm: Communicator) -> tuple[list[str], bool]:
    if comm.rank == 2:  # comes when the others have submitted both
        comm.recv(0)
        comm.recv(1)
    first = comm.allreduce_async(np.ones(3 + comm.rank % 2), name="grad")
    pending = [first, first]
    if comm.rank != 2:
        pending.append(comm.allreduce_async(np.ones(3), name="next"))
        comm.send(np.ones(1), 2)
    texts = []
    for work in pending:
        try:
            work.wait()
        except multiring.MultiringError as error:
            texts.append(f"{type(error).__name__}: {error}")
        assert work.done()
    with pytest.raises(AbortedError, match=r"broken on rank \d by its first error \(mismatch\)"):
        comm.allreduce_async(np.ones(3))
    return texts, comm.is_broken


def test_errors_are_raised_at_wait(ranks: Pools) -> None:
    for rank, (texts, is_broken) in enumerate(ranks(3).run(mismatch)):
        assert len(texts) == (2 if rank == 2 else 3)  # what was pending fails as well
        assert all(text.startswith("MismatchError: ") for text in texts)
        assert all(
            "the ranks of communicator 'world' asked for different operations" in text for text in texts
        )
        assert texts[1] == texts[0]  # at every wait
        assert is_broken


@on_ranks(3)
def test_work_keeps_its_communicator(comm: Communicator) -> None:
    child = comm.split(0)
    work = child.allreduce_async(np.ones(200_000))
    del child
    gc.collect()
    assert work.wait()[-1] == comm.size
    comm.barrier()
