"""Forked children of a rank (data loaders) disturb nothing and cannot take part. How ranks end."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import multiring
from multiring import Communicator, PeerLostError, UsageError
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


def use_after_native_fork(comm: Communicator) -> None:
    """Of which Python's own hooks know nothing."""
    x = np.ones(3)
    work = comm.allreduce_async(np.ones(2000))  # by a thread that the child does not have

    def use() -> None:
        calls = ((comm.allreduce, x), (comm.allreduce_async, x), (comm.split, 3), (comm.symmetric_empty, 3))
        for call, argument in calls:
            with pytest.raises(UsageError, match="fork"):
                call(argument)
        comm.close()

    assert in_child(use, ctypes.PyDLL(None).fork) == 0
    assert work.wait()[0] == comm.size


@pytest.mark.parametrize("scenario", [use_in_child, use_after_native_fork])
def test_a_child_cannot_communicate(nursery: Nursery, scenario: Callable[[Communicator], None]) -> None:
    nursery.values(3, scenario)


FULL_EXIT = """
import os
import numpy as np
import multiring

comm = multiring.init()
group, queue = comm.split(0), comm.named_queue()
work = group.allreduce_async(np.ones(100_000))
work.wait()
queue.allreduce(np.ones(3), name="x")
region = comm.symmetric_empty(10)
if child := os.fork():
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert comm.allreduce(np.ones(1))[0] == comm.size
print("done")
# Both leave through the whole of the interpreter's exit, with everything still referred to.
"""


def test_the_whole_exit_of_a_child() -> None:
    result = run_job(2, FULL_EXIT, code=0)
    assert result.stdout.count("done") == 4
    assert "Error" not in result.stderr


def fork_before_init(rank: int) -> None:
    """A process that was forked before any of them was a rank may become one."""
    assert in_child(_join) == 0


def _join() -> None:
    comm = multiring.init()
    assert comm.allreduce(np.ones(1))[0] == comm.size
    multiring.shutdown()


def test_forked_before_init(nursery: Nursery) -> None:
    nursery.values(2, fork_before_init, init=False)


def alone_in_child(comm: Communicator) -> None:
    assert in_child(_join) == 0
    assert comm.allreduce(np.ones(1))[0] == 1


def test_alone_a_child_may_start_its_own(nursery: Nursery) -> None:
    nursery.values(1, alone_in_child)


def die_with_a_child(comm: Communicator, native: bool) -> None:
    comm.barrier()
    if comm.rank == 1:
        libc = ctypes.CDLL(None)  # whose fork calls none of Python's hooks
        child = libc.fork() if native else os.fork()
        if child == 0:
            libc.alarm(120)
            while True:
                libc.pause()
        note(str(child))
        os.kill(os.getpid(), signal.SIGKILL)
    comm.allreduce(np.ones(3), name="grad")


@pytest.mark.parametrize(("native", "hosts"), [(False, 1), (True, 2)])
def test_a_child_hides_no_end(nursery: Nursery, native: bool, hosts: int) -> None:
    outcomes = nursery.run(2, die_with_a_child, native, hosts=hosts)
    (child,) = map(int, outcomes[1].notes)
    os.kill(child, signal.SIGKILL)  # it has outlived its parent, of whose end its peer knows
    outcomes[0].check_raised(PeerLostError, "lost rank 1")


DAEMON = """
import sys, threading, time
import multiring
comm = multiring.init()
call = {
    "work": lambda: comm.barrier_async().wait(),
    "barrier": comm.barrier,
    "recv": lambda: comm.recv(1),
}[sys.argv[1]]
comm.barrier()
if comm.rank == 0:  # leaves when its thread sleeps in the call, and not for want of the interpreter's lock
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    asleep = 0
    while asleep < 10:
        time.sleep(0.01)
        state = open(f"/proc/self/task/{thread.native_id}/stat").read().rpartition(")")[2].split()[0]
        asleep = asleep + 1 if state == "S" else 0
else:
    try:
        comm.recv(0)
    except multiring.PeerLostError as error:
        assert "it has shut down or exited while others still needed it" in str(error), error
"""


@pytest.mark.parametrize("call", ["work", "barrier", "recv"])
def test_a_daemon_thread_in_a_call_does_not_spoil_the_exit(call: str) -> None:
    assert "rminate called" not in run_job(2, DAEMON, call, code=0).stderr


UNCAUGHT = """
import os, sys
import numpy as np
import multiring
comm = multiring.init()
group = comm.split(0)
comm.barrier()
if comm.rank == 1:
    if sys.argv[1] == "interrupt":
        raise KeyboardInterrupt
    comm.no_such_thing()
try:
    (group if sys.argv[2] == "group" else comm).allreduce(np.ones(3), name="grad")
except multiring.AbortedError as error:
    print("told:", error, flush=True)
"""


@pytest.mark.parametrize(
    ("how", "where", "told"),
    [
        ("attribute", "group", "it ends by an uncaught AttributeError: "),
        ("interrupt", "world", "it ends by an uncaught KeyboardInterrupt"),
    ],
)
def test_peers_learn_why_a_rank_ends(how: str, where: str, told: str) -> None:
    job = run_job(2, UNCAUGHT, how, where)
    assert job.returncode != 0
    assert "[0] told: rank 1 stopped all ranks: rank 1 on " in job.stdout, job.stdout + job.stderr
    assert told in job.stdout


STARTS_ANOTHER = """
import subprocess, sys
import multiring

comm = multiring.init()
if comm.rank == 0:
    words = [sys.executable, "-c", "import multiring; multiring.init()"]
    print(subprocess.run(words, capture_output=True, text=True).stderr.strip().splitlines()[-1])
comm.barrier()
"""


def test_what_a_rank_starts_is_no_rank() -> None:
    """It inherits the place, and would wait for ranks that have met."""
    ended = run_job(2, STARTS_ANOTHER, code=0)
    assert "which is rank 0 of 2 of this job already: leave communication to that" in ended.stdout
