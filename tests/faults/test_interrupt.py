"""Ctrl-C while a rank waits: KeyboardInterrupt there within a second, an error on its peers."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest

import multiring
from multiring import AbortedError, Communicator, MultiringError
from tests.faults.interrupts import interrupt_inside, tell
from tests.faults.operations import OPERATIONS, each
from tests.nursery import Nursery, Outcome, note

SECONDS = 1.0
NAMES = [name for name in OPERATIONS if "async" not in name and "large" not in name]


def interrupt_soon(delay: float) -> None:
    def interrupt() -> None:
        note("interrupted")
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(delay, interrupt).start()


def waiting(comm: Communicator, name: str) -> None:
    """Ranks 1 and 2 wait for rank 0, which comes when rank 1 has been interrupted."""
    step = OPERATIONS[name](comm)
    comm.barrier()
    if comm.rank == 1:
        tell(comm, 0)
    if comm.rank == 0:
        interrupt_inside(comm, 1)
        while not comm.is_broken:
            time.sleep(0.005)
    while True:
        step()


def check(outcomes: list[Outcome]) -> None:
    interrupted = outcomes[1]
    interrupted.check_raised(KeyboardInterrupt, since=outcomes[0].notes["interrupted"], within=SECONDS)
    for rank in (0, 2):
        outcome = outcomes[rank]
        outcome.check_raised(
            AbortedError,
            "rank 1 on ",
            "was interrupted in",
            since=outcomes[0].notes["interrupted"],
            within=2.0,
        )


@pytest.mark.parametrize("name", each(NAMES))
def test_while_waiting(nursery: Nursery, name: str) -> None:
    check(nursery.run(3, waiting, name))


def busy(comm: Communicator, name: str) -> None:
    step = OPERATIONS[name](comm)
    comm.barrier()
    if comm.rank == 1:
        interrupt_soon(0.03)
    while True:
        step()


@pytest.mark.parametrize("name", ["allreduce", "allreduce, large", "allreduce, symmetric", "alltoall, large"])
def test_while_working(nursery: Nursery, name: str) -> None:
    outcomes = nursery.run(3, busy, name)
    assert isinstance(outcomes[1].error, KeyboardInterrupt), outcomes[1].trace or outcomes[1]
    for rank in (0, 2):  # between two operations there is nothing to break: the rank leaves
        assert isinstance(outcomes[rank].error, MultiringError), outcomes[rank]


def waiting_for_work(comm: Communicator) -> None:
    other = comm.split(0)
    comm.barrier()
    if comm.rank == 1:
        work = comm.allreduce_async(np.ones(3))
        tell(comm, 0)
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        note("raised")
        assert not comm.is_broken  # it is the wait that was interrupted; the operation goes on
        other.barrier()
    else:
        if comm.rank == 0:
            interrupt_inside(comm, 1)
        other.barrier()
        work = comm.allreduce_async(np.ones(3))
    assert work.wait().tolist() == [3.0] * 3


def test_while_waiting_for_work(nursery: Nursery) -> None:
    outcomes = nursery.run(3, waiting_for_work)
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
    assert outcomes[1].notes["raised"] - outcomes[0].notes["interrupted"] < SECONDS


def in_init(rank: int) -> None:
    if rank == 1:
        interrupt_soon(0.1)
        multiring.init()


def test_in_init(nursery: Nursery) -> None:
    outcome = nursery.run(2, in_init, init=False)[1]
    outcome.check_raised(KeyboardInterrupt, since=outcome.notes["interrupted"], within=SECONDS)


def with_handler(comm: Communicator) -> int:
    """A handler that raises nothing does not disturb the operation."""
    seen: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, frame: seen.append(number))
    pids = comm.allgather(np.array([os.getpid()]))
    comm.barrier()
    if comm.rank == 0:
        os.kill(int(pids[1]), signal.SIGUSR2)
        time.sleep(0.2)
    assert comm.allreduce(np.ones(1))[0] == comm.size
    return len(seen)


def test_other_signals_are_handled_while_waiting(nursery: Nursery) -> None:
    outcomes = nursery.run(2, with_handler)
    assert [outcome.value for outcome in outcomes] == [0, 1], outcomes
