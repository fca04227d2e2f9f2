"""How ranks end: with threads in a call, by an exception, while a group is made, after a native fork."""

from __future__ import annotations

import ctypes
import os
import signal

import numpy as np
import pytest

import multiring
from multiring import PeerLostError
from tests.nursery import Nursery, note
from tests.support import run_job

# As long as a peer's end may take to be seen on another host, and the rest of a test on a busy machine.
SECONDS = 10.0

DAEMON = """
import sys, threading, time
import numpy as np
import multiring
comm = multiring.init()
call = {
    "work": lambda: comm.barrier_async().wait(),
    "barrier": comm.barrier,
    "recv": lambda: comm.recv(1 - comm.rank),
    "broadcast": lambda: comm.broadcast(np.ones(3), 1),
}[sys.argv[1]]
if comm.rank == 0:
    threading.Thread(target=call, daemon=True).start()
    time.sleep(0.2)
else:
    time.sleep(0.4)
sys.exit(0)
"""


@pytest.mark.parametrize("call", ["work", "barrier", "recv", "broadcast"])
def test_a_daemon_thread_in_a_call_does_not_spoil_the_exit(call: str) -> None:
    for _ in range(3):
        job = run_job(2, DAEMON, call, code=0)
        assert "rminate called" not in job.stderr


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
    comm.no_such_thing() if sys.argv[1] == "attribute" else comm.broadcast(("no", "array"), 1)
try:
    (group if sys.argv[2] == "group" else comm).allreduce(np.ones(3), name="grad")
except multiring.AbortedError as error:
    print("told:", error, flush=True)
"""


@pytest.mark.parametrize(
    ("how", "where", "told"),
    [
        ("attribute", "world", "it ends by an uncaught AttributeError: "),
        ("argument", "group", "it ends by an uncaught "),
        ("interrupt", "world", "it ends by an uncaught KeyboardInterrupt"),
    ],
)
def test_peers_learn_why_a_rank_ends(how: str, where: str, told: str) -> None:
    job = run_job(2, UNCAUGHT, how, where)
    assert job.returncode != 0
    assert "[0] told: rank 1 stopped all ranks: rank 1 on " in job.stdout, job.stdout + job.stderr
    assert told in job.stdout


def die_with_a_native_child(comm: multiring.Communicator) -> None:
    comm.barrier()
    note("joined")
    if comm.rank == 1:
        libc = ctypes.CDLL(None)  # whose fork calls none of Python's hooks
        child = libc.fork()
        if child == 0:
            libc.alarm(60)
            while True:
                libc.pause()
        note(str(child))
        os.kill(os.getpid(), signal.SIGKILL)
    comm.allreduce(np.ones(3), name="grad")


def test_a_child_of_a_native_fork_hides_no_end(nursery: Nursery) -> None:
    outcomes = nursery.run(2, die_with_a_native_child, hosts=2)
    (child,) = [int(what) for what in outcomes[1].notes if what.isdigit()]
    os.kill(child, signal.SIGKILL)  # it was to outlive its parent
    outcome = outcomes[0]
    outcome.check_raised(PeerLostError, "lost rank 1", since=outcome.notes["joined"], within=SECONDS)


# A signal handler runs on the stack of the operation that it interrupts, and must not wait for it.
SHUTDOWN_IN_HANDLER = """
import os, signal, sys, threading
import numpy as np
import multiring

comm = multiring.init()
if comm.rank == 1:
    # Ends with the job; rank 0 waits for it until its own handler leaves the job.
    signal.pause()
signal.signal(signal.SIGALRM, lambda number, frame: multiring.shutdown())
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    comm.allreduce(np.ones(3))
except multiring.AbortedError as error:
    assert "closed" in str(error), error
    assert not multiring.is_initialized()
    print("left", flush=True)
    os._exit(7)
"""

COLLECTIVE_IN_HANDLER = """
import os, signal
import numpy as np
import multiring

comm = multiring.init()
if comm.rank == 1:
    signal.pause()

def handler(number, frame):
    try:
        comm.barrier()
    except multiring.UsageError as error:
        assert "signal handler" in str(error), error
        print("refused", flush=True)
        os._exit(7)

signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.2)
comm.allreduce(np.ones(3))
"""


@pytest.mark.parametrize(
    ("script", "told"), [(SHUTDOWN_IN_HANDLER, "left"), (COLLECTIVE_IN_HANDLER, "refused")]
)
def test_a_handler_ends_the_operation_it_interrupts_and_may_start_none(script: str, told: str) -> None:
    result = run_job(2, script, timeout=30)
    assert told in result.stdout
    assert result.returncode == 7
