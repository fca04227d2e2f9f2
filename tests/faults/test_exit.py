"""How ranks end: with threads in a call, by an exception, while a group is made, after a native fork."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

import numpy as np
import pytest

import multiring
from multiring import AbortedError, PeerLostError
from tests.faults.interrupts import interrupt_asleep, tell
from tests.nursery import Nursery, note
from tests.support import run_job

DAEMON = """
import sys, threading, time
import numpy as np
import multiring
comm = multiring.init()
call = {
    "work": lambda: comm.barrier_async().wait(),
    "barrier": comm.barrier,
    "recv": lambda: comm.recv(1 - comm.rank),
}[sys.argv[1]]
if comm.rank == 0:
    threading.Thread(target=call, daemon=True).start()
    time.sleep(0.2)
else:
    time.sleep(0.4)
sys.exit(0)
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


def die_with_a_child(comm: multiring.Communicator, native: bool) -> None:
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


def shut_down(comm: multiring.Communicator) -> None:
    multiring.shutdown()


def start_another(comm: multiring.Communicator) -> None:
    with pytest.raises(multiring.UsageError, match="signal handler"):
        comm.barrier()


def call_in_handler(comm: multiring.Communicator, handle: Callable[[multiring.Communicator], None]) -> None:
    """A handler runs on the stack of the operation that it interrupts, and must not wait for it. Rank 0 comes
    when it has run, unless that ends the operation."""

    def on_signal(number: int, _: object) -> None:
        handle(comm)
        note("handled")
        os.kill(int(pids[0]), number)

    pids = comm.allgather(np.array([os.getpid()]))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    comm.barrier()
    if comm.rank == 0:
        interrupt_asleep(comm, 1, signal.SIGUSR2)
        signal.sigwait([signal.SIGUSR2])
        if handle is shut_down:
            return
    else:
        signal.signal(signal.SIGUSR2, on_signal)
        tell(comm, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
    comm.barrier()


def test_a_handler_ends_the_operation_it_interrupts(nursery: Nursery) -> None:
    nursery.run(2, call_in_handler, shut_down)[1].check_raised(AbortedError, "closed")


def test_a_handler_starts_no_operation(nursery: Nursery) -> None:
    nursery.values(2, call_in_handler, start_another)
