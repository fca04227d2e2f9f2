"""How ranks end: with threads in a call, by an exception, while a group is made, after a native fork."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import threading

import numpy as np
import pytest

import multiring
from multiring import PeerLostError
from tests.nursery import Nursery, note
from tests.support import HOSTS, pretend_hosts, run_job

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
        job = run_job(2, DAEMON, call)
        assert job.returncode == 0, job.stdout + job.stderr
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


def _join_hosts() -> multiring.Communicator:
    pretend_hosts()
    return multiring.init()


def make_groups_until_killed(rank: int, delay: float) -> None:
    comm = _join_hosts()
    comm.barrier()
    if rank == 1:
        threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    note("making")
    while True:
        comm.split(0).close()  # type: ignore[union-attr]


# The rank that is killed may be anywhere in the making of a group.
@pytest.mark.parametrize("seed", range(4))
def test_a_rank_that_dies_while_groups_are_made_is_lost(nursery: Nursery, seed: int) -> None:
    delay = random.Random(seed).uniform(0.02, 0.2)
    outcome = nursery.run(2, make_groups_until_killed, delay, init=False, env={HOSTS: "2"})[0]
    assert isinstance(outcome.error, PeerLostError), outcome.trace or outcome
    assert outcome.ended is not None
    assert outcome.ended - outcome.notes["making"] < SECONDS
    assert "rank 1" in str(outcome.error)
    assert "split" in str(outcome.error)


def die_with_a_native_child(rank: int) -> None:
    comm = _join_hosts()
    comm.barrier()
    note("joined")
    if rank == 1:
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
    outcomes = nursery.run(2, die_with_a_native_child, init=False, env={HOSTS: "2"})
    (child,) = [int(what) for what in outcomes[1].notes if what.isdigit()]
    os.kill(child, signal.SIGKILL)  # it was to outlive its parent
    outcome = outcomes[0]
    assert isinstance(outcome.error, PeerLostError), outcome.trace or outcome
    assert outcome.ended is not None
    assert outcome.ended - outcome.notes["joined"] < SECONDS
    assert "lost rank 1" in str(outcome.error)
