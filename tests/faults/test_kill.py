"""A rank is killed: the others raise PeerLostError, whatever they are doing. How soon: test_in_time.py."""

from __future__ import annotations

import os
import random
import re
import select
import signal
import threading
import zlib
from collections.abc import Callable

import numpy as np
import pytest

import multiring
from multiring import AbortedError, Communicator, PeerLostError
from tests.faults.operations import OPERATIONS
from tests.nursery import Nursery, note
from tests.support import REPOSITORY, run_job

VICTIM = 1


def die() -> None:
    note("killed")
    os.kill(os.getpid(), signal.SIGKILL)


def fail_with(step: Callable[[], object]) -> None:
    """Repeats the operation until it fails, then finds the communicator broken."""
    try:
        while True:
            step()
    except PeerLostError:
        assert multiring.world().is_broken
        told = f"(?s)lost rank {VICTIM}.*Call multiring.shutdown\\(\\) and init\\(\\) to start anew"
        with pytest.raises(AbortedError, match=told):
            multiring.world().barrier()
        raise


def absent(comm: Communicator, name: str) -> None:
    """The victim dies before it comes; the others wait for it."""
    step = OPERATIONS[name](comm)
    comm.barrier()
    if comm.rank == VICTIM:
        die()
    fail_with(step)


def waiting(comm: Communicator, name: str) -> None:
    """The victim dies while it is waiting inside the operation for rank 0, which comes when it is dead."""
    step = OPERATIONS[name](comm)
    process = os.pidfd_open(int(comm.allgather(np.array([os.getpid()]))[VICTIM]))
    comm.barrier()
    if comm.rank == VICTIM:
        threading.Timer(0.03, die).start()
    if comm.rank == 0:
        select.select([process], [], [])
    fail_with(step)


def busy(comm: Communicator, name: str) -> None:
    """The victim dies at some moment while all repeat the operation as fast as they can."""
    step = OPERATIONS[name](comm)
    comm.barrier()
    if comm.rank == VICTIM:  # any moment will do; a different one for each operation
        delay = random.Random(zlib.crc32(name.encode())).uniform(0.01, 0.06)
        threading.Timer(delay, die).start()
    fail_with(step)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("moment", [absent, waiting, busy])
def test_killed(nursery: Nursery, moment: Callable[[Communicator, str], None], name: str) -> None:
    """With two hosts at one of two moments; there the victim shares its own with rank 3."""
    turn = [*OPERATIONS].index(name) + (moment is waiting)
    hosts = 1 if moment is busy else 1 + turn % 2
    outcomes = nursery.run(2 + hosts, moment, name, hosts=hosts)
    assert outcomes[VICTIM].status == -signal.SIGKILL
    for rank, outcome in enumerate(outcomes):
        if rank == VICTIM:
            continue
        text = outcome.check_raised(PeerLostError, f"lost rank {VICTIM} on {os.uname().nodename} (process ")
        assert outcome.status == 0
        if hosts == 1:  # from another host it may be told by a rank that has seen it
            assert "its process has died" in text
            assert outcome.error.rank == rank


IN_A_RING = """
import os, signal, threading
import numpy as np
import multiring
from tests.support import pretend_places

pretend_places([0, 1, 2])
comm = multiring.init()
x = np.ones(1_500_000, np.float32)
assert comm.allreduce(x, op="max").tobytes() == x.tobytes()
if comm.rank == 1:
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
try:
    while True:
        comm.allreduce(x, op="max", out=x)
except multiring.PeerLostError as error:
    print(f"rank {comm.rank} raised PeerLostError: {error}", flush=True)
    raise
"""


def test_killed_in_the_middle_of_a_ring() -> None:
    """Three pretended hosts, whose ranks are told of each other's deaths by TCP; nothing is left."""
    env = {"MULTIRING_MODE": "1x3r", "MULTIRING_ORDER": "any", "PYTHONPATH": str(REPOSITORY)}
    told = run_job(3, IN_A_RING, env=env, code=137)
    for rank in (0, 2):
        assert re.search(rf"rank {rank} raised PeerLostError: .*lost rank {VICTIM} ", told.stdout), told
    assert re.search(rf"^multiring: rank {VICTIM}\b.* failed with", told.stderr, re.MULTILINE), told


def die_beside_a_group(comm: Communicator) -> None:
    """Two victims; groups tell of them too, and the survivors can leave."""
    group = comm.split(0)
    comm.barrier()
    if comm.rank in (1, 3):
        die()
    for each in (group, comm):
        with pytest.raises(PeerLostError, match="lost rank [13]"):
            each.allreduce(np.ones(3))
    multiring.shutdown()


def test_groups_and_several_at_once(nursery: Nursery) -> None:
    for rank, outcome in enumerate(nursery.run(5, die_beside_a_group)):
        assert rank in (1, 3) or outcome.error is None, outcome.trace
