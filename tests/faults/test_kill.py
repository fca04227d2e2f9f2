"""A rank is killed: the others raise PeerLostError within two seconds, whatever they are doing."""

from __future__ import annotations

import os
import random
import select
import signal
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import multiring
from multiring import AbortedError, Communicator, PeerLostError
from tests.faults.operations import OPERATIONS, each
from tests.nursery import Nursery, note

SECONDS = 2.0
SECONDS_BETWEEN_HOSTS = 5.0
VICTIM = 1
Scenario = Callable[..., None]


def die() -> None:
    note("killed")
    os.kill(os.getpid(), signal.SIGKILL)


def process_of(comm: Communicator, rank: int) -> int:
    """A descriptor that becomes readable when the process of a rank ends."""
    return os.pidfd_open(int(comm.allgather(np.array([os.getpid()]))[rank]))


def fail_with(step: object) -> None:
    """Repeats the operation until it fails, then finds the communicator broken."""
    assert callable(step)
    try:
        while True:
            step()
    except PeerLostError:
        assert multiring.world().is_broken
        try:
            multiring.world().barrier()
        except AbortedError as error:
            assert f"lost rank {VICTIM}" in str(error)
            assert "Call multiring.shutdown() and init() to start anew" in str(error)
        else:
            pytest.fail("a broken communicator has to say so")
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
    process = process_of(comm, VICTIM)
    comm.barrier()
    if comm.rank == VICTIM:
        threading.Timer(0.03, die).start()
    if comm.rank == 0:
        select.select([process], [], [])
    fail_with(step)


def busy(comm: Communicator, name: str, delay: float) -> None:
    """The victim dies at some moment while all repeat the operation as fast as they can."""
    step = OPERATIONS[name](comm)
    comm.barrier()
    if comm.rank == VICTIM:
        threading.Timer(delay, die).start()
    fail_with(step)


def check(nursery: Nursery, n: int, scenario: Scenario, *args: Any, hosts: int = 1) -> None:
    """The survivors of a scenario learn of the victim's end, on several hosts as soon as it can be seen."""
    outcomes = nursery.run(n, scenario, *args, hosts=hosts)
    victim = outcomes[VICTIM]
    assert victim.status == -signal.SIGKILL
    text = f"lost rank {VICTIM} on {os.uname().nodename} (process "
    for rank, outcome in enumerate(outcomes):
        if rank == VICTIM:
            continue
        within = SECONDS if hosts == 1 else SECONDS_BETWEEN_HOSTS
        outcome.check_raised(PeerLostError, text, since=victim.notes["killed"], within=within)
        assert outcome.status == 0
        if hosts == 1:  # from another host it may be told by a rank that has seen it
            assert "its process has died" in str(outcome.error)
            assert outcome.error.rank == rank


# Every operation with every moment, and with one host and with two: with two hosts at one of two moments.
TURNS = {name: turn for turn, name in enumerate(OPERATIONS)}


@pytest.mark.parametrize("name", each(OPERATIONS))
def test_before_it_comes(nursery: Nursery, name: str) -> None:
    check(nursery, 3, absent, name, hosts=1 + TURNS[name] % 2)


@pytest.mark.parametrize("name", each(name for name in OPERATIONS if not name.startswith("send and recv")))
def test_while_it_waits(nursery: Nursery, name: str) -> None:
    """On two hosts the victim shares one with rank 3, for which it receives."""
    n, hosts = (3, 1) if TURNS[name] % 2 else (4, 2)
    check(nursery, n, waiting, name, hosts=hosts)


@pytest.mark.parametrize("name", each(OPERATIONS))
def test_in_the_middle(nursery: Nursery, name: str) -> None:
    # Any moment will do; a different one for each operation.
    delay = random.Random(zlib.crc32(name.encode())).uniform(0.01, 0.06)
    check(nursery, 3, busy, name, delay)


def start_anew(comm: Communicator) -> float:
    """After the error the survivors leave; that they can join again is what test_reinit_after_error shows."""
    group = comm.split(0)
    comm.barrier()
    if comm.rank == VICTIM:
        die()
    with pytest.raises(PeerLostError, match=f"lost rank {VICTIM}"):
        group.allreduce(np.ones(3))
    with pytest.raises(PeerLostError, match=f"lost rank {VICTIM}"):
        comm.allreduce(np.ones(3))
    start = time.monotonic()
    multiring.shutdown()
    return time.monotonic() - start


def test_groups_and_shutdown(nursery: Nursery) -> None:
    for rank, outcome in enumerate(nursery.run(4, start_anew)):
        if rank != VICTIM:
            assert outcome.error is None, outcome.trace
            assert outcome.value < SECONDS


def exits_early(comm: Communicator) -> None:
    comm.barrier()
    if comm.rank == VICTIM:
        raise SystemExit(0)
    comm.allreduce(np.ones(3), name="grad")


def test_a_rank_that_exits(nursery: Nursery) -> None:
    """A clean exit says goodbye, so it is told apart from a death."""
    for rank, outcome in enumerate(nursery.run(3, exits_early)):
        if rank != VICTIM:
            outcome.check_raised(
                PeerLostError,
                "it has shut down or exited while others still needed it",
                "allreduce 'grad' sum float64[3]",
            )


def several_victims(comm: Communicator) -> None:
    comm.barrier()
    if comm.rank in (1, 3, 4):
        die()
    comm.allgather(np.ones(100_000))


def test_several_at_once(nursery: Nursery) -> None:
    outcomes = nursery.run(5, several_victims)
    killed = max(outcomes[rank].notes["killed"] for rank in (1, 3, 4))
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, PeerLostError), outcomes[rank].trace
        ended = outcomes[rank].ended
        assert ended - killed < SECONDS
