"""Forked children of a rank (data loaders): they disturb nothing, and cannot take part."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import multiring
from multiring import Communicator, UsageError
from tests.nursery import Nursery, note
from tests.support import run_job


def in_child(function: Callable[[], None], fork: Callable[[], int] = os.fork) -> int:
    """Runs a function in a forked child; its exit code, 1 if it raised."""
    pid = fork()
    if pid == 0:
        code = 1
        try:
            function()
            gc.collect()
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _use_everything(
    comm: Communicator, group: Communicator, queue: multiring.NamedQueue, works: list[multiring.Work]
) -> None:
    x = np.ones(3)
    calls: dict[str, Callable[[], Any]] = {
        "allreduce": lambda: comm.allreduce(x),
        "allgather": lambda: comm.allgather(x),
        "allreduce_async": lambda: comm.allreduce_async(x),
        "barrier": comm.barrier,
        "send": lambda: comm.send(x, (comm.rank + 1) % comm.size),
        "recv": lambda: comm.recv((comm.rank + 1) % comm.size),
        "split": lambda: comm.split(0),
        "process_set": lambda: comm.process_set([0, 1]),
        "symmetric_empty": lambda: comm.symmetric_empty(3),
        "broadcast_object": lambda: comm.broadcast_object(1),
        "abort": lambda: comm.abort("from a child"),
        "group": group.barrier,
        "queue": lambda: queue.allreduce(x, name="child"),
        "wait": works[0].wait,
        "wait for the queue": works[1].wait,
        "world": multiring.world,
        "rank": multiring.rank,
        "init": multiring.init,
    }
    for name, call in calls.items():
        with pytest.raises(UsageError, match="fork|parent process"):
            call()
            note(f"{name} raised nothing")
    assert not multiring.is_initialized()


def use_in_child(comm: Communicator) -> None:
    group, first, second = (comm.split(0) for _ in range(3))
    mine, theirs = (first, second) if comm.rank == 0 else (second, first)
    region = comm.symmetric_empty(100_000)
    region[:] = comm.rank
    queue, names = comm.named_queue(), ("a", "b") if comm.rank == 0 else ("b", "a")
    # Rank 0 and the others wait for each other, so a thread of each is busy with these while they fork.
    works = [mine.allreduce_async(np.ones(3)), queue.allreduce_async(np.ones(3), name=names[0])]
    assert in_child(lambda: _use_everything(comm, group, queue, works)) == 0
    for end in (lambda: None, multiring.shutdown, comm.close, group.close, queue.close):
        assert in_child(end) == 0  # which is not that of its parent
    assert not any(work.done() for work in works)
    comm.barrier()
    theirs.allreduce_async(np.ones(3)).wait()
    queue.allreduce(np.ones(3), name=names[1])
    assert [work.wait().tolist() for work in works] == [[comm.size] * 3] * 2
    assert comm.allreduce(region).max() == sum(range(comm.size))
    group.barrier()
    assert not comm.is_broken


def test_a_child_cannot_communicate(nursery: Nursery) -> None:
    nursery.values(3, use_in_child)


def use_after_native_fork(comm: Communicator) -> None:
    x = np.ones(3)
    work = comm.allreduce_async(np.ones(2000))  # by a thread that the child does not have

    def use() -> None:
        for call, argument in (
            *((comm.allreduce, x), (comm.allreduce_async, x), (comm.split, 3), (comm.symmetric_empty, 3)),
        ):
            with pytest.raises(UsageError, match="fork"):
                call(argument)
        comm.close()

    assert in_child(use, ctypes.PyDLL(None).fork) == 0
    assert work.wait()[0] == comm.size


def test_a_child_of_a_native_fork_cannot_communicate(nursery: Nursery) -> None:
    """Of which Python's own hooks know nothing."""
    nursery.values(3, use_after_native_fork)


def with_pool(comm: Communicator) -> None:
    """Workers, as data loaders have them, while the rank communicates and its thread works."""
    pending = [comm.allreduce_async(np.ones(200_000)) for _ in range(5)]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        results = pool.map_async(abs, range(-10, 0))
        for work in pending:
            assert work.wait()[0] == comm.size
        for _ in range(20):
            comm.allreduce(np.ones(1000))
        assert results.get(60.0) == [*range(10, 0, -1)]
    comm.barrier()


def test_worker_processes(nursery: Nursery) -> None:
    nursery.values(2, with_pool)


FULL_EXIT = """
import os, sys
import numpy as np
import multiring

comm = multiring.init()
group, queue = comm.split(0), comm.named_queue()
work = group.allreduce_async(np.ones(100_000))
work.wait()
queue.allreduce(np.ones(3), name="x")
region = comm.symmetric_empty(10)
child = os.fork()
if child != 0:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert comm.allreduce(np.ones(1))[0] == comm.size
    print("parent done")
else:
    print("child done")
# Both leave through the whole of the interpreter's exit, with everything still referred to.
"""


def test_the_whole_exit_of_a_child() -> None:
    result = run_job(2, FULL_EXIT, code=0)
    assert result.stdout.count("parent done") == 2
    assert result.stdout.count("child done") == 2
    assert "Error" not in result.stderr


def fork_before_init(rank: int) -> int:
    """A process that was forked before anybody was a rank may become one."""
    return in_child(_join)


def _join() -> None:
    comm = multiring.init()
    assert comm.allreduce(np.ones(1))[0] == comm.size
    multiring.shutdown()


def test_forked_before_init(nursery: Nursery) -> None:
    assert nursery.values(2, fork_before_init, init=False) == [0, 0]


def alone_in_child(comm: Communicator) -> None:
    assert in_child(lambda: _alone(comm)) == 0
    assert comm.allreduce(np.ones(1))[0] == 1


def _alone(comm: Communicator) -> None:
    assert not multiring.is_initialized()
    assert multiring.init() is not comm
    assert multiring.world().allreduce(np.ones(2)).tolist() == [1.0, 1.0]


def test_alone_a_child_may_start_its_own(nursery: Nursery) -> None:
    nursery.values(1, alone_in_child)
