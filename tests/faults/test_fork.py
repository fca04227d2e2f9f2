"""Forked children of a rank (data loaders): they disturb nothing, and cannot take part."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import multiring
from multiring import Communicator, PeerLostError, UsageError
from tests.nursery import Nursery, note
from tests.support import run_job

SECONDS = 2.0


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


def exit_of_children(comm: Communicator) -> None:
    group, queue = comm.split(0), comm.named_queue()
    region = comm.symmetric_empty(100_000)
    region[:] = comm.rank
    for _ in range(3):
        assert in_child(lambda: None) == 0
        assert in_child(multiring.shutdown) == 0
        assert in_child(comm.close) == 0
        assert in_child(group.close) == 0
        assert in_child(queue.close) == 0
        assert comm.allreduce(region).max() == sum(range(comm.size))
        group.barrier()
        assert queue.allreduce(np.ones(1), name="x")[0] == comm.size
    assert not comm.is_broken


def test_the_end_of_a_child_is_not_that_of_its_parent(nursery: Nursery) -> None:
    nursery.values(3, exit_of_children)


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
    group = comm.split(0)
    assert group is not None
    first, second = comm.split(0), comm.split(0)
    assert first is not None
    assert second is not None
    mine, theirs = (first, second) if comm.rank == 0 else (second, first)
    queue, names = comm.named_queue(), ("a", "b") if comm.rank == 0 else ("b", "a")
    # Rank 0 and the others wait for each other, so a thread of each is busy with these while they fork.
    works = [mine.allreduce_async(np.ones(3)), queue.allreduce_async(np.ones(3), name=names[0])]
    assert in_child(lambda: _use_everything(comm, group, queue, works)) == 0
    assert not any(work.done() for work in works)
    comm.barrier()
    theirs.allreduce_async(np.ones(3)).wait()
    queue.allreduce(np.ones(3), name=names[1])
    assert [work.wait().tolist() for work in works] == [[comm.size] * 3] * 2
    assert comm.allreduce(np.ones(1))[0] == comm.size
    assert not comm.is_broken


def test_a_child_cannot_communicate(nursery: Nursery) -> None:
    outcomes = nursery.run(3, use_in_child)
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace + nursery.output()


def use_after_native_fork(comm: Communicator) -> None:
    x = np.ones(3)
    work = comm.allreduce_async(np.ones(2000))  # by a thread that the child does not have

    def use() -> None:
        for call in (comm.allreduce, comm.allreduce_async):
            with pytest.raises(UsageError, match="fork"):
                call(x)
        for make in (comm.split, comm.symmetric_empty):
            with pytest.raises(UsageError, match="fork"):
                make(3)
        comm.close()

    assert in_child(use, ctypes.PyDLL(None).fork) == 0
    assert work.wait()[0] == comm.size


def test_a_child_of_a_native_fork_cannot_communicate(nursery: Nursery) -> None:
    """Of which Python's own hooks know nothing."""
    for outcome in nursery.run(3, use_after_native_fork):
        assert outcome.error is None, outcome.trace + nursery.output()


def killed_with_child(comm: Communicator) -> None:
    comm.barrier()
    if comm.rank == 1:
        if os.fork() == 0:
            while os.getppid() != 1 and os.path.exists(f"/proc/{os.getppid()}/task"):
                time.sleep(0.05)
            time.sleep(SECONDS + 1.0)  # outlives its parent by more than the others may take to notice
            os._exit(0)
        note("killed")
        os.kill(os.getpid(), signal.SIGKILL)
    comm.allreduce(np.ones(3))


def test_a_parent_is_missed_though_its_child_lives(nursery: Nursery) -> None:
    outcomes = nursery.run(3, killed_with_child)
    for rank in (0, 2):
        outcome = outcomes[rank]
        outcome.check_raised(PeerLostError, "lost rank 1", since=outcomes[1].notes["killed"], within=SECONDS)


def square(x: int) -> int:
    return x * x


def with_pool(comm: Communicator) -> list[int]:
    """Workers, as data loaders have them, while the rank communicates and its thread works."""
    pending = [comm.allreduce_async(np.ones(200_000)) for _ in range(5)]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        results = pool.map_async(square, range(10))
        for work in pending:
            assert work.wait()[0] == comm.size
        for _ in range(20):
            comm.allreduce(np.ones(1000))
        squares: list[int] = results.get(30.0)
    comm.barrier()
    return squares


def test_worker_processes(nursery: Nursery) -> None:
    for value in nursery.values(2, with_pool):
        assert value == [x * x for x in range(10)]


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
    pid = os.fork()
    if pid != 0:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        comm = multiring.init()
        code = 0 if comm.allreduce(np.ones(1))[0] == comm.size else 1
        multiring.shutdown()
    finally:
        os._exit(code)


def test_forked_before_init(nursery: Nursery) -> None:
    for outcome in nursery.run(2, fork_before_init, init=False):
        assert outcome.value == 0, outcome


def alone_in_child(comm: Communicator) -> None:
    assert in_child(lambda: _alone(comm)) == 0
    assert comm.allreduce(np.ones(1))[0] == 1


def _alone(comm: Communicator) -> None:
    assert not multiring.is_initialized()
    assert multiring.init() is not comm
    assert multiring.world().allreduce(np.ones(2)).tolist() == [1.0, 1.0]


def test_alone_a_child_may_start_its_own(nursery: Nursery) -> None:
    outcome = nursery.run(1, alone_in_child)[0]
    assert outcome.error is None, outcome.trace + nursery.output()
